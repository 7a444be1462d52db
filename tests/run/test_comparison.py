"""`agentrl compare`: results are read from where they are, paired by task, and a verdict is given in plain words."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from each_case import each_case
from store.play import START
from typer.testing import CliRunner

from agentrl import notices
from agentrl.cli.main import app
from agentrl.config import parse
from agentrl.errors import UsageError
from agentrl.records import StopReason
from agentrl.run.comparison.compare import Comparison, Side, compare
from agentrl.run.comparison.plot import draw
from agentrl.run.comparison.results import Episode, Results, TaskKey, read
from agentrl.run.evaluation import held_out
from agentrl.run.run_folder import RunDir
from agentrl.store import Ending, RunStore

FAILED, OPEN = "failed", "open"
Ends = Sequence[float | str]


def run_at(path: Path, evaluations: dict[str, Ends], *, samples: int = 1, **settings: Any) -> Path:
    """A run whose set `easy` was measured at some moments: the outcome of each episode, `FAILED` for one that an engine
    ended, `OPEN` for one that goes on."""
    sets = [{"name": "easy", **settings}]
    config = parse({"model": "m", "env": {"id": "e"}, "eval": {"samples": samples, "sets": sets}})
    run = RunDir.create(path, config)
    with RunStore.open(run.store_path) as store:
        store.versions.confirm_version(store.versions.mint_version(0))
        for when, ends in evaluations.items():
            held_out.schedule(store, config, config.eval.sets[0], when, len(ends) // samples)
            for claim, end in zip(store.leases.claim("w", len(ends), lease_s=1e9), ends, strict=True):
                store.journal.begin(claim.episode_id, claim.fence, START)
                if end == OPEN:
                    continue
                outcome = None if end == FAILED else float(end)
                reason = StopReason.ENGINE_FAILED if outcome is None else StopReason.DONE
                success = None if outcome is None else outcome >= 1.0
                ending = Ending(stop_reason=reason, outcome=outcome, success=success)
                store.journal.finish(claim.episode_id, claim.fence, ending)
    return path


def lines_at(path: Path, rows: Sequence[Any], end: str = "\n") -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + end)
    return path


def paired(both: int, a_alone: int, b_alone: int, neither: int) -> tuple[Side, Side]:
    """Two models with one sample a task, by the numbers of tasks that both, one and none of them solved."""
    successes = [(True, True)] * both + [(True, False)] * a_alone + [(False, True)] * b_alone
    successes += [(False, False)] * neither
    return side("a", [a for a, _ in successes]), side("b", [b for _, b in successes])


def side(name: str, successes: Sequence[bool]) -> Side:
    tasks = {TaskKey("e", str(n)): [Episode(success, None, None, None)] for n, success in enumerate(successes)}
    return Side(name=name, models=[Results(name=name, source="", tasks=tasks)])


def verdict(*sides: Side, sequential: bool = False) -> Comparison:
    (pair,), _ = compare(sides, sequential=sequential)
    return pair


# --- the verdict ---


def test_no_pairing_makes_a_difference_of_30_4_and_31_2_percent_of_500_tasks() -> None:
    for a_alone in range(0, 153, 8):
        pair = verdict(*paired(152 - a_alone, a_alone, a_alone + 4, 500 - 156 - a_alone))
        assert not pair.is_shown and pair.sentence.startswith("no difference is shown: b minus a is 0.8 points")
        assert (pair.measures[0].a, pair.measures[0].b) == pytest.approx((0.304, 0.312))


def test_a_difference_is_said_of_the_better_one_with_its_interval_and_size() -> None:
    """Of 412 tasks 50 and 81 are solved by one alone: 31/412 is 7.5 points; 31/414 ± 1.9657 · 0.02754."""
    words = "b is better than a by 7.5 points, 95% interval 2.1 to 12.9; 412 tasks, 1 sample each"
    assert verdict(*paired(150, 50, 81, 131)).sentence == words
    a, b = paired(150, 50, 81, 131)
    assert verdict(b, a).sentence == words, "whoever is named first"


def test_with_one_sample_a_task_the_exact_test_has_to_agree() -> None:
    pair = verdict(*paired(200, 0, 5, 295))
    assert pair.measures[0].low > 0 and pair.measures[0].p == pytest.approx(0.0625) and pair.is_exact
    assert not pair.is_shown
    assert verdict(*paired(200, 0, 6, 294)).is_shown


def test_several_pairs_are_corrected_by_holm_and_it_is_said() -> None:
    """p is 0.0309 for a and b, the same for a and c, 1 for b and c: times 3, and never smaller than an earlier one."""
    a, b = paired(20, 4, 14, 62)
    comparisons, remarks = compare([a, b, Side(name="c", models=b.models)])
    assert [(pair.a, pair.b) for pair in comparisons] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert verdict(a, b).is_shown and not any(pair.is_shown for pair in comparisons)
    p = verdict(a, b).measures[0].p
    assert p is not None and [pair.p_adjusted for pair in comparisons] == pytest.approx([3 * p, 3 * p, 1.0])
    assert comparisons[0].sentence.endswith("100 tasks, 1 sample each; p 0.093 after Holm's correction")
    assert any("3 pairs" in line and "Holm" in line for line in remarks)


def test_models_are_never_called_algorithms_but_seeds_of_a_group_are_the_sample() -> None:
    a, b = paired(20, 4, 34, 42)
    _, remarks = compare([a, b])
    assert any("trained models, not algorithms" in line for line in remarks)
    several = [
        Side(name=name, models=[*first.models, *second.models], is_group=True)
        for name, first, second in (("x", a, side("a2", [True] * 100)), ("y", b, side("b2", [True] * 100)))
    ]
    (pair,), remarks = compare(several)
    assert pair.measures[0].difference == pytest.approx(0.15) and not pair.is_shown, "two seeds a side, far apart"
    assert not any("not algorithms" in line for line in remarks) and any(
        "seeds of training" in line for line in remarks
    )
    with pytest.raises(UsageError, match="one run"):
        compare([several[0], Side(name="y", models=b.models, is_group=True)])
    with pytest.raises(UsageError, match="--sequential"):
        compare(several, sequential=True)


def test_a_sequence_says_go_on_until_it_is_decided() -> None:
    a, b = side("a", [False] * 60), side("b", [n % 2 == 0 for n in range(60)])
    pair = verdict(a, b, sequential=True)
    assert pair.is_shown and pair.decided_after is not None
    before = pair.decided_after - 1
    early = verdict(side("a", [False] * before), side("b", [n % 2 == 0 for n in range(before)]), sequential=True)
    assert early.sentence.startswith("go on") and not early.is_shown
    assert pair.sentence.startswith(f"decided after {before + 1} tasks: b is better than a by 50.0 points")
    (wider, *_), remarks = compare([a, b, Side(name="c", models=b.models)], sequential=True)
    assert wider.measures[0].low < pair.measures[0].low and any("Bonferroni" in line for line in remarks)


# --- what is read, and what is left out ---


def test_runs_are_paired_by_task_and_what_infrastructure_ended_is_named(tmp_path: Path) -> None:
    ends: Ends = [1, 1, 0, FAILED, 0, 1, 1, 1]
    a = read(str(run_at(tmp_path / "a", {"after": ends}, samples=2)))
    b = read(str(run_at(tmp_path / "b", {"after": [1, 0, 0, 0, OPEN, 0]}, samples=2)))
    pair = verdict(Side(name="a", models=[a]), Side(name="b", models=[b]))
    assert (pair.tasks, pair.samples) == (2, (1, 2)), "seeds 0 and 1; of the latter a has one sample"
    assert pair.measures[0].a == pytest.approx(0.5) and pair.measures[0].b == pytest.approx(0.25)
    assert pair.left_out == {
        f"episodes of {a.name} that infrastructure ended": 1,
        f"tasks of {a.name} that others have not": 1,
        f"tasks of {b.name} that have not ended": 1,
    }
    assert [row.name for row in pair.measures] == ["success", "outcome", "turns", "tokens"], "pass@2 has one task"


def test_the_newest_evaluation_is_read_unless_a_moment_is_named(tmp_path: Path) -> None:
    moments: dict[str, Ends] = {"before": [0, 0], "during@2": [0, 1], "during@10": [1, 0], "after": [1, 1]}
    run = run_at(tmp_path / "run", moments)
    earlier = run_at(tmp_path / "earlier", {name: ends for name, ends in moments.items() if name != "after"})
    sources = [read(f"{place}").source for place in (run, f"{run}:before", f"{run}:during@2", f"{run}:during", earlier)]
    assert sources == [f"eval:easy:{when}" for when in ("after", "before", "during@2", "during@10", "during@10")]
    for place, set_name in ((f"{run}:now", None), (str(run), "hard")):
        with pytest.raises(UsageError, match=r"has no evaluation .*there are eval:easy:after"):
            read(place, set_name)


def test_tasks_with_other_arguments_are_other_tasks(tmp_path: Path) -> None:
    runs = [run_at(tmp_path / level, {"after": [1, 0, 1]}, kwargs={"level": level}) for level in ("one", "two")]
    with pytest.raises(UsageError, match=r"0 tasks in common .arguments or options"):
        compare([Side(name=run.name, models=[read(str(run))]) for run in runs])


HEADER = {"of": {"env": "e", "kwargs": {}, "options": {}, "model": "m"}}


def served(seed: int, success: bool) -> dict[str, Any]:
    return {"seed": seed, "outcome": float(success), "success": success, "reward": 0.0, "turns": 2, "messages": []}


def test_results_of_an_endpoint_are_in_the_order_of_their_tasks_up_to_the_first_that_goes_on(tmp_path: Path) -> None:
    first = 1_000_000_000
    rows = [HEADER, served(first + 5, True), served(first, False), {"seed": first + 1, "error": "no answer"}]
    rows += [{"seed": first + 2, "error": "no answer"}, served(first + 2, True), served(first + 3, True)]
    folder = tmp_path / "served"
    folder.mkdir()
    lines_at(folder / "results.jsonl", rows)
    results = read(str(folder))
    assert [int(key.task) - first for key, episodes in results.tasks.items() if episodes] == [0, 2, 3, 5]
    assert results.failed == 1 and {int(key.task) - first for key in results.unfinished} == {4}
    run = read(str(run_at(tmp_path / "run", {"after": [0] * 8})))
    sides = [Side(name="run", models=[run]), Side(name="served", models=[results])]
    assert verdict(*sides).tasks == 4, "a run and a server are paired by environment, seed and arguments"
    looked = verdict(*sides, sequential=True)
    assert looked.tasks == 3 and looked.left_out["tasks behind the first that has not ended"] == 1


def test_rows_of_a_file_are_paired_by_what_they_name(tmp_path: Path) -> None:
    rows = [{"task": f"t{n}", "sample": s, "success": n > s, "tokens": 5, "note": ""} for n in range(3) for s in (0, 1)]
    full = lines_at(tmp_path / "full.jsonl", [{**row, "env": "e"} for row in rows])
    with notices.gathered():
        bare = read(str(lines_at(tmp_path / "bare.jsonl", [*rows, '{"task": "t9", "suc'], end="")))
    assert {len(episodes) for episodes in bare.tasks.values()} == {2}
    counts = {
        what: entry.count for (boundary, what), entry in notices.OF_PROCESS.totals().items() if boundary == "results"
    }
    assert counts == {"the key 'note' is not used": 6, "a last line that is cut off is not used": 1}
    pair = verdict(Side(name="full", models=[read(str(full))]), Side(name="bare", models=[bare]))
    assert pair.tasks == 3 and pair.measures[0].difference == 0 and not pair.is_shown
    assert [row.name for row in pair.measures] == ["success", "pass@2", "pass^2", "tokens"]


def test_an_episode_that_infrastructure_ended_counts_until_it_is_played(tmp_path: Path) -> None:
    rows = [
        {"task": 1, "sample": 0, "error": "away"},
        {"task": 1, "sample": 1, "error": "away"},
        {"task": 2, "error": "x"},
    ]
    rows += [{"task": 1, "sample": 1, "success": True}, {"task": 2, "success": True}]
    results = read(str(lines_at(tmp_path / "rows.jsonl", rows)))
    assert results.failed == 2 and sum(map(len, results.tasks.values())) == 2, (
        "a row without sample is one more episode"
    )


@each_case(
    ("rows", "words"),
    [
        (["[1]"], "line 1 is no JSON object"),
        (["{", "{}"], "line 1 is no JSON object"),
        ([{"success": True}], "line 1 names no task"),
        ([{"task": 1}], "line 1 has neither success nor outcome"),
        ([{"task": 1, "success": "yes"}], "success is 'yes'"),
        ([{"task": 1, "outcome": "much"}], "outcome is 'much'"),
        (['{"task": 1, "outcome": NaN}'], "outcome is nan"),
        ([HEADER, {"task": 1, "success": 1}], "line 2 names no seed"),
        ([{"task": 1, "sample": 0, "success": 1}] * 2, "line 2 is the second row of task 1, sample 0"),
        ([{"task": 1, "error": "away"}], "no episode that ended by the model's own doing"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_with_its_line(rows: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read(str(lines_at(tmp_path / "rows.jsonl", rows)))


def no_evaluation(folder: Path) -> str:
    return str(run_at(folder / "run", {}))


@each_case(
    ("place", "words"),
    [
        (lambda folder: str(folder / "nowhere"), "holds no results"),
        (lambda folder: str(folder), "holds no results"),
        (no_evaluation, "was not measured on held-out tasks"),
        (lambda folder: f"{lines_at(folder / 'rows', [{'task': 1, 'success': 1}])}:after", "is no run"),
    ],
)
def test_a_place_without_results_is_refused(place: Callable[[Path], str], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read(place(tmp_path))


# --- the command ---


def printed(*words: object) -> str:
    done = CliRunner().invoke(app, ["compare", *map(str, words)], env={"COLUMNS": "100"})
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_the_command_prints_the_sentence_a_table_and_what_the_numbers_rest_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 of 40 tasks differ: 20/42 ± 2.0227 · 0.08164."""
    monkeypatch.chdir(tmp_path)
    for name, solved in (("a", 10), ("b", 30)):
        lines_at(Path(name), [{"task": n, "success": n < solved, "turns": 2} for n in range(40 if name == "a" else 42)])
    text = printed("a", "b")
    first, *rest = text.splitlines()
    assert first == "b is better than a by 50.0 points, 95% interval 31.1 to 64.1; 40 tasks, 1 sample each"
    (row,) = [line for line in rest if "success, %" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        *("success, %", "25.0", "75.0", "50.0", "31.1 to 64.1", "1.9e-06", "40")
    ]
    assert "Left out: 2 tasks of b that others have not" in rest
    value = json.loads(printed("a", "b", "--json"))
    assert value["comparisons"][0]["sentence"] == first and value["notes"] == rest[-len(value["notes"]) :]
    assert [model["tasks"] for model in value["models"]] == [40, 42]
    assert printed("--group", "x=a,b", "--group", "y=b,a").startswith("no difference is shown: y minus x is 0.0 points")


