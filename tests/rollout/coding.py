"""An episode in a real box, and a worker of it that dies in the middle (`python -m tests.rollout.coding`)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

import agentrl
from agentrl.config import Rollout
from agentrl.engine.rendering.renderer import Renderer
from agentrl.protocols import ExecResult
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.episode import play
from agentrl.store import RunStore
from agentrl.store.journal_writer import JournalWriter

from .saying import saying

LONG = "date +%s%N > stamp; echo long >> log; cat stamp"
SHORT = "mkdir -p out && echo x > out/y; cat log"
FATAL = "echo fatal >> log; cat log"
LAST = "cat stamp log out/y /tmp/note"


class Coding(agentrl.ToolEnv):
    """It promises nothing of itself: what a command prints may differ from one time to the next."""

    boxed = True
    limits = agentrl.EpisodeLimits(turns=9)

    def __init__(self) -> None:
        super().__init__(tools=["shell"])

    async def prompt(self, task: Any) -> str:
        await self.box.exec(["sh", "-c", "date +%s%N > /tmp/note"])
        return "Build it."

    def on_text(self, text: str) -> None:
        self.finish()

    async def grade(self) -> bool:
        return (await self.box.read("log")) == b"long\nfatal\n"


class Fatal(Coding):
    """Its process is killed while a command runs."""

    async def prompt(self, task: Any) -> str:
        said = await super().prompt(task)
        box = self._plugged.current
        assert box is not None and box.box is not None
        run = box.box.exec

        async def until_killed(argv: Sequence[str], **options: Any) -> ExecResult:
            if argv[-1] == FATAL:
                os.kill(os.getpid(), signal.SIGKILL)
            return await run(argv, **options)

        box.box.exec = until_killed  # type: ignore[method-assign]
        return said


def context(store: RunStore, renderer: Renderer, env: type[Coding], commands: Sequence[str]) -> RolloutContext:
    """A context whose policy runs these commands, then stops."""
    calls = [Coding().call("shell", command=command) for command in commands]
    engine = saying(renderer, *calls, "I am done.")
    settings = Rollout(max_context=8192, max_tokens_per_turn=512)
    desk = JournalWriter(store, inline=True)
    return RolloutContext(engine=engine, renderer=renderer, store=desk, settings=settings, make_env=lambda task: env())


def main(store_path: str, tokenizer: str) -> None:
    with RunStore.open(store_path) as store:
        claim = store.leases.claim("first", 1, lease_s=10, now=0.0)[0]
        trio.run(play, claim, context(store, Renderer(Path(tokenizer)), Fatal, [LONG, SHORT, FATAL]))


if __name__ == "__main__":
    main(*sys.argv[1:])
