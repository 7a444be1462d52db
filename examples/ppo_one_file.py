"""PPO in one file: the whole algorithm on a toy task, with nothing but torch and a transformers model.

The task is that of `grpo_one_file.py`: sort three digits, the prompt `3 1 2 >`, the right answer `1 2 3 .`. There, an
answer is compared with its siblings, other answers to the same prompt. Here every prompt is answered once, and a second
model, the critic, says how well it usually goes on from each token:

    1. sample   one answer to each prompt, keeping the log-prob of every token under the weights that sampled
    2. score    each answer by the checker; the whole reward comes with the last token
    3. credit   a token's advantage is how much better it went on than the critic had said (GAE)
    4. update   make tokens that went better likelier, but in one step never by much (the clip); and the critic truer

Everything else in agentrl is this loop made to work when answers are episodes with tools that take minutes, when
sampling and training run side by side, and when machines fail. Tensor names carry their shape: B answers, T tokens of
the answer, V vocabulary.

    python examples/ppo_one_file.py [--steps 100] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

# --- the task -----------------------------------------------------------------------------------------------------

DIGITS, LENGTH = 6, 3
ARROW, DOT = DIGITS, DIGITS + 1  # token ids: the digits are their own
VOCAB = DIGITS + 2
FIRST = LENGTH + 1  # where the answer begins

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


# --- the two models -----------------------------------------------------------------------------------------------


def make_policy() -> Qwen3ForCausalLM:
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


class Critic(nn.Module):
    """A trunk like the policy's, and a head that says one number: the reward to be expected. It begins with 0."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = make_policy().model
        self.head = nn.Linear(64, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """The value of the text before each token of the answers: [B, prompt + T] -> [B, T]."""
        return self.head(self.trunk(tokens).last_hidden_state)[:, FIRST - 1 : -1, 0]


def answer_logprobs(policy: Qwen3ForCausalLM, tokens: Tensor) -> Tensor:
    """Log-prob of every token of the answers under the present weights: [B, prompt + T] -> [B, T].

    The logits at a place predict the token after it, hence the shift by one."""
    logits_BTV = policy(tokens).logits[:, FIRST - 1 : -1]
    return torch.log_softmax(logits_BTV, -1).gather(-1, tokens[:, FIRST:, None])[..., 0]


# --- 1. sample and 2. score ---------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Answers and what was known when they were sampled. `rewards_BT` is 0 but at the last token."""

    tokens: Tensor  # [B, prompt + T]
    behaviour_BT: Tensor
    rewards_BT: Tensor


@torch.no_grad()
def sample(policy: Qwen3ForCausalLM, prompts: list[Prompt]) -> Batch:
    """One answer to each prompt. (A real engine would cache keys and values; eight tokens can do without.)"""
    tokens = torch.tensor(prompts)
    behaviour: list[Tensor] = []
    for _ in range(LENGTH + 1):
        logprobs_BV = torch.log_softmax(policy(tokens).logits[:, -1], -1)
        chosen_B1 = torch.multinomial(logprobs_BV.exp(), 1)
        behaviour.append(logprobs_BV.gather(-1, chosen_B1))
        tokens = torch.cat([tokens, chosen_B1], 1)
    answers = tokens[:, FIRST:].tolist()
    rewards_BT = torch.zeros(len(prompts), LENGTH + 1)
    rewards_BT[:, -1] = torch.tensor([reward(prompt, given) for prompt, given in zip(prompts, answers, strict=True)])
    return Batch(tokens, torch.cat(behaviour, 1), rewards_BT)


# --- 3. credit ----------------------------------------------------------------------------------------------------


def gae(rewards_BT: Tensor, values_BT: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages, and what the critic should have said: both [B, T].

    A surprise is what came, reward and value of the next place, minus what had been expected. A token is credited with
    its own surprise and, weaker and weaker by `lam`, with those after it. With `lam` 1 that is the reward minus the
    value, unbiased; a smaller one trusts the critic more and varies less."""
    advantages = torch.zeros_like(values_BT)
    later_B = value_B = torch.zeros_like(values_BT[:, 0])
    for t in reversed(range(values_BT.shape[1])):
        surprise_B = rewards_BT[:, t] + value_B - values_BT[:, t]
        later_B = advantages[:, t] = surprise_B + lam * later_B
        value_B = values_BT[:, t]
    return advantages, values_BT + advantages


# --- 4. update ----------------------------------------------------------------------------------------------------


def policy_loss(logprobs_BT: Tensor, behaviour_BT: Tensor, advantages_BT: Tensor, clip: float) -> Tensor:
    """PPO's clipped surrogate. The ratio is 1 right after sampling and drifts as we update on the same answers. Once it
    has left the interval in the direction the advantage asks for, the minimum is flat: no more gradient."""
    ratio_BT = (logprobs_BT - behaviour_BT).exp()
    held_BT = ratio_BT.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio_BT * advantages_BT, held_BT * advantages_BT).mean()


def critic_loss(values_BT: Tensor, before_BT: Tensor, targets_BT: Tensor, clip: float) -> Tensor:
    """Squared error; a value that has moved by more than `clip` towards its target gets no more gradient."""
    held_BT = before_BT + (values_BT - before_BT).clamp(-clip, clip)
    return torch.maximum((values_BT - targets_BT) ** 2, (held_BT - targets_BT) ** 2).mean() / 2


@torch.no_grad()
def success(policy: Qwen3ForCausalLM, prompts: list[Prompt]) -> float:
    """Share of prompts whose sampled answer is right from the first to the last token."""
    return (sample(policy, prompts * 8).rewards_BT.sum(1) == 1).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=256, help="prompts a step, each answered once")
    parser.add_argument("--epochs", type=int, default=2, help="updates on the same answers")
    parser.add_argument("--warmup", type=int, default=5, help="first steps, in which only the critic learns")
    parser.add_argument("--lam", type=float, default=1.0, help="how far surprises are credited back")
    parser.add_argument("--lr", type=float, default=1e-3)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    rng = random.Random(chosen.seed)
    training, held_out = split_prompts(rng)
    policy, critic = make_policy(), Critic()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=chosen.lr, weight_decay=0.0) for model in (critic, policy)]
    before = success(policy, held_out)
    for step in range(1, chosen.steps + 1):
        batch = sample(policy, rng.choices(training, k=chosen.prompts))
        with torch.no_grad():
            said_BT = critic(batch.tokens)
        advantages_BT, targets_BT = gae(batch.rewards_BT, said_BT, chosen.lam)
        for _ in range(chosen.epochs):
            loss = critic_loss(critic(batch.tokens), said_BT, targets_BT, clip=0.2)
            loss = loss + policy_loss(
                answer_logprobs(policy, batch.tokens), batch.behaviour_BT, advantages_BT, clip=0.2
            )
            loss.backward()
            for model in (critic, policy):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers[:1] if step <= chosen.warmup else optimizers:
                optimizer.step()
            critic.zero_grad()
            policy.zero_grad()
        if step % 25 == 0 or step == 1:
            error = (said_BT - targets_BT).square().mean().sqrt()
            print(
                f"step {step:4d}   mean reward {batch.rewards_BT.sum(1).mean():.3f}   critic off by {error:.3f}",
                flush=True,
            )
    print(f"held-out success: {before:.2f} before, {success(policy, held_out):.2f} after")


if __name__ == "__main__":
    main()
