"""A small run for the page's tests: a trained group, one that goes on, an evaluation, and texts that mean harm."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from store.play import START, admit, answer, play, serve, turn

from agentrl.config import parse
from agentrl.env.image_parts import png
from agentrl.records import StopReason, Task
from agentrl.run.run_folder import RunDir
from agentrl.store import Ending, RunStore
from agentrl.tokens import images

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    "\x1b[31mred\x1b[0m \u202eesrever\u202c \x00 \ud800 javascript:alert(1)"
)
LONG = "x" * 60_000
FILE = "../<b onclick='window.hacked = 1'>\x1b[31m\u202eyp.txt"
CHANGED = {"path": FILE, "old_str": "a\n<b>b</b>\nc", "new_str": "a\n<script>window.hacked = 1</script>\nc"}
EDIT = f"<tool_call>{json.dumps({'name': 'str_replace', 'arguments': CHANGED})}</tool_call>"
DONE = "action 1"
PICTURE = images.read(png(np.full((8, 12, 3), 200, dtype=np.uint8)))


def make_run(path: Path, **sections: Any) -> RunDir:
    """Group 1, of episodes 1 and 2, is trained by step 1; of group 2 episode 3 has failed and 4 goes on; episode 5 is
    of an evaluation. Episode 1 wrote `HOSTILE`, and was answered it and `LONG`; episode 2
    edited the file `FILE`, and was shown `PICTURE`. `sections` are more of its run file."""
    document = {"name": "made", "model": "m", "env": {"id": "test/Env-v0"}, "train": {"steps": 4}, **sections}
    run = RunDir.create(path, parse(document))
    with RunStore.open(run.store_path) as store:
        serve(store, 0)
        admit(store)
        store.groups.add_groups([Task(index=0, env="test/Env-v0", seed=5)], size=1, purpose="eval:tasks:before")
        held_out, first, second, failed, _ = store.leases.claim("worker", 5, lease_s=1e6)
        play(store, held_out, turns=1, outcome=1.0)
        store.journal.begin(first.episode_id, first.fence, START)
        store.journal.journal_turn(first.episode_id, first.fence, replace(turn(0, 1), text=HOSTILE))
        said = ({"role": "tool", "content": HOSTILE}, {"role": "tool", "content": LONG})
        store.journal.journal_step(
            first.episode_id, first.fence, 0, replace(answer(0, last=True), observation=said, reward=0.5)
        )
        store.journal.finish(
            first.episode_id, first.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
        )
        store.journal.begin(second.episode_id, second.fence, START)
        for index in range(2):
            at = time.time() + index
            played = replace(turn(index, 1), text=(EDIT, DONE)[index], started_s=at, ended_s=at + 0.5)
            store.journal.journal_turn(second.episode_id, second.fence, played)
            said = answer(index, last=index == 1)
            if index == 0:
                said = replace(said, observation=({**said.observation[0], "images": [{"at": 0, "url": PICTURE.url}]},))
            store.journal.journal_step(second.episode_id, second.fence, index, said)
        store.journal.finish(
            second.episode_id, second.fence, Ending(stop_reason=StopReason.DONE, outcome=0.0, success=False)
        )
        play(store, failed, turns=1, stop=StopReason.ENV_FAILED, outcome=None)
        store.buffer.take(1, 1, max_lag=1)
        store.lineage.checkpoint(1, serve(store, 1), "there")
        for step in (1, 2, 3):
            by_lag = {"0": {"tokens": 10 * step}, "1": {"tokens": 3}}
            values = {"outcome_mean": step / 4, "success_mean": 0.5, "loss": float("nan") if step == 2 else 1.0 / step}
            more = {"by_lag": by_lag, "tokens_stale_by_lag": {"2_3": 1}, "alarms": ["kl: 9 > 1"] if step == 3 else []}
            times = {"busy_s": 3.0, "idle_s": 1.0, "lag_mean": 0.5, "lag_max": 1, "tokens_scored": 9, "kl_k3": 0.01}
            store.metrics.record("step", step, {**values, **more, **times})  # pyright: ignore[reportArgumentType]
    return run
