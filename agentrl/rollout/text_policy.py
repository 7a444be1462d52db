"""A policy that writes texts and not tokens (a served chat model, a person, a script), as the engine and the renderer
of one episode: so `play` drives it as it drives an engine.

Each message is a token, whose id is its place in a table: a prompt lists the messages that are new, a turn has the
policy's answer, once for each token that is known to be in it. Nobody trains on such turns. Owns the table; never knows
the environment or the journal.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.config import Rollout
from agentrl.env.tools.parsers import DEFAULT
from agentrl.errors import InfrastructureError, Tracebacks, UsageError
from agentrl.protocols import AsyncEnv, Chunk, GenerateRequest
from agentrl.records import Generation, Json, Message, Task, Trajectory, VersionSpan
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.episode import play
from agentrl.rollout.memory_store import MemoryStore
from agentrl.rollout.stop_cause import StopCause

Tools = Sequence[Mapping[str, Json]]
_MOST_TOKENS = 1 << 20  # of one answer: what a server claims is not believed beyond it


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """One answer of a text policy: `text` is what the environment reads, `message` what the conversation goes on with
    (None: the text), `tokens` their number as far as somebody counted them. `was_cut` is True if a limit of tokens
    ended the answer."""

    text: str
    message: Message | None = None
    tokens: int | None = None
    was_cut: bool = False


class TextPolicy:
    """An `Engine` and a `MessageRenderer` over `answer`, which gets the conversation so far, those of its messages that
    came since the policy spoke in it, and the tools that the environment offers. It may raise EngineError; ContextFull
    ends the episode at the limit of its context."""

    stop_token_ids: tuple[int, ...] = ()

    def __init__(
        self,
        answer: Callable[[list[Message], list[Message], Tools], Awaitable[TextAnswer]],
        *,
        tool_format: str = DEFAULT,
    ) -> None:
        self._tool_format, self._answer = tool_format, answer
        self._entries: list[Message | Tools] = []
        self._texts: dict[int, str] = {}

    @property
    def tool_format(self) -> str | None:
        return self._tool_format

    def start(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """The tools of a conversation, then its messages."""
        return tuple(map(self._add, (tools, *messages)))

    def extend(self, sampled: Sequence[int], messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        return tuple(map(self._add, messages))

    def decode(self, ids: Sequence[int]) -> str:
        # `dict.fromkeys` keeps one of each: an answer's id is repeated once for each token that the server counted, so
        # that limits and reports by tokens hold for text policies as well.
        return "".join(self._texts.get(token_id, "") for token_id in dict.fromkeys(ids))

    def messages(self, ids: Iterable[int]) -> list[Message]:
        """The messages among tokens, in their order."""
        token_entries = (self._entries[token_id] for token_id in dict.fromkeys(ids))
        return [token_entry for token_entry in token_entries if isinstance(token_entry, dict)]

    def conversation(self, trajectory: Trajectory) -> list[Message]:
        """All messages of an episode of this policy, the environment's last answer included."""
        if not trajectory.turns:
            return list(trajectory.start)
        last_answer = trajectory.turns[-1].step
        all_token_ids = (token_id for turn in trajectory.turns for token_id in (*turn.prompt_ids, *turn.token_ids))
        return [*self.messages(all_token_ids), *(last_answer.observation if last_answer else ())]

    async def generate(self, request: GenerateRequest) -> Generation:
        tool_schemas = self._entries[request.token_ids[0]]
        assert not isinstance(tool_schemas, dict), "a conversation begins with its tools"
        distinct_ids = list(dict.fromkeys(request.token_ids))
        last_spoken = max(
            (position for position, token_id in enumerate(distinct_ids) if token_id in self._texts), default=-1
        )
        policy_answer = await self._answer(
            self.messages(distinct_ids), self.messages(distinct_ids[last_spoken + 1 :]), tool_schemas
        )
        token_id = self._add(policy_answer.message or Message(role="assistant", content=policy_answer.text))
        self._texts[token_id] = policy_answer.text
        token_count = min(max(policy_answer.tokens or 1, 1), _MOST_TOKENS)
        finish_reason = "length" if policy_answer.was_cut else "stop"
        return Generation(
            token_ids=(token_id,) * token_count,
            logprobs=(0.0,) * token_count,
            spans=(VersionSpan(0, 0, token_count),),
            finish=finish_reason,
        )

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        yield Chunk.whole(await self.generate(request))

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""

    def _add(self, entry: Message | Tools) -> int:
        self._entries.append(entry)
        return len(self._entries) - 1


async def play_text(
    env: AsyncEnv,
    task: Task,
    policy: TextPolicy,
    settings: Rollout,
    *,
    store: MemoryStore | None = None,
    tracebacks: Tracebacks | None = None,
) -> tuple[Trajectory, StopCause]:
    """Play a task in `env`, which is closed then, to its end. Raises as `play`, and what the policy raised."""
    memory_store = store or MemoryStore()
    task_claim = memory_store.claim(task)
    context = RolloutContext(
        engine=policy,
        renderer=policy,
        store=memory_store,
        # Nobody goes on with the episode, and how full its context is only a server knows.
        settings=settings.model_copy(update={"snapshot_every_turns": 0, "compaction": None}),
        make_env=lambda _: env,
        tracebacks=tracebacks or Tracebacks(),
    )
    stop_cause = await play(task_claim, context)
    trajectory, _ = memory_store.take(task_claim.episode_id)
    return trajectory, stop_cause


def cause_of(error: InfrastructureError) -> Exception:
    """Return the error to report to the user for an episode that failed: the user's own mistake if the environment
    raised one (for a sandbox that is not there, say), else the failure."""
    return error.__cause__ if isinstance(error.__cause__, UsageError) else error
