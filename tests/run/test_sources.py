"""Training tasks from the run file: what a table means, what is refused, and a run that comes to its end."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from each_case import each_case

from agentrl.config import from_json, load, parse, to_json
from agentrl.env.tasks import Curriculum
from agentrl.errors import ConfigError, UsageError
from agentrl.records import GroupState
from agentrl.registration import make
from agentrl.run.run_folder import RunDir
from agentrl.run.task_sources import changed_rows, digests_of, task_source
from agentrl.run.trainer import Trainer, check_startable
from agentrl.store import RunStore
from agentrl.store.audit import audit

from .gate import Gate
from .test_run import DEADLINE_S, ENVS, SMALL, assert_nothing_remains, started, wait_for_step

ROWS = [{"question": f"q{n}"} for n in range(6)]


def run_file(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    file = folder / "run.toml"
    file.write_text('model = "m"\n' + text)
    return file


def test_without_tables_the_tasks_are_the_seeds_of_the_environment() -> None:
    def source(seed: int) -> Any:
        document = {"model": "m", "seed": seed, "env": {"id": "a/E", "kwargs": {"n": 1}}}
        return task_source(parse(document))

    first, again, other = ([source(seed).task(i) for i in range(50)] for seed in (1, 1, 2))
    assert first == again
    assert not {task.seed for task in first} & {task.seed for task in other}
    assert (first[3].seed, first[3].env, first[3].kwargs) == (1_000_003 + 3, "a/E", {"n": 1})
    assert source(1).size is None


def test_tables_are_a_mixture_of_rows_and_seeds(tmp_path: Path) -> None:
    config = load(
        run_file(
            tmp_path / "runs",
            """
            [[tasks]]
            id = "a/Quiz"
            kwargs = { hard = true }
            rows = "rows.jsonl"
            epochs = 2
            [[tasks]]
            id = "a/Sums"
            first_seed = 40
            seeds = 4
            epochs = 1
            weight = 0.5
            """,
        )
    )
    assert config.env.id == "a/Quiz", "evaluation falls back to it"
    assert config.env.kwargs == {}
    source = task_source(config)
    tasks = list(source)
    assert source.size == len(tasks) == 16
    assert Counter(task.env for task in tasks[:9]) == {"a/Quiz": 6, "a/Sums": 3}
    quiz = [task for task in tasks if task.env == "a/Quiz"]
    assert Counter(task.options["question"] for task in quiz) == dict.fromkeys((row["question"] for row in ROWS), 2)
    assert all(task.kwargs == {"hard": True} for task in quiz)
    assert sorted(task.seed for task in tasks if task.env == "a/Sums") == [40, 41, 42, 43]
    assert list(task_source(from_json(to_json(config)))) == tasks, "the same from the run's own copy, anywhere"


def test_tables_take_what_they_leave_out_from_the_environment() -> None:
    document = {"model": "m", "env": {"id": "a/E", "kwargs": {"n": 1, "m": 1}, "options": {"o": 1}}}
    source = task_source(parse({**document, "tasks": [{"kwargs": {"m": 2}, "seeds": 2, "epochs": 1}, {"id": "b/E"}]}))
    assert (source.task(0).kwargs, source.task(0).options) == ({"n": 1, "m": 2}, {"o": 1})
    assert (source.task(1).env, source.task(1).kwargs, source.task(1).options) == ("b/E", {}, {})


def test_a_curriculum_goes_over_the_tables(tmp_path: Path) -> None:
    config = load(run_file(tmp_path, '[[tasks]]\nid = "a/Quiz"\nrows = "rows.jsonl"\n[curriculum]\npool = 100\n'))
    source = task_source(config)
    assert isinstance(source, Curriculum)
    pool = [source.task(index) for index in range(6)]
    assert sorted(task.options["question"] for task in pool) == [row["question"] for row in ROWS]
    for task in pool[1:]:
        source.observe(task, 1.0, plays=8)
    assert {source.task(index).options["question"] for index in range(6, 11)} == {pool[0].options["question"]}
    assert source.pausing == (5, 0)


@each_case(
    ("text", "said"),
    [
        ("[[tasks]]\nseeds = 3\n", "env is required: "),
        ('[[tasks]]\nid = "a/E"\nrows = "r.jsonl"\nseeds = 3\n', "tasks.seeds = 3: rows bring their own seeds"),
        ('[[tasks]]\nid = "a/E"\nepochs = 3\n', "tasks.epochs = 3: an endless stream of seeds has none"),
        ('[[tasks]]\nid = "a/E"\nsedes = 3\n', r"tasks\.0\.sedes = 3: no such key; did you mean 'seeds'"),
        ('[env]\nid = "a/E"\n[curriculum]\npoll = 5\n', "did you mean 'pool'"),
        ('[[tasks]]\nid = "a/E"\nseeds = 3\nepochs = 1\n[curriculum]\n', "a curriculum decides how often"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(run_file(tmp_path, text))


def test_rows_that_changed_since_the_run_went_on_last_are_named_once(tmp_path: Path) -> None:
    text = '[env]\nid = "agentrl.env.dataset_env:RowsEnv"\n[[tasks]]\nrows = "rows.jsonl"\n'
    text += '[[tasks]]\nid = "a"\nseeds = 3\n'
    file = run_file(tmp_path, text + '[[eval.sets]]\nname = "e"\nkwargs = { rows = "EVAL" }\n')
    held_out = tmp_path / "held_out.csv"
    held_out.write_text("q\n1\n")
    file.write_text(file.read_text().replace("EVAL", str(held_out)))
    config = load(file)
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        assert changed_rows(digests_of(config), store) == []
        assert changed_rows(digests_of(config), store) == []
        (tmp_path / "rows.jsonl").write_text('{"question": "another"}\n')
        assert changed_rows(digests_of(config), store) == [f"tasks.0.rows = {str(tmp_path / 'rows.jsonl')!r}"]
        assert changed_rows(digests_of(config), store) == []
        held_out.write_text("q\n2\n")
        assert changed_rows(digests_of(config), store) == [f"eval.sets.0.kwargs.rows = {str(held_out)!r}"]
        held_out.unlink()
        with pytest.raises(UsageError, match=r"cannot read '.*held_out.csv'"):
            digests_of(config)


def test_rows_that_are_missing_are_named_before_anything_starts(tmp_path: Path) -> None:
    config = {**SMALL, "tasks": [{"id": f"{ENVS}:Vowels", "rows": str(tmp_path / "gone.jsonl")}]}
    with pytest.raises(UsageError, match=r"cannot read '.*gone\.jsonl': No such file or directory"):
        Trainer(config=config, out=tmp_path / "run").train()
    assert not (tmp_path / "run").exists()


@each_case(
    "section",
    [
        {"env": {"id": f"{ENVS}:Vowels", "kwargs": {"levle": 1}}},
        {"tasks": [{"id": f"{ENVS}:Vowels"}, {"id": f"{ENVS}:Vowels", "kwargs": {"levle": 1}}]},
        {"tasks": [{"id": f"{ENVS}:Vowels"}], "eval": {"sets": [{"name": "other", "kwargs": {"levle": 1}}]}},
    ],
)
def test_what_an_environment_does_not_take_is_named_before_anything_starts(
    tmp_path: Path, section: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=r"Vowels cannot be made with \{'levle': 1\}"):
        Trainer(config={**SMALL, **section}, out=tmp_path / "run").train()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"ranks": 4, "tensor": 4}, "train.parallel.tensor = 4: the model's num_key_value_heads = 2 .* give 1 or 2"),
        ({"ranks": 2, "expert": 2}, "train.parallel.expert = 2: the model's config.json has no num_experts: give 1"),
    ],
)
def test_ranks_that_cannot_divide_the_model_are_refused_before_anything_starts(
    parallel: dict[str, int], said: str
) -> None:
    document = {"model": "agentrl/tiny-coder", "env": {"id": f"{ENVS}:Vowels"}, "train": {"parallel": parallel}}
    with pytest.raises(ConfigError, match=said):
        check_startable(parse(document))


def checked(capsys: pytest.CaptureFixture[str], tests_s: float, **rollout: float) -> str:
    """What is said at the start of a run of tests that may take so long."""
    kwargs = {"apart": False, "tests_s": tests_s}
    env = {"id": "agentrl/SWE-v0", "kwargs": kwargs}
    train = {"stall_deadline_s": 1800}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.run.trainer.check_tasks", lambda config: None)  # a process, which says nothing of it
        check_startable(parse({"model": "agentrl/tiny-coder", "env": env, "rollout": rollout, "train": train}))
    return capsys.readouterr().err


@pytest.mark.medium
def test_an_honest_step_that_is_longer_than_its_deadline_is_said_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert checked(capsys, 600.0) == (
        "agentrl: warning: one step of agentrl/SWE-v0 may honestly take 600 s (tests_s); rollout.step_deadline_s = 60"
        " and rollout.episode_deadline_s = 300 would end it as the policy's time limit:"
        " --set rollout.step_deadline_s=600 --set rollout.episode_deadline_s=600\n"
    )
    assert checked(capsys, 200.0, step_deadline_s=100.0).endswith("limit: --set rollout.step_deadline_s=200\n")
    assert checked(capsys, 600.0, step_deadline_s=600.0, episode_deadline_s=900.0, group_deadline_s=900.0) == ""
    assert checked(capsys, 60.0) == ""


@each_case(
    ("id", "kwargs", "needs"),
    [
        ("SWE", {"apart": False, "tests_s": 90.0}, (90.0, "tests_s")),
        ("SWE", {}, (30.0, "")),
        ("Harbor", {}, (80.0, "verifier.timeout_sec of its tasks")),
        ("RepoRepair", {}, (50.0, "")),
        ("CodeRepair", {}, (20.0, "")),
        ("Calculator", {}, (0.0, "")),
        ("Program", {"program": ["true"]}, (0.0, "")),
        ("Program", {"program": ["true"], "silence_s": 300.0}, (300.0, "silence_s")),
    ],
)
def test_environments_say_what_one_of_their_steps_may_take(id: str, kwargs: dict, needs: tuple[float, str]) -> None:
    with make(f"agentrl/{id}-v0", **kwargs) as env:
        assert (env.needs_step_s, env.needs_step_by) == needs


def groups_of(store: RunStore, step: int) -> set[int]:
    """The groups whose members a step trained."""
    return {store.reads.trajectory(id).group_id for id in store.lineage.episodes_of(step)}


@pytest.mark.slow
def test_a_run_ends_with_its_tasks_and_trains_each_once(tmp_path: Path) -> None:
    """Three tasks in steps of two groups: a whole step, and a last one of one group."""
    tasks = [{"id": f"{ENVS}:Vowels", "first_seed": 30, "seeds": 3, "epochs": 1}]
    config = {**SMALL, "tasks": tasks, "train": {"steps": 50, "checkpoint_every": 3}, "eval": {"sets": []}}
    summary = Trainer(config=config, out=tmp_path / "run").train()
    run = RunDir.open(tmp_path / "run")
    assert (summary["steps"], summary["episodes"]) == (2, 12)
    with RunStore.open(run.store_path) as store:
        assert audit(store).violations == []
        assert store.groups.counts() == {GroupState.TRAINED: 3}
        trained = [groups_of(store, step) for step in (1, 2)]
        assert [len(groups) for groups in trained] == [2, 1]
        assert sorted(store.reads.group(id).task.seed for groups in trained for id in groups) == list(range(30, 33))
    assert_nothing_remains(run)
    again = Trainer.resume(run.path)
    assert (again["steps"], again["episodes"]) == (2, 12), "nothing is left to do"


@pytest.mark.slow
def test_law_2_killed_in_the_middle_of_its_tasks_a_run_plays_each_of_them_once(tmp_path: Path) -> None:
    """The lag bound is wide: a group that the crash left behind must not be dropped for its age."""
    settings = {**SMALL, "train": {"steps": 50, "checkpoint_every": 1}, "buffer": {**SMALL["buffer"], "max_lag": 9}}
    gate = Gate(tmp_path, at=78)
    lines = [f"model = {json.dumps(SMALL['model'])}", "[[tasks]]", "seeds = 13", "epochs = 1", "first_seed = 70"]
    lines += [f"id = {json.dumps(f'{ENVS}:Held')}", f"kwargs = {{{gate.kwargs}}}"]
    for section in ("rollout", "engine", "buffer", "train"):
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in settings[section].items())]
    file = tmp_path / "run.toml"
    file.write_text("\n".join(lines))
    run = RunDir(tmp_path / "run")
    with started("train", file, "--out", run.path) as process:
        wait_for_step(run.path, 2, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)
    gate.open()
    with started("train", "--resume", run.path) as process:
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    with RunStore.open(run.store_path) as store:
        assert audit(store).violations == []
        assert store.lineage.attempt >= 2
        assert store.groups.counts() == {GroupState.TRAINED: 13}
        trained = [groups_of(store, step) for step in range(1, 8)]
        assert sorted(store.reads.group(id).task.seed for groups in trained for id in groups) == list(range(70, 83))
    assert_nothing_remains(run)
