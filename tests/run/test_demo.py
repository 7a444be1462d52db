"""`agentrl demo`: which run it chooses for a machine, and what it trains and prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import agentrl
from each_case import each_case

import agentrl as library
from agentrl.cli import demo
from agentrl.config import load


def bwrap(folder: Path, script: str | None) -> str:
    """A PATH on which bubblewrap is this shell script, or is missing."""
    folder.mkdir()
    if script is not None:
        program = folder / "bwrap"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    return str(folder)


@each_case(
    ("script", "run", "reason"),
    [
        ("echo ok", demo.CODER, ""),
        (None, demo.LOCKSMITH, "bubblewrap: not installed"),
        ("echo 'No permissions to create new namespace' >&2; exit 1", demo.LOCKSMITH, "bubblewrap: ?, but it cannot"),
    ],
)
def test_code_of_a_model_runs_only_where_there_are_boxes(
    script: str | None, run: demo.DemoRun, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", bwrap(tmp_path / "bin", script))
    chosen, line = demo.choose(real=False)
    assert chosen is run and line.startswith(reason) and bool(line) is bool(reason)


@each_case("run", [demo.CODER, demo.LOCKSMITH, demo.REAL])
def test_each_run_is_complete_in_any_folder(run: demo.DemoRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel has no examples/ beside the working folder: the environment must be found nevertheless."""
    monkeypatch.chdir(tmp_path)
    config = load(run.file, list(run.settings))
    library.make(config.env.id, **config.env.kwargs).close()
    assert config.eval.sets, "the table at the end compares held-out tasks before and after"
    explained = [row.split(":")[0] for row in run.rows]
    assert explained == [each.name for each in config.eval.sets] or len(config.eval.sets) == 1


@pytest.mark.slow
def test_it_trains_without_boxes_and_says_what_to_do_next(tmp_path: Path) -> None:
    small = ("train.steps=2", "eval.every=0", 'eval.sets=[{ name = "held_out", n = 4 }]')
    settings = [word for setting in small for word in ("--set", setting)]
    words = ("demo", "--out", tmp_path / "demo", *settings)
    done = agentrl(*words, env={"PATH": bwrap(tmp_path / "bin", None)})
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "demo/summary.json").read_text())
    assert summary["steps_updated"] == 2 and summary["eval"]["after"]["n"] == 4
    assert (tmp_path / "demo/curves.png").stat().st_size > 10_000
    assert sum(line.startswith("next: agentrl ") for line in done.out.splitlines()) == 3
    again = agentrl(*words, env={"PATH": bwrap(tmp_path / "again", None)})
    assert again.code == 2 and "--overwrite" in again.err and "train --resume" in again.err
