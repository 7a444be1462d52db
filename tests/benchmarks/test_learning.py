"""The table of learning: what is run next, what a row says, and what the page says of rows that are not there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import learning
import pytest

from agentrl import config, registry


def row(configuration: learning.Configuration, seed: int, **said: Any) -> dict[str, Any]:
    return {
        "configuration": configuration.name,
        "seed": seed,
        "settings": [*learning.CHEAP, *configuration.settings],
        "code": "abc",
        "before": 0.4,
        "after": 0.9,
        "steps": 8,
        "lag_mean": 1.0,
        "lag_max": 2,
        "wall_s": 100,
        "cpu_s": 60,
        "success": [0.0] * 3 + [1.0] * 5,
        **said,
    }


@pytest.mark.parametrize("configuration", learning.configurations(), ids=lambda one: one.name)
def test_each_configuration_is_a_run_that_can_begin(configuration: learning.Configuration) -> None:
    chosen = config.load(learning.RUN_FILE, [*learning.CHEAP, *configuration.settings])
    assert (chosen.train.steps, chosen.buffer.groups_per_step) == (80, 4)
    assert [(held_out.name, held_out.n) for held_out in chosen.eval.sets] == [("held_out", learning.TASKS)]


def test_every_algorithm_has_a_configuration() -> None:
    tried = {
        config.load(learning.RUN_FILE, one.settings).algo.kind  # of its own name, too: a new kind is found by it
        for one in learning.configurations()
    }
    assert tried == set(registry.ids("algorithms")) - {"rloo", "distil"}
    grpo, rloo = (config.algorithm(kind)().model_dump(exclude={"kind"}) for kind in ("grpo", "rloo"))
    assert grpo == rloo  # one serves for both


def test_seeds_go_round_and_ablations_come_last() -> None:
    first, second, last = learning.FIRST[0], learning.Configuration("other"), learning.LAST[0]
    assert [(one.name, seed) for one, seed in learning.jobs([last, first, second], None)] == [
        *[(one.name, seed) for seed in (1, 2, 3) for one in (first, second)],
        *[(first.name, seed) for seed in (4, 5)],
        *[(last.name, seed) for seed in (1, 2, 3)],
    ]
    assert learning.jobs([first], [7]) == [(first, 7)]


def test_a_row_of_other_settings_is_not_the_same_run() -> None:
    one = learning.FIRST[0]
    rows = [row(one, 2), row(one, 1), row(one, 3, settings=["train.steps=80"])]
    assert [found["seed"] for found in learning.found(rows, one)] == [1, 2]
    assert learning.found(rows, learning.FIRST[1]) == []


def test_the_level_is_reached_where_the_mean_of_the_last_steps_is_at_it() -> None:
    rates = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]  # means of five: 0.6, 0.6, 0.8
    assert (learning.steps_to(rates), learning.steps_to(rates[:6]), learning.steps_to([1.0])) == (7, None, None)


def test_the_table_has_medians_and_ranges_and_says_what_was_not_run() -> None:
    one, other = learning.Configuration("one", seeds=4), learning.Configuration("other", ("algo.kind=ppo",))
    rows = [
        row(one, 1, after=0.5, success=[0.0] * 8, lag_max=1),
        row(one, 2, after=0.9),
        row(one, 4, after=0.7, lag_mean=3.0),
    ]
    head, _, cells, _, missing, versions = learning.table(rows, [one, other])
    assert cells.split(" | ")[1:7] == [
        "3 of 4", "0.400", "0.700 (0.500 to 0.900)", "7 (7 to >8)", "1.0, 2", "100"
    ]  # fmt: skip
    assert len(head.split(" | ")) == len(cells.split(" | "))
    assert missing == "**Not run:** one (seed 3), other (all 3 seeds)."
    assert versions == "Versions of the code: abc."


def test_the_page_is_that_of_the_rows() -> None:
    """Nobody wrote into its table by hand, and it holds every row that is there."""
    rows = json.loads((learning.HERE / "learning.json").read_text())
    between = learning.PAGE.read_text().split(learning.BEGIN)[1].split(learning.END)[0].strip()
    measured = [line for line in between.splitlines() if "Not run" not in line]  # a new algorithm has no rows yet
    assert measured == [line for line in learning.table(rows, learning.configurations()) if "Not run" not in line]


def test_finished_runs_are_kept_and_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []
    published: list[int] = []

    def run(configuration: learning.Configuration, seed: int, folder: Path) -> dict[str, Any]:
        made.append((configuration.name, seed))
        if configuration.name == "ppo":
            raise subprocess.CalledProcessError(1, ["agentrl"], stderr="it failed")
        return row(configuration, seed)

    monkeypatch.setattr(learning, "run", run)
    monkeypatch.setattr(learning, "publish", lambda rows: published.append(len(rows)))
    out = tmp_path / "rows.json"
    words = ["learning", "--out", str(out), "--seeds", "1", "--only"]
    for only, code in ((["grpo"], 0), (["grpo", "ppo", "gspo"], "1 runs failed")):
        monkeypatch.setattr("sys.argv", [*words, *only])
        with pytest.raises(SystemExit) as ended:
            learning.main()
        assert ended.value.code == code
    assert made == [("grpo", 1), ("ppo", 1), ("gspo", 1)]
    assert [one["configuration"] for one in json.loads(out.read_text())] == ["grpo", "gspo"]
    assert published == [1, 2]
    monkeypatch.setattr("sys.argv", [*words, "ppo", "--most-minutes", "0"])
    with pytest.raises(SystemExit):
        learning.main()
    assert len(made) == 3
