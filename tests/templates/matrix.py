"""What a renderer does with each real template, beside what the template itself writes for the whole history.

The oracle is the template, rendered by transformers' own compiler for the whole conversation. Where the assistant's
turn ends in that text follows from what the catalogue says of the family, not from the renderer under test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers.utils import chat_template_utils

from agentrl.engine.rendering.renderer import Renderer
from agentrl.errors import ModelError

from .catalogue import Real

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "Where."}},
                "required": ["path"],
            },
        },
    }
    for name in ("run_tests", "read_file")
]
NEXTS = ("user", "tool", "two tools")
END = "its end"


@dataclass(frozen=True)
class Cell:
    """One way to end a turn (`end`), and what follows (`next`): "equal", or what is otherwise and why."""

    next: str
    end: str
    result: str


def messages_of(
    next: str, *, ids: Sequence[str] = ("call00001", "call00002"), text: bool = False
) -> list[dict[str, Any]]:
    """A conversation whose second message is the assistant's."""
    asked = {"role": "user", "content": "Is it green?"}
    if next == "user":
        return [asked, {"role": "assistant", "content": "It is GREEN"}, {"role": "user", "content": "And now?"}]
    count = 1 if next == "tool" else 2
    names, values = ("run_tests", "read_file")[:count], ("tests/a", "LAST")[-count:]
    calls: list[dict[str, Any]] = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": {"path": value}}}
        for id, name, value in zip(ids, names, values, strict=False)
    ]
    if text:
        for call, value in zip(calls, values, strict=True):
            call["function"]["arguments"] = f'{{"path": "{value}"}}'
    answers = [
        {"role": "tool", "name": name, "tool_call_id": id, "content": f"{name} says GOOD"}
        for id, name in zip(ids, names, strict=False)
    ]
    return [asked, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]


@cache
def _compiled(source: str) -> Any:
    return chat_template_utils._compile_jinja_template(source)


def oracle(real: Real, messages: Sequence[dict[str, Any]], tools: bool, asks: bool = True) -> str:
    """What the template writes, by transformers' compiler. Raises whatever it raises."""
    names = {"bos_token": real.family.bos, "eos_token": real.family.eos}
    shaped = [real.shaped(message) for message in messages]
    return _compiled(real.source).render(
        messages=shaped, tools=TOOLS if tools else None, add_generation_prompt=asks, **names
    )


