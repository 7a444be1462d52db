"""Training through compaction is unbiased: the expected gradient over all groups is the exact policy gradient.

The policy is a table: one row of two logits for each context that it is asked in, so that a token trained in another
context than the one it was sampled in is not found. It chooses between a short act and one whose answer fills the
context, that is, when it has to write notes; and what the notes say. All episodes are played by the real loop, all
pairs of them judged as groups by the real rows. The exact gradient comes from autograd over the enumerated episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from agentrl.algos.grpo import GRPO
from agentrl.config.sections import CompactionSettings
from agentrl.engine.rendering.renderer import Renderer
from agentrl.learner.data.batch import group_rows
from agentrl.protocols import GenerateRequest
from agentrl.records import Group, Task, Trajectory
from agentrl.rollout.episode import play
from agentrl.store import Claim, RunStore
from tests.parts.fake_engine import FakeEngine

from .conftest import ScriptedEnv, done, going

ACTS = 3
LONG = "x" * 190
WORDS = "ab"


class Choice(NamedTuple):
    """One decision: the context that it was made in, and which of the two words."""

    context: tuple[int, ...]
    word: int


class Played(NamedTuple):
    choices: tuple[Choice, ...]
    trajectory: Trajectory


class Table(ScriptedEnv):
    """`a` gets a short answer, `b` one that fills the context; the outcome is a table of the acts."""

    def __init__(self) -> None:
        super().__init__([])

    async def astep(self, action: str) -> Any:
        self.actions.append(action)
        if len(self.actions) == ACTS:
            at = int("".join(str(WORDS.index(act)) for act in self.actions), 2)
            return done([0.3, -0.7, 1.1, 0.2, -0.4, 0.9, -1.3, 0.6][at])
        return going(LONG if action == "b" else "on", reward=0.0)


async def all_episodes(
    claims: list[Claim], store: RunStore, context: Callable[..., Any], renderer: Renderer
) -> list[Played]:
    """Every episode that the table can play, each once: the first word everywhere, then the last choice changed."""
    words = [renderer.conversations.encode(word)[0] for word in WORDS]
    played: list[Played] = []
    forced: list[int] | None = []
    while forced is not None:
        choices: list[Choice] = []

        def script(request: GenerateRequest, forced: list[int] = forced, choices: list[Choice] = choices) -> list[int]:
            word = forced[len(choices)] if len(choices) < len(forced) else 0
            choices.append(Choice(tuple(request.token_ids), word))
            return [words[word], *request.sampling.stop_token_ids[:1]]

        claim = claims.pop()
        settings = {"max_context": 400, "max_tokens_per_turn": 40, "compaction": CompactionSettings(at=0.6)}
        await play(claim, context(Table(), FakeEngine(script, version=1), **settings))
        played.append(Played(tuple(choices), store.reads.trajectory(claim.episode_id)))
        taken = [choice.word for choice in choices]
        while taken and taken[-1] == 1:
            taken.pop()
        forced = [*taken[:-1], 1] if taken else None
    return played


def expected(group: Group, played: list[Played], policy: Policy) -> Tensor:
    """The mean gradient of one member, over all pairs of episodes in the proportion in which they come."""
    total = torch.zeros_like(policy.theta)
    mass_P = [policy.logprob(one.choices).exp().detach() for one in played]
    for first, p in zip(played, mass_P, strict=True):
        for second, q in zip(played, mass_P, strict=True):
            pair = tuple(
                replace(one.trajectory, episode_id=at, member=at) for at, one in enumerate((first, second), start=1)
            )
            both = replace(group, size=2, trajectories=pair, record=None, left_out=())
            rows = group_rows(both, GRPO(), step_of=lambda _: 0, step_now=0, max_lag=0).rows
            if rows:
                loss = torch.stack([policy.surrogate(row) for row in rows]).sum()
                total += p * q * torch.autograd.grad(loss, policy.theta)[0] / 2
    return total


class Policy:
    """Two logits for each context."""

    def __init__(self, played: list[Played], words: list[int]) -> None:
        contexts = sorted({choice.context for one in played for choice in one.choices})
        self.row = {context: at for at, context in enumerate(contexts)}
        self.words = words
        generator = torch.Generator().manual_seed(3)
        self.theta = torch.randn(len(contexts), 2, dtype=torch.float64, generator=generator).requires_grad_()

    def logprob(self, choices: tuple[Choice, ...]) -> Tensor:
        return torch.stack([self.theta[self.row[at]].log_softmax(0)[word] for at, word in choices]).sum()

    def surrogate(self, row: Any) -> Tensor:
        """The sum of advantage times log-probability over a row's tokens; the token behind a word is certain."""
        terms = [torch.zeros((), dtype=torch.float64)]
        for place, advantage in zip(row.place_S.tolist(), row.columns["advantage"].tolist(), strict=True):
            token = row.token_ids[place]
            if token in self.words:
                at = self.row[row.token_ids[:place]]
                terms.append(advantage * self.theta[at].log_softmax(0)[self.words.index(token)])
        return torch.stack(terms).sum()


@pytest.fixture
def claims(store: RunStore) -> list[Claim]:
    store.groups.add_groups([Task(index=0, env="test/Env", seed=3)], size=64, purpose="train")
    return store.leases.claim("w", 64, lease_s=100)


async def test_the_expected_gradient_is_the_exact_one(
    claims: list[Claim], store: RunStore, context: Any, renderer: Renderer
) -> None:
    group_id = claims[0].group_id
    played = await all_episodes(claims, store, context, renderer)
    # a, a, · plays 2; a, b, · and b, a, · write notes once, 4 each; b, b, · twice, 8
    assert len(played) == 18
    policy = Policy(played, [renderer.conversations.encode(word)[0] for word in WORDS])
    mass_P = torch.stack([policy.logprob(one.choices) for one in played]).exp()
    assert float(mass_P.detach().sum()) == pytest.approx(1.0)
    outcome_P = torch.tensor([one.trajectory.outcome for one in played], dtype=torch.float64)
    exact = torch.autograd.grad(mass_P @ outcome_P, policy.theta)[0]
    assert (exact.abs().sum(1) > 1e-4).all(), "every decision matters, that of the notes too"
    torch.testing.assert_close(expected(store.reads.group(group_id), played, policy), exact, atol=1e-6, rtol=1e-5)