def test_the_picture_has_each_difference_with_its_interval(tmp_path: Path) -> None:
    comparisons, _ = compare([*paired(10, 2, 18, 10), side("c", [True] * 40)])
    figure = draw(comparisons, tmp_path / "differences.svg")
    for pair, axis in zip(comparisons, figure.axes, strict=True):
        (first, *_) = pair.measures
        *_, interval, middle, zero = axis.lines  # the first measure is drawn last, at the top
        drawn = [list(line.get_xdata()) for line in (interval, middle, zero)]
        assert drawn == [[100 * first.low, 100 * first.high], [100 * first.difference], [0.0, 0.0]]
        assert axis.get_title(loc="left").startswith(f"{pair.b} minus {pair.a}, points")
    assert (tmp_path / "differences.svg").read_text().startswith("<?xml")
    with pytest.raises(UsageError, match=r"--plot .*differences\.doc"):
        draw(comparisons, tmp_path / "differences.doc")


def test_a_plan_says_what_it_can_show_and_what_it_assumes() -> None:
    text = printed("--plan", 500)
    assert text.startswith("500 tasks with 1 sample of each model show a difference of 7.0 points with 80% power")
    assert "success of the first model 0.5; correlation" in text
    assert json.loads(printed("--plan", 500, "--json"))["smallest_difference"] == pytest.approx(0.07, abs=0.001)
    assert "show no difference" in printed("--plan", 3)


@each_case(
    "words",
    [
        "a",
        "a a",
        "a b --plan 5",
        "a b --plot no_folder/differences.png",
        "a b --samples 4",
        "a b --group x=a,b",
        "--group x --group y=a",
        "--group x=a,a --group y=b,c",
        "--plan 1",
    ],
)
def test_a_request_that_cannot_be_is_refused(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        lines_at(Path(name), [{"task": n, "success": True} for n in range(3)])
    done = CliRunner().invoke(app, ["compare", *words.split()])
    assert isinstance(done.exception, UsageError), done.output
