"""Environments that the run tests name by file: quick, replayable, and one that fails."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import trio

import agentrl
from agentrl.env.multi_agent import RolesEnv
from agentrl.protocols import SandboxSpec
from agentrl.records import Message, Trajectory
from agentrl.rewards import Judge, ScoringClient
from agentrl.testing.fake_sandbox import FakeBackend
from agentrl.testing.scoring import FakeScoring

HELD_OUT = 1_000_000_000  # the first seed of `[[eval.sets]]`, if the run file names none


class Vowels(agentrl.Env):
    """Three turns; the outcome is the share of vowels in what was written: any policy can learn it a little."""

    blocking = False
    replayable = True

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._texts: list[str] = []
        return (Message(role="user", content=f"task {seed}"),), {}

    def step(self, action: str) -> Any:
        self._texts.append(action)
        if len(self._texts) < 3:
            return (Message(role="user", content="more"),), 0.0, False, False, {}
        written = "".join(self._texts)
        outcome = sum(c in "aeiou" for c in written) / max(len(written), 1)
        return (), 0.0, True, False, {"outcome": outcome, "success": outcome > 0.2}


class Held(Vowels):
    """Tasks from seed `at` on begin when the file `gate` is there: until then a run of it cannot be over.
    Held-out tasks do not wait."""

    def __init__(self, gate: str, at: int = 20) -> None:
        super().__init__()
        self._gate, self._at = Path(gate), at

    async def areset(self, *, seed: int | None = None, options: Any = None) -> Any:
        while self._at <= (seed or 0) < HELD_OUT and not self._gate.exists():  # noqa: ASYNC110 - another process makes the file
            await trio.sleep(0.02)
        return self.reset(seed=seed, options=options)


class Raising(Vowels):
    """Its step raises, as a bug in a user's code does."""

    def step(self, action: str) -> Any:
        raise KeyError("no such tool")


class Poison(Vowels):
    """The second step of the task of seed 3 kills the process it runs in."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._kills = seed == 3
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Any:
        if self._kills and len(self._texts) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Blocking(Vowels):
    """The second step of the task of seed 3 never gives its worker's loop back."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._blocks = seed == 3
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Any:
        while self._blocks and len(self._texts) == 1:
            time.sleep(0.01)
        return super().step(action)


class Hanging(Vowels):
    """Its reset never returns."""

    async def areset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await trio.sleep_forever()


class Boxes(agentrl.ToolEnv):
    """Whatever is written is taken for a call that reads a file of a box: which is missing in every episode, and whose
    host fails in every fourth."""

    blocking = False
    _episodes = itertools.count()

    async def setup(self, task: Any) -> None:
        self._box = await FakeBackend().create(SandboxSpec())
        self._box.broken = next(Boxes._episodes) % 4 == 0

    def prompt(self, task: Any) -> str:
        return "look"

    @agentrl.tool
    async def look(self) -> str:
        """Read the file."""
        return (await self._box.read("gone.txt")).decode()

    async def astep(self, action: str) -> Any:
        self._text = action
        return await super().astep('<tool_call>{"name": "look", "arguments": {}}</tool_call>')

    def after_turn(self, results: Any) -> float:
        self.finish()
        return 0.0

    def grade(self) -> float:
        return len(self._text) / 100


class Duel(RolesEnv):
    """Two roles write twice each; who wrote the larger share of vowels has won."""

    roles = ("first", "second")
    blocking = False
    replayable = True

    def start(self, task: Any) -> str:
        self._texts: dict[str, str] = dict.fromkeys(self.roles, "")
        self._moves = 0
        return "first"

    def see(self, role: str) -> str:
        return f"{role}, write"

    def play(self, role: str, text: str) -> str | None:
        self._texts[role] += text
        self._moves += 1
        return None if self._moves == 4 else self.roles[self._moves % 2]

    def outcomes(self, forfeited: str | None) -> dict[str, float]:
        share = {role: sum(c in "aeiou" for c in text) / max(len(text), 1) for role, text in self._texts.items()}
        return {role: float(share[role] >= max(share.values())) for role in self.roles}


class Pair(RolesEnv):
    """Two roles read the same and write once each: the one earns by long texts, the other by short ones."""

    roles = ("long", "short")
    blocking = False
    replayable = True

    def start(self, task: Any) -> str:
        self._texts: dict[str, str] = {}
        return "long"

    def see(self, role: str) -> str:
        return "write"

    def play(self, role: str, text: str) -> str | None:
        self._texts[role] = text
        return "short" if role == "long" else None

    def outcomes(self, forfeited: str | None) -> dict[str, float]:
        return {role: self.worth(role, self._texts.get(role, "")) for role in self.roles}

    @staticmethod
    def worth(role: str, text: str) -> float:
        return float((len(text) > 4) == (role == "long"))


SCRIPT = itertools.cycle((2, 7, "no verdict", 4, 9))


async def judge(seen: Trajectory) -> float:
    """A judge for each episode: each fifth has no verdict for any text, the others give 0.2, 0.7, 0.4 and 0.9."""
    client = ScoringClient("http://judge", transport=FakeScoring(next(SCRIPT)))
    return await Judge(client, rubric="Is it good?", attempts=1)(seen)


def length_reward(trajectory: Any) -> float:
    """A reward function that a user passes to Trainer."""
    return float(sum(len(turn.text) for turn in trajectory.turns))


class OneTurn(Vowels):
    """One turn, whatever is written."""

    def step(self, action: str) -> Any:
        return (), 0.0, True, False, {"outcome": 1.0}


def place(seen: Trajectory) -> float:
    """A reward source: how many turns there were."""
    return float(len(seen.turns))
