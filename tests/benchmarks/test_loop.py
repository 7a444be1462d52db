"""The loop benchmark's promises about its shape: without them its two sides would not do the same work."""

from __future__ import annotations

from pathlib import Path

import _loop_model
import loop
import pytest
from _loop_env import Loop
from _loop_shape import MEMBERS, PROMPT_TOKENS, TURN_TOKENS, TURNS

from agentrl import config
from agentrl.engine.rendering.renderer import Renderer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop") / "model"
    assert 700_000 < _loop_model.save(folder) < 900_000
    return folder


@pytest.mark.parametrize("seed", [0, 7, 123_456])
async def test_our_prompt_has_the_length_of_the_shape(model: Path, seed: int) -> None:
    env = Loop()
    messages, _ = await env.areset(seed=seed)
    assert len(Renderer(model).start(messages)) == PROMPT_TOKENS


async def test_an_episode_takes_all_its_turns_whatever_is_said() -> None:
    env = Loop()
    await env.areset(seed=1)
    answers = [await env.astep("aab") for _ in range(TURNS)]
    assert [done for _, _, done, _, _ in answers] == [False] * (TURNS - 1) + [True]
    assert answers[-1][4] == {"outcome": 2 / 3}


def test_the_run_file_has_the_shape(model: Path) -> None:
    run = config.load(Path(loop.HERE) / "_loop.toml", [f"model={model}"])
    shape = (run.buffer.groups_per_step, run.rollout.group_size, run.rollout.max_turns, run.rollout.max_tokens_per_turn)
    assert shape == (16, MEMBERS, TURNS, TURN_TOKENS)
