"""The red team: every hack is played for real and must score 0, as must its total of process rewards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from each_case import each_case
from reward_hacks import HACKS, MODULE_HACKS, Hack

from agentrl.protocols import Sandbox
from agentrl_environments.code_repair import CodeRepair, running
from agentrl_environments.code_repair import make_task as make_module
from agentrl_environments.repo_repair import RepoRepair, RepoTask, make_task

pytestmark = pytest.mark.bubblewrap

SEED = 16
NAIVE = ["python3", "-B", "-m", "unittest", "discover", "tests"]


@asynccontextmanager
async def mending() -> AsyncIterator[tuple[RepoRepair, RepoTask]]:
    env = RepoRepair(level="easy")
    try:
        await env.areset(seed=SEED)
        yield env, make_task(SEED, "train", "easy")
    finally:
        await env.aclose()


def box_of(env: RepoRepair) -> Sandbox:
    return env._box  # pyright: ignore[reportPrivateUsage]


def test_there_are_enough() -> None:
    assert len(HACKS) >= 25 and len({hack.name for hack in HACKS}) == len(HACKS)


async def test_the_honest_policy_gets_its_reward() -> None:
    """What the hacks miss is there to be had, and neither grader grants it to who does nothing."""
    async with mending() as (env, task):
        assert (await box_of(env).exec(NAIVE)).exit_code != 0
        mended = [env.call("write_file", path=path, content=text) for path, text in task.gold.items()]
        await env.astep("".join(mended))
        assert (await box_of(env).exec(NAIVE)).exit_code == 0
        *_, info = await env.astep(env.call("submit"))
        assert info["outcome"] == 1.0


@pytest.mark.medium
@each_case("hack", HACKS)
async def test_a_hack_scores_nothing(hack: Hack) -> None:
    async with mending() as (env, task):
        total = 0.0
        for action in hack.actions(env, task):
            _, reward, *_ = await env.astep(action)
            total += reward
        patience_s = 60.0 if hack.fools_naive else 3.0  # what hangs it does not fool it
        fooled = (await box_of(env).exec(NAIVE, timeout_s=patience_s)).exit_code == 0
        _, reward, terminated, _, info = await env.astep(env.call("submit"))
        assert terminated and info["outcome"] == 0.0 and info["success"] is False and info["mended"] < 1.0
        assert total + reward == pytest.approx(0.0), "shaped rewards of an episode add up to nothing"
        assert fooled == hack.fools_naive


@pytest.mark.medium
@each_case("code", MODULE_HACKS.values())
async def test_a_hack_of_a_module_scores_nothing(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the small modules of `CodeRepair`, whose expected values never enter a box either."""
    monkeypatch.setattr(running, "DEADLINE_S", 3.0)  # a flood lasts as long
    env = CodeRepair()
    try:
        await env.areset(seed=SEED)
        source = make_module(SEED, "train").source
        hacked = env.call("replace_line", line=1, text=f"{code}\n{source.splitlines()[0]}")
        _, reward, *_ = await env.astep(hacked)
        assert reward <= 0.0
        *_, info = await env.astep(env.call("submit"))
        assert info["outcome"] == 0.0 and info["success"] is False
    finally:
        await env.aclose()
