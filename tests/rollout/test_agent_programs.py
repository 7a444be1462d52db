"""Agent programs that nobody here wrote, each in a box, played by an engine: tokens over turns, and over a kill."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from agentrl import registry
from agentrl.engine.rendering.renderer import Renderer
from agentrl.env.agent_programs.model_apis import AnthropicMessages, Api, ChatCompletions, Responses
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import StopReason, Turn, context_ids
from agentrl.rollout.episode import play
from agentrl.sandbox.shared_backend import configure
from agentrl.store import RunStore
from tests.parts.fake_engine import FakeEngine

ROOT = Path(__file__).parent.parent.parent
Sums: Any = registry.load_reference(f"{ROOT / 'examples/programs/sums.py'}:Sums")
TOOLS = {
    "openai-agents": ("shell", "command"),
    "langgraph": ("shell", "command"),
    "qwen-code": ("run_shell_command", "command"),
    "codex": ("exec_command", "cmd"),
    "openhands": ("terminal", "command"),
}
CHAT, RESPONSES = ("ChatCompletions", True), ("Responses", True)
WHOLE = ("ChatCompletions", False)
BOXED = pytest.mark.bubblewrap
QUICK = (pytest.mark.programs, pytest.mark.slow, BOXED)
MIDDLE = (pytest.mark.programs, pytest.mark.long, BOXED)
LONG = (pytest.mark.programs_all, pytest.mark.long, BOXED)
CASES = [
    pytest.param("openai-agents", RESPONSES, True, marks=MIDDLE),
    pytest.param("langgraph", CHAT, True, marks=QUICK),
    pytest.param("qwen-code", CHAT, False, marks=MIDDLE),
    pytest.param("codex", RESPONSES, False, marks=LONG),
    pytest.param("openhands", WHOLE, True, marks=LONG),
    pytest.param("terminus", WHOLE, False, marks=LONG),
]


def shown() -> dict[str, str]:
    """The folders that a box sees: the programs, and the Pythons they run on where those are not in /usr."""
    folders: dict[str, str] = {}
    for name in ("programs", "programs-all"):
        made = ROOT / f".venv-{name}"
        if not (made / "pyvenv.cfg").is_file():
            continue
        folders[str(made)] = f"/opt/{name}"
        home = Path((made / "bin" / "python").readlink()).resolve().parent.parent
        if home.parts[:2] != ("/", "usr"):
            folders[str(home)] = str(home)
    return folders


def call(agent: str, command: str) -> str:
    """A call as no renderer would write it: were it ever rendered anew, its tokens would be others."""
    tool, key = TOOLS[agent]
    return f'<tool_call>\n{{"arguments" :  {{"{key}":"{command}"}},"name":"{tool}"}}  </tool_call>'


def turns_of(agent: str, total: int) -> list[str]:
    if agent == "terminus":
        acts = [f'"keystrokes" : "{keys}\\n",  "duration":0.3' for keys in ("ls -a", f"echo {total} > answer.txt")]
        acted = [f'{{"analysis":"a", "plan":"p","commands":[{{{act}}}]}}' for act in acts]
        ended = '{"analysis":"a","plan":"p",  "commands":[],"task_complete":true}'
        return [acted[0], f"<think>hm</think>\n\n{acted[1]}", ended, ended]
    two = "\n".join(call(agent, f"echo {word}") for word in ("one", "two"))
    write = call(agent, f"echo {total} > answer.txt")
    return [f"I look.  {call(agent, 'ls -a')}", f"<think>hm</think>\n\n{write}", f"Both: {two}", "Done.  "]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, bool]]:
    """How often each API was answered, and whether as a stream."""
    counts: Counter[tuple[str, bool]] = Counter()

    def counted(api: type[Api], name: str, streamed: bool) -> None:
        real = getattr(api, name)

        def count(self: Api, reply: Any, body: Any) -> Any:
            if bool(body.get("stream")) == streamed:
                counts[api.__name__, streamed] += 1
            return real(self, reply, body)

        monkeypatch.setattr(api, name, count)

    for api in (ChatCompletions, Responses, AnthropicMessages):
        counted(api, "write", False)
        counted(api, "events", True)
    return counts


def kept(turns: Sequence[Turn]) -> tuple[int, int]:
    """Of the tokens that were sampled before a later turn, counted at each turn: those that its context has as they
    were sampled, and all."""
    ours = total = 0
    for turn in turns:
        total += sum(len(earlier.token_ids) for earlier in turns[: turn.index])
        at = turn.parent
        while at is not None:
            ours += len(turns[at].token_ids)
            at = turns[at].parent
    return ours, total


class Life(FakeEngine):
    """An engine that says the texts from the turn `begins` on; at the turn `dies` it falls silent and sets `silent`."""

    def __init__(self, renderer: Renderer, env: Any, agent: str, *, begins: int = 0, dies: int | None = None) -> None:
        self.silent = trio.Event()
        self._left, self._dies = iter(range(begins, 9)), dies

        def script(request: GenerateRequest) -> Sequence[int]:
            text = turns_of(agent, env.task["sum"])[next(self._left)]
            return renderer.start([{"role": "user", "content": text}])[6:-13] + request.sampling.stop_token_ids[:1]

        super().__init__(script, version=1)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if len(self.requests) == self._dies:
            self.silent.set()
            await trio.sleep_forever()
        async for chunk in super().stream(request):
            yield chunk


SETTINGS = {"max_context": 200_000, "max_tokens_per_turn": 2_000, "turn_deadline_s": 600.0, "step_deadline_s": 300.0}


@pytest.mark.parametrize(("agent", "api", "goes_on"), CASES)
async def test_a_real_program_keeps_every_sampled_token_also_over_a_kill(
    agent: str, api: Any, goes_on: bool, store: RunStore, claim_one: Any, context: Any, renderer: Renderer, served: Any
) -> None:
    configure({"bubblewrap": {"readonly": shown()}})

    def settings(env: Any, engine: Any) -> Any:
        return context(env, engine, **SETTINGS)

    first = Sums(agent, tool_format="hermes")
    engine = Life(renderer, first, agent, dies=2)
    claim = claim_one("first")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(play, claim, settings(first, engine))
        with trio.fail_after(300):
            await engine.silent.wait()
        box = first.box.box
        nursery.cancel_scope.cancel()
    assert not await box.alive(), "a program ends with its worker"

    second = Sums(agent, tool_format="hermes")
    again = Life(renderer, second, agent, begins=2 if goes_on else 0)
    claim = next(
        one for one in store.leases.claim("second", 9, lease_s=99, now=999.0) if one.episode_id == claim.episode_id
    )
    before = claim.turns
    with trio.fail_after(300):
        ending = await play(claim, settings(second, again))
    trajectory = store.reads.trajectory(claim.episode_id)
    turns = trajectory.turns
    assert (ending.stop_reason, trajectory.outcome, len(turns)) == (StopReason.DONE, 1.0, 4), (ending, turns[-1:])
    assert (turns[:2] == before) == goes_on and len(again.requests) == (2 if goes_on else 4)
    asked = [request.token_ids for request in (*engine.requests[:2], *again.requests)][-4:]
    assert asked == [context_ids(turns, index) for index in range(4)]
    assert [turn.parent for turn in turns] == [None, 0, 1, 2], "no fork"
    ours, total = kept(turns)
    assert ours == total > 0
    assert set(served) == {api}, "what the program asks for"
    if agent != "terminus":
        assert [len(turn.step.observation) for turn in turns if turn.step] == [1, 1, 2, 0], "each call is answered"
