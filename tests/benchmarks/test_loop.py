"""The loop benchmark's promises about its shape: without them its two sides would not do the same work."""

from __future__ import annotations

from pathlib import Path

import _loop_model
import loop
import pytest
import torch
from _loop_env import Loop
from _loop_shape import MEMBERS, PROMPT_TOKENS, TURN_TOKENS, TURNS, score, task_text

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


def test_groups_share_no_beginning() -> None:
    texts = [task_text(seed, 100) for seed in range(50)]
    assert len({text[:16] for text in texts}) == 50 and {len(text) for text in texts} == {100}
    assert (score("aaaa"), score("abcd"), score("")) == (0.25, 1.0, 0.0)


def test_the_end_of_turn_is_out_of_reach(model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model)
    ids_BT = torch.tensor([tokenizer.encode(task_text(seed, 64)) for seed in range(4)])
    with torch.no_grad():
        logprobs_BTV = policy(ids_BT).logits.log_softmax(-1)
    p_end = logprobs_BTV[..., tokenizer.eos_token_id].exp().mean().item()
    assert p_end * TURN_TOKENS < 0.001  # less than one turn in a thousand ends early


def test_the_run_file_has_the_shape(model: Path) -> None:
    run = config.load(Path(loop.HERE) / "_loop.toml", [f"model={model}"])
    shape = (run.buffer.groups_per_step, run.rollout.group_size, run.rollout.max_turns, run.rollout.max_tokens_per_turn)
    assert shape == (16, MEMBERS, TURNS, TURN_TOKENS)


def side(name: str, rate: float, tokens: float = 96.0) -> dict[str, object]:
    return {"side": name, "episodes_per_s": rate, "sampled_tokens_per_episode": tokens}


def test_the_ratio_is_that_of_medians() -> None:
    rounds = [
        side("agentrl", 30),
        side("trl", 10),
        side("agentrl", 40),
        side("trl", 8),
        side("agentrl", 3),
        side("trl", 12),
    ]
    found = loop.report(rounds)
    assert found["episodes_per_s"] == {"agentrl": 30, "trl": 10} and found["ratio"] == 3.0


def test_sides_that_did_not_do_the_same_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"trl sampled 80\.0 tokens an episode, not 96"):
        loop.report([side("agentrl", 30), side("trl", 10, 80.0)])
