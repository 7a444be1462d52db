"""The lock of dials: every dial counts, none tells, and the model that ships for it is half right."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentrl
from agentrl import registry
from agentrl.errors import UsageError
from agentrl_environments.combination import answer, apprentice, opening

SUMS = [[7, 4], [3, 5], [0, 0], [9, 9], [5, 5]]
RIGHT = ["1", "8", "0", "8", "0"]


async def play(said, **kwargs):
    """What was read, the reward of each turn, and the last info."""
    env = agentrl.make("agentrl/Combination-v0", **kwargs)
    observation, _ = await env.areset(seed=0, options={"sums": SUMS[: len(said)]})
    read, rewards, info = [observation[-1]["content"]], [], {}
    for text in said:
        observation, reward, terminated, _, info = await env.astep(text)
        read += [message["content"] for message in observation]
        rewards.append(reward)
    assert terminated
    return read, rewards, info


async def test_a_dial_pays_at_once_and_only_all_of_them_open_the_lock():
    read, rewards, info = await play(RIGHT)
    assert read[1:] == ["3 + 5", "0 + 0", "9 + 9", "5 + 5"] and read[0].endswith("7 + 4")
    assert rewards == [1.0] * 5
    assert (info["outcome"], info["success"]) == (1.0, True)


async def test_a_wrong_dial_is_not_told_and_does_not_end_the_episode():
    right, _, _ = await play(RIGHT)
    read, rewards, info = await play(["1", " 8 ", "18", "", "0"])
    assert read == right
    assert rewards == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert (info["outcome"], info["success"]) == (0.0, False)


async def test_the_number_of_dials_is_a_setting():
    _, rewards, info = await play(RIGHT[:2], dials=2)
    assert rewards == [1.0, 1.0] and info["success"]
    with pytest.raises(UsageError, match="dials = 0: give 1 or more"):
        agentrl.make("agentrl/Combination-v0", dials=0)
    with pytest.raises(UsageError, match="sums has 5 pairs: give 4"):
        await agentrl.make("agentrl/Combination-v0", dials=4).areset(seed=0, options={"sums": SUMS})


def test_it_passes_the_checker():
    assert agentrl.check_env("agentrl/Combination-v0", actions=["1", "x", ""]).findings == ()


def test_the_apprentice_is_right_where_nothing_is_carried():
    rng = random.Random(0)
    plain = [apprentice((3, 5), rng) for _ in range(500)]
    carried = [apprentice((7, 4), rng) for _ in range(500)]
    assert plain.count("8") > 400
    assert carried.count("1") < 225 < 250 < carried.count("2") + 50


@torch.no_grad()
def test_the_tiny_locksmith_knows_the_format_and_half_of_the_sums():
    folder = registry.resolve("models", "agentrl/tiny-locksmith")()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert sum(p.numel() for p in model.parameters()) < 200_000
    found = {False: [], True: []}
    for a in range(10):
        for b in range(10):
            first = [{"role": "user", "content": opening([(a, b)] * 5)}]
            ids = tokenizer.apply_chat_template(first, add_generation_prompt=True, return_tensors="pt")["input_ids"]
            (right,) = tokenizer(answer((a, b)))["input_ids"]
            found[a + b >= 10].append(float(model(ids).logits[0, -1].softmax(-1)[right]))
    plain, carried = (sum(values) / len(values) for values in found.values())
    assert 0.7 < plain < 0.95 and 0.2 < carried < 0.5
