"""The tokens behind a turn's sampled ones: the end of the turn, new messages, the opening of the next turn.

It renders a small conversation whose assistant turn is a sentinel, followed by the new messages, and the same without
them. Both go on behind the sentinel with the end of the assistant's turn; what follows it in the first is the new part.
In front of the answers to tool calls the small turn makes these calls, since many templates write an answer only to a
call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, cast

from agentrl.engine.rendering.chat_template import ChatTemplate
from agentrl.engine.rendering.conversations import Conversations, Tools
from agentrl.engine.rendering.model_folder import ModelFolder
from agentrl.engine.rendering.prefilled import PREFIX_END, ends_with_prefix, marked, unused
from agentrl.errors import ModelError
from agentrl.records import Json, Message

SENTINEL: Final = "zqTURNqz"
_QUESTION: Final[Message] = {"role": "user", "content": "."}
_ANSWER: Final[Message] = {"role": "tool", "content": "."}


# Why a sentinel marks where the rest of a conversation begins, and the conversation is not rendered again.
#
# The tokens of a turn are those that were sampled (law 1). To render the whole conversation as text and encode it again
# gives others: a tokenizer merges over the border between two messages, a template strips blanks, drops the thoughts of
# earlier turns or writes a tool call in its own order. The prompt would then hold tokens that nobody sampled, with
# log-probabilities that belong to nothing, and the row would fork at every turn. So only what follows a turn is
# rendered, and is put behind the sampled tokens.
#
# To cut the rendered text where the earlier conversation ends is not enough: many templates write the past in another
# way once something follows it. So a small conversation is rendered twice, with and without the new messages, and a
# sentinel stands for the turn in both. What stands behind the sentinel in the first is the end of the turn and the new
# part; what stands behind it in the second says where the turn ends. The sentinel is made unlike any text in the
# messages (`unused`), so that a tool's answer that quotes it cannot move the border.
#
# A turn that was cut by its token limit has no end token. Then the end is added, since the model has to see a closed
# turn; a tool call that was cut is left as it is, since closing its syntax would put words into the policy's mouth.
#
# A template that shows the text of a turn twice, or in another form, cannot be extended. It is refused with its name
# before the first episode. `tests/engine/test_renderer.py` goes through the templates that packages bring.
class Extensions:
    """Extends conversations. `ends` are the tokens that end a turn in a history, `stop_token_ids` those that a model
    may end it with. Raises ModelError for a template that ends no turn with a special token."""

    def __init__(self, conversations: Conversations, folder: ModelFolder) -> None:
        self._conversations, self._template_name = conversations, f"the chat template of {conversations.folder!r}"
        # The second rendering is without the new messages, so it is one of a few texts for all turns of a run.
        self._encode_again = lru_cache(maxsize=16)(conversations.encode)  # for a text that each turn has
        # Empty at first: `_find_stops` itself asks `_continued`, and so an end of turn is looked for before any is
        # known.
        self.ends: set[int] = set()
        self.ends, self.stop_token_ids = self._find_stops(folder)

    def extended(self, sampled: Sequence[int], news: list[Message], tools: Tools) -> tuple[int, ...]:
        """The tokens to append after a turn's `sampled` ones."""
        template = self._conversations.template(tools=bool(tools))
        behind, alone, makes_calls = self._continued(template, self._conversations.readable(template, news), tools)
        turn_end, is_closed = self._end_of_turn(behind, alone)
        last_token = sampled[-1] if sampled else None
        # The model's own end token stays, also where the template would write another one of its stop tokens: it was
        # sampled (law 1). `test_harmony_keeps_the_token_that_ended_the_turn` has a dialect with several.
        if last_token == behind[turn_end] or (is_closed and last_token in self.stop_token_ids):
            return tuple(behind[turn_end + 1 :])
        if makes_calls:  # the call may be broken off anywhere: nothing of its syntax is added
            return tuple(behind[turn_end:])
        # An end of several tokens may have been begun when the limit cut the turn: its first tokens are sampled ones,
        # and are not written twice (`test_an_end_of_several_tokens_that_was_begun_is_not_begun_again`).
        return tuple(behind[_overlap(sampled, behind[:turn_end]) :])

    def ended(self, turn_ids: tuple[int, ...], message: Message, tools: Tools) -> tuple[int, ...]:
        """A message that the template ends only where another one follows, with the token that a model ends it with."""
        following = _ANSWER if message.get("tool_calls") else _QUESTION
        template = self._conversations.template(tools=bool(tools))
        behind, alone, _ = self._continued(template, self._conversations.readable(template, [following]), tools)
        turn_end, _ = self._end_of_turn(behind, alone)
        return (*turn_ids, behind[turn_end])

    def _continued(
        self, template: ChatTemplate, news: Sequence[Message], tools: Tools
    ) -> tuple[list[int], list[int], bool]:
        """The tokens behind the sentinel of a small conversation with and without the new messages, and whether its
        turn made calls. Raises ModelError for messages that the template refuses behind every kind of turn."""
        sentinel, refusal = unused(SENTINEL, news), ModelError("")
        prefix_end = unused(PREFIX_END, news) if ends_with_prefix(news) else ""
        turn_kinds = _turns_before(news, sentinel)
        if not template.writes_tools:
            tools = ()
        for turn, answers in turn_kinds:
            try:
                behind = template.render([_QUESTION, turn, *marked(answers, prefix_end)], tools, asks=not prefix_end)
                behind = behind.rpartition(prefix_end)[0] if prefix_end else behind
                alone = template.render([_QUESTION, turn], tools, asks=False)
            except ModelError as error:
                # The first refusal is that of the likeliest kind of turn, so it is the one that tells its reader
                # something.
                refusal = error if not str(refusal) else refusal
                continue
            # A template may write a call's arguments twice. As many places as in the text without a continuation
            # belong to the turn, and a later one to the new messages.
            places = alone.count(sentinel) or behind.count(sentinel)
            talk = [_QUESTION, turn, *answers]
            if places and all(self._shown(template, talk, place, behind) for place in range(2, len(talk))):
                ended, last = (text.split(sentinel, places)[-1] if sentinel in text else "" for text in (behind, alone))
                return list(self._conversations.encode(ended)), list(self._encode_again(last)), "tool_calls" in turn
        if str(refusal):
            raise refusal
        raise ModelError(
            f"{self._template_name} does not write an assistant's text as it is, once, and what follows it"
        )

    def _shown(self, template: ChatTemplate, messages: list[Message], at: int, written: str) -> bool:
        """Whether the answer at this place is in what was written, if need be by the difference that it makes."""
        if messages[at]["role"] != "tool" or (content := messages[at]["content"].strip()) in written:
            return True
        emptied_message = cast("Message", {**messages[at], "content": ""})
        return bool(content) and template.render([*messages[:at], emptied_message, *messages[at + 1 :]]) != written

    def _end_of_turn(self, behind: list[int], alone: list[int]) -> tuple[int, bool]:
        """Where the assistant's turn ends in the tokens `behind` it, which are `alone` if no message follows; and
        whether a token there ends it, as against the first one of the next message."""
        same = _common(behind, alone)
        for place in range(same):
            if behind[place] in self.ends:
                return place, not self._opens_block(behind[place])
        special = self._conversations.added_tokens
        if same < len(alone) and alone[same] in self.ends and behind[same : same + 1] and behind[same] in special:
            return same, True  # a last turn ends with another token
        mark_at = next((place for place in range(same, len(behind)) if behind[place] in special), same)
        if mark_at > same and behind[mark_at] in self.ends:  # a last turn ends with none
            return mark_at, True
        return min(same, len(behind) - 1), False

    def _opens_block(self, token: int) -> bool:
        """Gemma's `<|tool_response>`, with which a turn ends, is the head of the answer, which ends with
        `<tool_response|>`."""
        token_text = self._conversations.tokenizer.id_to_token(token) or ""
        return token_text.startswith("<|") and not token_text.endswith("|>")

    def _find_stops(self, folder: ModelFolder) -> tuple[set[int], tuple[int, ...]]:
        """The tokens that end a turn in a history; and those with which a model may end it: the end tokens of its
        generation settings and the tokenizer's. Where the folder has no generation settings, also what the template
        writes there. (A format may close messages inside a turn with it.) Raises ModelError if no special token follows
        a turn."""
        conversations, generation_ends = self._conversations, folder.generation_ends
        eos_text = folder.token_texts.get("eos_token")
        eos = conversations.tokenizer.token_to_id(eos_text) if eos_text else None
        stops = set(generation_ends or ()) if eos is None else {eos, *(generation_ends or ())}
        turn_ends, written = set(stops), set[int]()
        special = conversations.added_tokens
        for following in (_QUESTION, _ANSWER) if generation_ends is None else (_QUESTION,):
            try:
                behind, alone, _ = self._continued(conversations.template(tools=following is _ANSWER), [following], ())
            except ModelError:
                if following is _QUESTION:
                    raise
                continue  # it knows no tools
            shared_length = _common(behind, alone)
            turn_marks = [
                token
                for token in behind
                if token in special and (following is _QUESTION or special[token].content in conversations.special)
            ]
            common_marks = [token for token in behind[:shared_length] if token in turn_marks]
            if any(token in stops for token in common_marks) or (turn_marks and turn_marks[0] in stops):
                continue
            if common_marks:  # a mark may close the text before the token that ends the turn
                turn_ends.add(common_marks[-1])
                written.add(common_marks[-1])
            elif behind[shared_length : shared_length + 1] and behind[shared_length] in turn_marks:
                written.add(behind[shared_length])
            elif following is _QUESTION:
                raise ModelError(f"{self._template_name} does not end an assistant's turn with a special token")
        return turn_ends, tuple(sorted(stops if generation_ends is not None else stops | written))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same


