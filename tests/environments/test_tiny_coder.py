"""The tiny coder that ships: a tokenizer that loses nothing, and a warm start that knows the format and is mostly
wrong, measured in the real environment."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl import registry
from agentrl_environments.code_repair import CodeRepair, make_task
from agentrl_environments.code_repair.demonstrations import demonstrate
from agentrl_environments.models.tokenizer import BOILERPLATE

N = 96


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(registry.resolve("models", "agentrl/tiny-coder")())


@cache
def model() -> Any:
    folder = registry.resolve("models", "agentrl/tiny-coder")()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@given(st.text())
def test_the_tokenizer_loses_nothing(text: str) -> None:
    ids = tokenizer()(text)["input_ids"]
    assert tokenizer().decode(ids) == text.encode("utf-8", "replace").decode()


def test_an_attempt_costs_few_tokens() -> None:
    for seed in range(50):
        task = make_task(seed, "held_out")
        demonstration = demonstrate(task, random.Random(seed), skill=1.0)
        prompt = tokenizer().apply_chat_template(
            list(demonstration.opening), tools=CodeRepair().tool_schemas(), add_generation_prompt=True, tokenize=False
        )
        assert len(tokenizer()(prompt)["input_ids"]) <= 160
        assert len(tokenizer()(demonstration.turns[0][0])["input_ids"]) <= 32
    assert all(len(tokenizer()(text)["input_ids"]) == 1 for text in BOILERPLATE)


def test_tool_calls_of_messages_are_rendered_as_the_expert_writes_them() -> None:
    task = make_task(0, "held_out")
    says, _ = demonstrate(task, random.Random(0), skill=1.0).turns[0]
    edit = {"name": "replace_line", "arguments": {"line": task.fix_line, "text": task.fix_text}}
    calls = [{"type": "function", "function": edit}, {"function": {"name": "run_tests", "arguments": {}}}]
    shown = tokenizer().apply_chat_template(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}], tokenize=False
    )
    assert shown == f"<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n{says}<|im_end|>\n"


def test_it_is_small_and_fits_vllm() -> None:
    config = model().config
    assert config.model_type == "qwen3" and config.head_dim >= 32 and config.tie_word_embeddings
    assert sum(p.numel() for p in model().parameters()) < 1_500_000
    assert len(tokenizer()) <= config.vocab_size
    assert config.eos_token_id == tokenizer().convert_tokens_to_ids("<|im_end|>")


@torch.no_grad()
def sampled(contexts: list[str]) -> list[str]:
    """One turn for each context at temperature 1, up to its end token."""
    tokenizer().padding_side = "left"
    batch = tokenizer()(contexts, return_tensors="pt", padding=True)
    batch.pop("token_type_ids", None)
    output = model().generate(**batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=48)
    texts = tokenizer().batch_decode(output[:, batch["input_ids"].shape[1] :])
    return [text.split("<|im_end|>")[0] for text in texts]


async def played(n: int, **kwargs: Any) -> tuple[float, float]:
    """Share of successful episodes, and of turns in which every call was well-formed."""
    torch.manual_seed(0)
    environments = [CodeRepair(split="held_out", **kwargs) for _ in range(n)]
    schemas = environments[0].tool_schemas()
    messages: list[list[Any]] = [list((await e.areset(seed=seed))[0]) for seed, e in enumerate(environments)]
    successes, turns, broken, live = 0, 0, 0, list(range(n))
    while live:
        render = tokenizer().apply_chat_template
        texts = sampled([render(messages[i], tools=schemas, add_generation_prompt=True, tokenize=False) for i in live])
        for i, text in zip(list(live), texts, strict=True):
            observation, _, terminated, truncated, info = await environments[i].astep(text)
            turns, broken = turns + 1, broken + ("parse_failure" in info)
            messages[i] += [{"role": "assistant", "content": text}, *observation]
            if terminated or truncated:
                live.remove(i)
                successes += info["success"]
    for environment in environments:
        await environment.aclose()
    return successes / n, 1 - broken / turns


@pytest.mark.long
@pytest.mark.bubblewrap
async def test_the_warm_start_knows_the_format_and_is_mostly_wrong() -> None:
    success, valid = await played(N)
    assert 0.30 <= success <= 0.62
    assert valid >= 0.95


@pytest.mark.medium
@pytest.mark.bubblewrap
async def test_the_warm_start_reads_the_tests() -> None:
    """With the tests of other tasks it has next to no success."""
    success, _ = await played(N // 2, shuffle_tests=True)
    assert success <= 0.15
