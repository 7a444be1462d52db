"""Shared by the store's tests: small records, and an episode played to its end through the journal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl.env.tasks import TaskSource
from agentrl.records import Messages, RoutedExperts, Step, StopReason, Task, Turn, VersionSpan
from agentrl.rollout.admitter import Admitter
from agentrl.store import AdmissionBounds, Claim, Ending, Partial, RunStore

START: Messages = ({"role": "user", "content": "mend it"},)


class Clock:
    """Time that moves when it is told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def task(index: int) -> Task:
    return Task(index=index, env="test/Env-v0", seed=100 + index)


class Tasks(TaskSource):
    """The tasks that a function makes, `size` of them."""

    def __init__(self, make: Callable[[int], Task], size: int | None = None) -> None:
        self._make, self.size = make, size

    def task(self, index: int) -> Task:
        return self._make(index)


def bounds(**changes: Any) -> AdmissionBounds:
    settings = {"group_size": 2, "groups_per_step": 2, "max_lag": 1, "max_running": 1000, "steps_total": 1000}
    return AdmissionBounds(**(settings | changes))


def admit(
    store: RunStore,
    make: Callable[[int], Task] = task,
    *,
    limit: int = 1000,
    tasks_total: int | None = None,
    **changes: Any,
) -> int:
    """What the admitter of a run does at once."""
    return Admitter(store, Tasks(make, tasks_total), bounds(**changes)).admit(limit)


def serve(store: RunStore, step: int) -> int:
    """Weights of `step` are minted and served; their version."""
    version = store.versions.mint_version(step)
    store.versions.confirm_version(version)
    return version.version


def turn(index: int, version: int, n: int = 3, *, step: Step | None = None) -> Turn:
    return Turn(
        index=index,
        parent=index - 1 if index else None,
        prompt_ids=(7, 8, index),
        token_ids=tuple(range(index, index + n)),
        logprobs=tuple(-0.5 * (k + 1) for k in range(n)),
        spans=(VersionSpan(version, 0, n),) if n else (),
        finish="stop",
        text=f"action {index}",
        step=step,
        experts=RoutedExperts(start=0, layers=1, per_token=2, width=1, data=bytes(2 * n)),
        started_s=10.0 + index,
        ended_s=10.5 + index,
    )


def part(whole: Turn, at: int, n: int = 1) -> Partial:
    """Tokens `at` to `at + n` of a turn that is not over."""
    return Partial(
        index=whole.index,
        parent=whole.parent,
        prompt_ids=whole.prompt_ids,
        token_ids=whole.token_ids[at : at + n],
        logprobs=whole.logprobs[at : at + n],
        spans=(VersionSpan(whole.spans[0].version, 0, n),),
        at=at,
    )


def answer(index: int, *, last: bool = False) -> Step:
    return Step(observation=({"role": "tool", "content": f"seen {index}"},), reward=0.25 * index, terminated=last)


def play(
    store: RunStore,
    claim: Claim,
    *,
    turns: int = 2,
    version: int | None = None,
    stop: StopReason = StopReason.DONE,
    outcome: float | None = 1.0,
) -> None:
    """Play a claimed episode on from where its journal stands, to `turns` turns and its end."""
    version = store.versions.current_version().version if version is None else version
    if claim.start is None:
        store.journal.begin(claim.episode_id, claim.fence, START)
    if claim.turns and claim.turns[-1].step is None:
        store.journal.journal_step(claim.episode_id, claim.fence, len(claim.turns) - 1, answer(len(claim.turns) - 1))
    for index in range(len(claim.turns), turns):
        store.journal.journal_turn(claim.episode_id, claim.fence, turn(index, version))
        store.journal.journal_step(claim.episode_id, claim.fence, index, answer(index, last=index == turns - 1))
    success = None if outcome is None else outcome > 0
    store.journal.finish(claim.episode_id, claim.fence, Ending(stop_reason=stop, outcome=outcome, success=success))


def play_all(store: RunStore, **how: Any) -> list[Claim]:
    """Claim whatever there is to claim and play it to its end."""
    claims = store.leases.claim("worker", 1000, lease_s=30.0)
    for claim in claims:
        play(store, claim, **how)
    return claims