def cells(real: Real, folder: Path, renderer: Renderer | None = None) -> Iterator[Cell]:
    """Every way to end a turn, with every kind of next message. Raises ModelError for a folder that is refused."""
    renderer = renderer or Renderer(folder)
    encode = renderer.conversations.tokenizer.encode
    for next in NEXTS:
        family, called = real.family, next != "user"
        try:
            history = messages_of(next, ids=real.ids)
            whole = oracle(real, history, called or real.for_tools_only)
            before = oracle(real, history[:1], called or real.for_tools_only)
        except Exception as error:
            refusal = f"{_as_text(renderer, history)}; the template refuses it: {' '.join(str(error).split())[:90]}"
            yield Cell(next, "", refusal if called else f"REFUSED: {error}")
            continue
        said = "LAST" if called else "GREEN"
        if called and (said not in whole or whole.count("says GOOD") != len(history) - 2):
            yield Cell(next, "", _as_text(renderer, history))
            continue
        at = whole.rindex(said) + len(said)
        end = family.calls if called else family.text
        if end and end.strip() not in whole[at:]:  # the model ends its turn, the template's history does not
            closing = whole.index(family.answers, at)
            ways = {f"{end} instead": -closing, "cut": closing}
        elif end:
            closing = whole.index(end.strip(), at)
            ways = {END: closing + len(end.strip()), "cut": closing}
            ways |= {f"{other} instead": closing + len(end.strip()) for other in family.ends if other != end}
            if family.final and not called:
                del ways[END]
        else:
            closing = min(found for marker in family.markers if (found := whole.find(marker, at)) >= 0)
            marker = next_marker(whole, closing, family.markers)
            ways = {f"{marker} of the next speaker": closing + len(marker), "cut": closing}
            ways |= {f"{other} instead": -closing for other in family.ends if other != marker}
        for way, place in ways.items():
            expected = encode(whole).ids[len(encode(whole[: abs(place)]).ids) :]
            start = len(before) if whole.startswith(before) else 0
            sampled = encode(whole[start : abs(place)]).ids
            if way.endswith(" instead"):
                cut = closing if place > 0 else abs(place)
                sampled = [*encode(whole[start:cut]).ids, *encode(way.removesuffix(" instead")).ids]
            try:
                added = list(renderer.extend(sampled, history[2:], TOOLS if called or real.for_tools_only else ()))
            except ModelError as error:
                yield Cell(next, way, f"REFUSED: {error}")
                continue
            if way.endswith(" instead") and added == encode(whole[closing:]).ids:
                yield Cell(next, way, "kept; what the template ends the turn with follows")
            elif added != expected:
                yield Cell(
                    next,
                    way,
                    f"OTHERWISE: {renderer.conversations.tokenizer.decode(added, skip_special_tokens=False)!r}",
                )
            elif not whole.startswith(before):
                yield Cell(next, way, "equal; the template rewrites what stands before")
            elif called and not renderer.conversations.template(tools=True).writes_tools:
                yield Cell(next, way, "equal; the tools stand in the system message")
            elif (
                not way.endswith(" instead")
                and [*renderer.start(history[:1], TOOLS if called or real.for_tools_only else ()), *sampled, *added]
                != encode(whole).ids
            ):
                yield Cell(next, way, "OTHERWISE as a whole")
            else:
                yield Cell(next, way, "equal")


def next_marker(whole: str, at: int, markers: Sequence[str]) -> str:
    return next(marker for marker in markers if whole.startswith(marker, at))


def _as_text(renderer: Renderer, history: list[dict[str, Any]]) -> str:
    """A template that leaves out calls or answers: whether ours are in what the renderer makes of it."""
    added = renderer.conversations.tokenizer.decode(
        list(renderer.extend((), history[2:], TOOLS)), skip_special_tokens=False
    )
    fork = renderer.conversations.tokenizer.decode(list(renderer.start(history, TOOLS)), skip_special_tokens=False)
    count = len(history) - 2
    told = "Does run_tests" in fork or "run_tests" in fork.partition("Is it green?")[0]
    if added.count("says GOOD") == fork.count("says GOOD") == count and "LAST" in fork and told:
        return "as text"
    return f"LOST: {added!r} {fork[-300:]!r}"


def demonstration(real: Real, renderer: Renderer) -> str:
    """How a demonstration with a call is trained, or why it is refused."""
    talk = [*messages_of("tool", ids=real.ids), {"role": "assistant", "content": "It is GREEN"}]
    how = "trained"
    try:
        turns = renderer.demonstrated(talk, TOOLS)  # pyright: ignore[reportArgumentType]
    except ModelError as error:
        thoughtful = [{**one, "reasoning_content": "Hm."} if one["role"] == "assistant" else one for one in talk]
        try:
            turns, how = renderer.demonstrated(thoughtful, TOOLS), "trained with its reasoning"  # type: ignore[arg-type]
        except ModelError:
            return "refused: " + str(error).partition("' ")[2].partition(":")[0].replace("|", "\\|")
    said = [renderer.conversations.tokenizer.decode(list(own), skip_special_tokens=False) for _, own in turns]
    call, text = said
    if "run_tests" in call and "LAST" in call and "GREEN" in text:
        ends = all(own[-1] in renderer.extensions.ends for _, own in turns)
        return how if ends else f"LOST the end: {said}"
    return f"LOST: {said}"