def _overlap(sampled: Sequence[int], behind: Sequence[int]) -> int:
    """How many of the first tokens `behind` the turn are its last ones already."""
    most = min(len(sampled), len(behind))
    return next((n for n in range(most, 0, -1) if list(sampled[-n:]) == list(behind[:n])), 0)


def _turns_before(news: Sequence[Message], sentinel: str) -> Iterator[tuple[Message, list[Message]]]:
    """Turns that may stand before the new messages, with these, the likeliest first: one that makes the calls that the
    messages answer, with their ids or with such as the strictest template takes; only the last call, for templates that
    know one at a time; a text."""
    first_other = next((position for position, message in enumerate(news) if message["role"] != "tool"), len(news))
    if answer_messages := news[:first_other]:
        tool_messages = [cast("Message", {"name": "tool", **message}) for message in answer_messages]
        counted = [
            cast("Message", {**tool_message, "tool_call_id": f"call{position:05d}"})
            for position, tool_message in enumerate(tool_messages)
        ]
        identified = [
            cast("Message", {**count, **tool_message})
            for count, tool_message in zip(counted, tool_messages, strict=True)
        ]
        # All calls first, then only the last one: a template that knows one call a message refuses the former.
        for first_call in (0, len(tool_messages) - 1)[: len(tool_messages)]:
            for answers in (identified, counted):
                tool_calls = [_call_answered(answer, sentinel) for answer in answers[first_call:]]
                assistant_turn = cast("Message", {"role": "assistant", "content": "", "tool_calls": tool_calls})
                yield assistant_turn, [*answers, *news[first_other:]]
        news = [*identified, *news[first_other:]]
    yield {"role": "assistant", "content": sentinel}, list(news)


def _call_answered(answer: Message, sentinel: str) -> dict[str, Json]:
    function: dict[str, Json] = {"name": answer.get("name", ""), "arguments": {"key": sentinel}}
    return {"id": answer.get("tool_call_id"), "type": "function", "function": function}
