"""The prompts of one episode: the tokens up to where the next role speaks.

Each role is a conversation of its own, whose turns extend the role's last one. Sampled tokens stay as they are: a
prompt only adds the messages that came since (law 1). Knows no engine, and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from agentrl.errors import EnvError
from agentrl.protocols import MessageRenderer
from agentrl.records import POLICY, Message, Messages, Turn
from agentrl.rollout.journal import EpisodeJournal
from agentrl.rollout.live_env import LiveEnv
from agentrl.rollout.render_messages import rendered


@dataclass(frozen=True, slots=True)
class Prompt:
    """The place where the next turn begins."""

    role: str
    parent: int | None
    """The turn that `prompt_ids` extend; None if a conversation starts with them."""
    prompt_ids: tuple[int, ...]
    context: tuple[int, ...]
    """All messages that `role` has read and written, from the start of its conversation."""


class Prompts:
    """Renders the prompts of an episode."""

    __slots__ = ("_ahead", "_env", "_journal", "_renderer")

    def __init__(self, journal: EpisodeJournal, env: LiveEnv, renderer: MessageRenderer) -> None:
        self._journal, self._env, self._renderer = journal, env, renderer
        self._ahead: Prompt | None = None

    async def ahead(self) -> Prompt:
        """Render the prompt of the next turn already: its length says whether there is a next turn. `next` returns it.
        Raises PolicyFault if the chat template refuses what the policy's words led to."""
        self._ahead = await self._rendered()
        return self._ahead

    async def next(self) -> Prompt:
        """The prompt of the next turn: the interrupted turn's if there is one. Raises PolicyFault, see `ahead`."""
        # The prompt was rendered after the last answer, to see whether there is room for a turn. It is used here, once,
        # instead of being rendered again.
        prompt_ahead, self._ahead = self._ahead, None
        if prompt_ahead is not None:
            return prompt_ahead
        journal, interrupted = self._journal, self._journal.partial
        if interrupted is None:
            return await self._rendered()
        # The prompt of an interrupted turn is never rendered again: its tokens were sampled after these very ids (law
        # 1). A template or a tool list that changed meanwhile would give others.
        context_ids = interrupted.prompt_ids
        if interrupted.parent is not None:
            context_ids = journal.context_after(interrupted.parent) + context_ids
        return Prompt(interrupted.role, interrupted.parent, interrupted.prompt_ids, context_ids)

    async def start(self, messages: Messages) -> tuple[int, ...]:
        """The tokens of a conversation that starts with `messages`. Every start but the first one, which has them
        already, gets the environment's tools anew: it may not know them earlier, and may have changed them."""
        has_acted = bool(self._journal.turns)
        tool_schemas = await self._env.tool_schemas(again=has_acted)
        return await rendered(
            partial(self._renderer.start, tools=tool_schemas),
            messages,
            tool_schemas,
            env=self._env.task.env,
            acted=has_acted,
            policy_writes=self._env.policy_writes_prompts,
        )

    async def extension(self, last: Turn, messages: Messages) -> tuple[int, ...]:
        """The tokens of `messages` behind those of the turn `last`."""
        tool_schemas = await self._env.tool_schemas()
        return await rendered(
            partial(self._renderer.extend, last.token_ids, tools=tool_schemas),
            messages,
            env=self._env.task.env,
            acted=True,
            policy_writes=self._env.policy_writes_prompts,
        )

    async def _rendered(self) -> Prompt:
        """The prompt of the role that acts next, from the last answer."""
        journal = self._journal
        if journal.turns:
            last_answer = journal.turns[-1].step
            assert last_answer is not None, "the last turn is answered"
            next_role, messages, history = last_answer.role, last_answer.observation, last_answer.history
        else:
            last_answer, next_role, messages, history = None, self._env.latest.role, journal.start, None
        next_role = POLICY if next_role is None else next_role
        if history is not None and last_answer is not None and last_answer.continues is not None:
            return await self._beside(next_role, last_answer.continues, messages)
        if history is not None and (continued := self._continued(history)) is not None:
            last_turn, messages = continued
            prompt_ids = await self.extension(last_turn, messages)
            return Prompt(next_role, last_turn.index, prompt_ids, journal.context_after(last_turn.index) + prompt_ids)
        last_turn = journal.last_turn_of(next_role)
        if history is not None or last_turn is None:
            prompt_ids = await self.start(messages if history is None else history)
            return Prompt(next_role, None, prompt_ids, prompt_ids)
        prompt_ids = await self.extension(last_turn, messages)
        return Prompt(next_role, last_turn.index, prompt_ids, journal.context_after(last_turn.index) + prompt_ids)

    async def _beside(self, role: str, turn_index: int, messages: Messages) -> Prompt:
        """The prompt that goes on from the turn at `turn_index`, after which other conversations took turns. Raises
        EnvError if `role` has no such turn."""
        journal = self._journal
        if not 0 <= turn_index < len(journal.turns) or journal.turns[turn_index].role != role:
            raise EnvError(f"{self._env.task.env}: info['continues'] = {turn_index}: {role} took no such turn")
        await self._env.tool_schemas(again=True)  # this conversation may offer others than the last one
        prompt_ids = await self.extension(journal.turns[turn_index], messages)
        return Prompt(role, turn_index, prompt_ids, journal.context_after(turn_index) + prompt_ids)

    def _continued(self, history: Messages) -> tuple[Turn, Messages] | None:
        """The turn that a raw prompt goes on from, and what the prompt adds to it; None if there is no such turn."""
        new_text = _raw_text(history)
        continued, added = None, new_text
        # Texts are compared, since whoever sends a prompt knows no tokens: if it begins with an earlier prompt and the
        # answer to it, both stay the tokens that they were (law 1). The token that ended the answer is a part of the
        # text then. A client that leaves it out asks for a context without it, and gets a new branch.
        for turn in self._journal.turns if new_text else ():
            row_text = self._row_text(turn)
            if row_text and new_text.startswith(row_text) and len(new_text) - len(row_text) <= len(added):
                continued, added = turn, new_text[len(row_text) :]
        return None if continued is None else (continued, (Message(role="user", content=added, raw=True),))

    def _row_text(self, turn: Turn) -> str:
        """The raw prompt of a turn and all that was sampled behind it; empty where the prompt was rendered."""
        previous_answer = self._journal.turns[turn.index - 1].step if turn.index else None
        history = previous_answer.history if previous_answer is not None else self._journal.start
        prompt_text = _raw_text(history or ())
        # The text of a turn lacks the token that ends it, and only the last such token is left out: one more is.
        stop_token_ids = self._renderer.stop_token_ids[:1]
        return prompt_text and prompt_text + self._renderer.decode((*turn.token_ids, *stop_token_ids))


def _raw_text(messages: Messages) -> str:
    return "".join(message["content"] for message in messages if message.get("raw"))
