"""GRPO in one file: the whole algorithm on a toy task, with nothing but torch and a transformers model.

The task: sort three digits. The prompt is `3 1 2 >`, the right answer `1 2 3 .`; a program checks it, nobody shows the
model how it is done. A randomly initialised Qwen3 of 0.1M parameters learns it on a CPU in less than a minute.

    1. sample   for each prompt a group of answers, keeping the log-prob of every token under the weights that sampled
    2. score    each answer by the checker
    3. compare  an answer's advantage is its reward minus the mean reward of its siblings: no value network
    4. update   make tokens of better answers likelier, of worse ones rarer, but in one step never by much (the clip)

Everything else in agentrl is this loop made to work when answers are episodes with tools that take minutes, when
sampling and training run side by side, and when machines fail. Tensor names carry their shape: B answers of all groups,
T tokens of the answer, V vocabulary.

    python examples/grpo_one_file.py [--steps 100] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

# --- the task -----------------------------------------------------------------------------------------------------

DIGITS, LENGTH = 6, 3
ARROW, DOT = DIGITS, DIGITS + 1  # token ids: the digits are their own
VOCAB = DIGITS + 2

Prompt = tuple[int, ...]


def split_prompts(rng: random.Random) -> tuple[list[Prompt], list[Prompt]]:
    """All prompts, a fifth of them held out: what the model is measured on it has never trained on."""
    every = [(a, b, c, ARROW) for a in range(DIGITS) for b in range(DIGITS) for c in range(DIGITS)]
    rng.shuffle(every)
    return every[len(every) // 5 :], every[: len(every) // 5]


def reward(prompt: Prompt, answer: list[int]) -> float:
    """The checker: the share of tokens that stand where they should. It sees the answer, never the model."""
    right = [*sorted(prompt[:LENGTH]), DOT]
    return sum(given == wanted for given, wanted in zip(answer, right, strict=True)) / len(right)


# --- the policy ---------------------------------------------------------------------------------------------------


def make_model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def answer_logprobs(model: Qwen3ForCausalLM, tokens: Tensor) -> Tensor:
    """Log-prob of every token of the answers under the present weights: [B, prompt + T] -> [B, T].

    The logits at a place predict the token after it, hence the shift by one."""
    first = LENGTH + 1
    logits_BTV = model(tokens).logits[:, first - 1 : -1]
    return torch.log_softmax(logits_BTV, -1).gather(-1, tokens[:, first:, None])[..., 0]


# --- 1. sample ----------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Answers and what was known when they were sampled. `behaviour_BT` is never recomputed: it belongs to the
    weights that sampled, and the update needs to know how far it has moved from them."""

    tokens: Tensor  # [B, prompt + T]
    behaviour_BT: Tensor
    rewards_B: Tensor


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, prompts: list[Prompt], group_size: int) -> Batch:
    """`group_size` answers to each prompt, members of a group side by side. (A real engine would cache keys and
    values; eight tokens can do without.)"""
    asked = [prompt for prompt in prompts for _ in range(group_size)]
    tokens = torch.tensor(asked)
    behaviour: list[Tensor] = []
    for _ in range(LENGTH + 1):
        logprobs_BV = torch.log_softmax(model(tokens).logits[:, -1], -1)
        chosen_B1 = torch.multinomial(logprobs_BV.exp(), 1)
        behaviour.append(logprobs_BV.gather(-1, chosen_B1))
        tokens = torch.cat([tokens, chosen_B1], 1)
    # --- 2. score ---
    answers = tokens[:, LENGTH + 1 :].tolist()
    rewards = [reward(prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]
    return Batch(tokens, torch.cat(behaviour, 1), torch.tensor(rewards))


# --- 3. compare ---------------------------------------------------------------------------------------------------


def group_advantages(rewards_B: Tensor, group_size: int) -> Tensor:
    """Each reward minus the mean of its siblings' rewards: [B] -> [B].

    Leaving the judged answer out of its own baseline keeps the gradient unbiased (RLOO). GRPO as first published uses
    the mean of all and divides by the group's standard deviation; both pull towards the same answers."""
    rewards_GM = rewards_B.view(-1, group_size)
    others_GM = (rewards_GM.sum(1, keepdim=True) - rewards_GM) / (group_size - 1)
    return (rewards_GM - others_GM).flatten()


# --- 4. update ----------------------------------------------------------------------------------------------------


def clipped_loss(logprobs_BT: Tensor, behaviour_BT: Tensor, advantages_B: Tensor, low: float, high: float) -> Tensor:
    """PPO's clipped surrogate with a wider upper bound (DAPO), averaged over tokens.

    The ratio is 1 right after sampling and drifts as we update on the same answers. Once it has left the interval in
    the direction the advantage asks for, the minimum is flat: no more gradient from this token."""
    ratio_BT = (logprobs_BT - behaviour_BT).exp()
    advantages_B1 = advantages_B[:, None]
    free_BT = ratio_BT * advantages_B1
    held_BT = ratio_BT.clamp(1 - low, 1 + high) * advantages_B1
    return -torch.minimum(free_BT, held_BT).mean()


@torch.no_grad()
def success(model: Qwen3ForCausalLM, prompts: list[Prompt]) -> float:
    """Share of prompts whose sampled answer is right from the first to the last token."""
    return (sample(model, prompts * 8, 1).rewards_B == 1).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=32, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--epochs", type=int, default=2, help="updates on the same answers")
    parser.add_argument("--lr", type=float, default=1e-3)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    rng = random.Random(chosen.seed)
    training, held_out = split_prompts(rng)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.lr, weight_decay=0.0)
    before = success(model, held_out)
    for step in range(1, chosen.steps + 1):
        batch = sample(model, rng.choices(training, k=chosen.groups), chosen.group_size)
        advantages_B = group_advantages(batch.rewards_B, chosen.group_size)
        for _ in range(chosen.epochs):
            logprobs_BT = answer_logprobs(model, batch.tokens)
            loss = clipped_loss(logprobs_BT, batch.behaviour_BT, advantages_B, low=0.2, high=0.28)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if step % 25 == 0 or step == 1:
            print(f"step {step:4d}   mean reward {batch.rewards_B.mean():.3f}", flush=True)
    print(f"held-out success: {before:.2f} before, {success(model, held_out):.2f} after")


if __name__ == "__main__":
    main()
