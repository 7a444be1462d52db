"""A worker is killed in the middle of a coding episode: another one has its box as it was (law 2), with real boxes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import trio

from agentrl.engine.rendering.renderer import Renderer
from agentrl.records import StopReason, Task
from agentrl.rollout.episode import play
from agentrl.store import RunStore

from . import coding
from .conftest import write_tokenizer


@pytest.mark.bubblewrap
async def test_law_2_another_worker_restores_the_box_and_runs_no_finished_command_again(
    store: RunStore, renderer: Renderer, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    store.groups.add_groups([Task(index=0, env="test/Coding", seed=3)], size=2, purpose="train")
    (tmp_path / "tokenizer").mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.rollout.coding",
        str(store.path),
        str(write_tokenizer(tmp_path / "tokenizer")),
    ]
    with trio.fail_after(120):
        ended = await trio.run_process(command, cwd=pytestconfig.rootpath, capture_stderr=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-2000:]

    claim = next(one for one in store.leases.claim("second", 2, lease_s=10, now=11.0) if one.turns)
    assert len(claim.turns) == 3 and claim.turns[2].step is None
    place = coding.context(store, renderer, coding.Coding, [coding.LAST])
    assert (await play(claim, place)).stop_reason is StopReason.DONE
    assert store.reads.restarts(claim.episode_id) == [] and len(place.engine.requests) == 2  # type: ignore[attr-defined]

    episode = store.reads.trajectory(claim.episode_id)
    said = [turn.step.observation[-1]["content"] for turn in episode.turns[:-1] if turn.step]
    stamp = next(word for word in said[0].split() if word.isdecimal() and len(word) == 19)
    assert f"{stamp}\nlong\nfatal\nx\n" in said[3], "the files of the dead worker's box, its second turn included"
    assert episode.success
