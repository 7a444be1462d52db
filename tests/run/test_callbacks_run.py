"""Whole runs with callbacks: killed and resumed, stopped from another thread, ended by one that raises."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl import Callback, Trainer
from agentrl.errors import CallbackError
from agentrl.run.run_folder import RunDir

from .test_run import DEADLINE_S, assert_nothing_remains, last_step, wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, agentrl
out, steps, *resumed = sys.argv[1:]

class Log(agentrl.Callback):
    def _note(self, event):
        with open(f"{out}.told", "a") as file:
            file.write(event.id + "\\n")
    on_step = on_episode = on_eval = on_weights = _note

def vowels(completions, **kwargs):
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]

tracker = agentrl.FileTracker(f"{out}.tracked.jsonl", events=("step", "eval", "episode"))
rows = [{"prompt": f"say {word}"} for word in ("one", "two", "three")]
small = {
    "rollout": {"group_size": 2, "max_running": 4, "max_tokens_per_turn": 6},
    "engine": {"max_batch": 8, "kv_cache_mb": 64},
    "buffer": {"groups_per_step": 1, "skip_without_signal": False},
    "train": {"steps": int(steps), "checkpoint_every": 2},
}
if resumed:
    agentrl.Trainer.resume(out, settings=[f"train.steps={steps}"], callbacks=[Log(), tracker])
else:
    data = {"dataset": rows, "reward_funcs": vowels, "eval_dataset": rows[:1]}
    agentrl.Trainer("agentrl/tiny-coder", **data, config=small, out=out, callbacks=[Log(), tracker]).train()
"""


def script(tmp_path: Path, *arguments: object) -> subprocess.Popen[str]:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    words = [sys.executable, str(file), str(tmp_path / "run"), *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)


def told(tmp_path: Path) -> list[str]:
    file = tmp_path / "run.told"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.long
def test_killed_and_resumed_a_run_has_told_everything_and_its_trackers_file_has_it_once(tmp_path: Path) -> None:
    process = script(tmp_path, 5_000)  # so that the kill comes before its end
    wait_until(lambda: "step:1:3" in told(tmp_path), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=DEADLINE_S)
    before, run = told(tmp_path), RunDir.open(tmp_path / "run")
    with run.lock():  # its learner, too, has ended
        last = last_step(run) + 3
    resumed = script(tmp_path, last, "resumed")
    _, errors = resumed.communicate(timeout=DEADLINE_S)
    assert resumed.returncode == 0, errors
    assert_nothing_remains(run)

    with closing(sqlite3.connect(tmp_path / "run" / "store.sqlite")) as db:
        steps = db.execute(
            "SELECT attempt, step FROM metrics WHERE kind = 'step' AND undone_attempt IS NULL"
        ).fetchall()
        undone = db.execute("SELECT attempt, step FROM metrics WHERE undone_attempt IS NOT NULL").fetchall()
        episodes = db.execute("SELECT id FROM episodes WHERE stop_reason IS NOT NULL").fetchall()
        versions = db.execute(
            "SELECT version FROM versions WHERE confirmed_s IS NOT NULL AND undone_attempt IS NULL"
        ).fetchall()
        evaluations = db.execute("SELECT COUNT(DISTINCT purpose) FROM groups WHERE purpose LIKE 'eval:%'").fetchone()[0]
    assert sorted(step for _, step in steps) == list(range(1, last + 1))
    expected = {f"step:{attempt}:{step}" for attempt, step in steps} | {f"episode:{id}" for (id,) in episodes}
    expected |= {f"weights:{version}" for (version,) in versions}
    counts = Counter(told(tmp_path))
    assert expected <= counts.keys()
    assert sum(id.startswith("eval:") for id in counts) == evaluations == 2
    twice = {id for id, times in counts.items() if times > 1}
    assert max(counts.values()) <= 2 and twice <= set(before), "only what was told right before the kill"
    assert {id for id in counts if id.startswith("step:")} <= expected | {f"step:{at}:{step}" for at, step in undone}

    lines = [json.loads(line) for line in (tmp_path / "run.tracked.jsonl").read_text().splitlines()]
    ids = Counter(line["id"] for line in lines)
    assert max(ids.values()) == 1
    assert {id for id in ids if not id.startswith("eval:")} == {id for id in expected if not id.startswith("weights:")}
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, last + 1))


def vowels(prompt: Any, completion: str, row: Any) -> float:
    return sum(letter in "aeiou" for letter in completion) / max(1, len(completion))


ROWS = [{"prompt": f"say {word}"} for word in ("one", "two", "three")]
SMALL: dict[str, Any] = {
    "rollout": {"group_size": 2, "max_running": 4, "max_tokens_per_turn": 6},
    "engine": {"max_batch": 8, "kv_cache_mb": 64},
    "buffer": {"groups_per_step": 1, "skip_without_signal": False},
    "train": {"steps": 8, "checkpoint_every": 100},
}


def test_stopped_from_a_loop_measured_resumed_and_ended_by_a_callback(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ends: list[Any] = []
    watcher = Callback(name="watcher", on_step=lambda step: trainer.stop(), on_end=ends.append)
    trainer = Trainer(
        "agentrl/tiny-coder",
        dataset=ROWS,
        reward_funcs=vowels,
        eval_dataset=ROWS[:1],
        # More steps than a machine makes before it hears of the stop, however slowly its callbacks are told.
        config=SMALL | {"train": {"steps": 5_000, "checkpoint_every": 5_000}},
        out=out,
        callbacks=[watcher],
    )
    assert trainer.stop() is False, "nothing is under way"

    async def beside() -> dict[str, Any]:
        return await asyncio.to_thread(trainer.train)

    summary = asyncio.run(beside())
    done = summary["steps"]
    assert 1 <= done < 5_000 and summary["stopped_early"] == "stopped by Trainer.stop"
    assert summary["eval"]["after"]["n"] == 1 and [(end.step, end.finished) for end in ends] == [(done, True)]
    run = RunDir.open(out)
    assert sorted(run.checkpoints.iterdir())[-1].name == f"step-{done:08d}", "it lost no step"
    (measured,) = trainer.evaluate(2)
    assert measured.n + measured.failed == 2

    def boom(step: Any) -> None:
        raise ValueError("no more")

    with pytest.raises(CallbackError, match=r"callback mine: on_step\(step:\d+:1\) raised ValueError: no more"):
        Trainer.resume(out, callbacks=[Callback(name="mine", on_step=boom)])
    assert (out / f"summary-{done}.json").exists() and not run.summary.exists()
    later = max(int(folder.name[5:]) for folder in run.checkpoints.iterdir())
    told: list[int] = []
    watcher = Callback(name="watcher", on_step=lambda step: told.append(step.step))
    summary = Trainer.resume(out, settings=[f"train.steps={later + 3}"], callbacks=[watcher])
    assert summary["steps"] == later + 3 and summary["stopped_early"] is None and later < 5_000
    assert told == list(range(done + 1, later + 4)), "each of the steps that came after, once"
    assert_nothing_remains(run)
