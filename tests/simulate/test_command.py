"""`agentrl simulate`: the table, the advice, the file of numbers, and one clear line for what cannot be simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.errors import UsageError

RUN = """
model = "m"
[env]
id = "e"
[rollout]
max_running = 64
[buffer]
groups_per_step = 8
close = "full"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def simulate(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    if done.exception is not None:
        raise done.exception
    return done.output


def test_a_sweep_prints_a_row_a_case_and_says_what_to_change(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    text = simulate(file, "--episode", "lognormal:1", "--step-s", 1, "--max-lag", "2,4", "--steps", 12, "--json", out)
    rows = json.loads(out.read_text())
    assert [(row["max_lag"], row["policy"]) for row in rows] == [
        (2, "full"),
        (2, "6 of 8"),
        (4, "full"),
        (4, "6 of 8"),
    ]
    assert [row["policy"] for row in rows if row["present"]] == ["full"]
    assert all(row["policy"] in text for row in rows)
    assert "and a quorum of 6 of 8 the learner would be idle" in text


def test_settings_that_nothing_beats_are_left_alone(file: Path) -> None:
    text = simulate(file, "--episode", "constant:1", "--step-s", 5, "--steps", 8)
    assert "Leave it as it is" in text


def test_gpus_are_split_in_every_way_and_the_best_one_is_named(file: Path) -> None:
    """A step of 3 s on one GPU for the 64 episodes of a second on another: of four, three belong to the learner."""
    text = simulate(file, "--episode", "constant:1", "--step-s", 3, "--gpus", 4, "--steps", 8)
    assert all(split in text for split in ("1 + 3", "2 + 2", "3 + 1"))
    assert "With GPUs split 1 + 3 (engines + learner)" in text


def test_a_batch_that_grows_with_the_slots_keeps_the_learner_as_busy(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    times = ["--episode", "constant:1", "--step-s", 2]
    simulate(file, *times, "--slots", 128, "--scale-batch", "--steps", 8, "--json", out)
    batches = {row["slots"]: row["groups_per_step"] for row in json.loads(out.read_text())}
    assert batches == {64: 8, 128: 16}


GIVEN = ["FILE", "--episode", "lognormal:1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give a run file, a finished run"),
        (["FILE"], "no times: give a finished run"),
        (["FILE", "--episode", "lognormal:1"], "no time of an optimizer step: give --step-s"),
        ([*GIVEN, "--step-s", "0"], "--step-s 0: must be a number of seconds above 0"),
        ([*GIVEN, "--step-s", "nan"], "--step-s nan: must be a number of seconds above 0"),
        ([*GIVEN, "--step-s", "inf"], "--step-s inf: must be a number of seconds above 0"),
        (
            [*GIVEN, "--step-s", "1", "--slots", "many"],
            "--slots 'many': write whole numbers",
        ),
        (
            [*GIVEN, "--step-s", "1", "--max-lag", "-1"],
            "--max-lag '-1': no number may be below",
        ),
        ([*GIVEN, "--step-s", "1", "--close", "most"], "--close 'most' is not known"),
        ([*GIVEN, "--step-s", "1", "--gpus", "1"], "--gpus 1: engines and learner"),
        (["FILE", "--from", "nowhere"], "nowhere holds no run"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(file: Path, arguments: list[str], says: str) -> None:
    with pytest.raises(UsageError) as error:
        simulate(*[str(file) if part == "FILE" else part for part in arguments])
    assert says in str(error.value)
    assert "\n" not in str(error.value)
