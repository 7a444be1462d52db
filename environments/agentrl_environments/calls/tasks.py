"""A seed makes a task: functions, a request, the calls that answer it. Owns the kinds and the frames of requests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from agentrl.errors import ConfigError
from agentrl.records import Json
from agentrl_environments.calls.functions import Function, Request, Skeleton, listed, object_schema
from agentrl_environments.calls.held_out_domains import HELD_OUT
from agentrl_environments.calls.scoring import Call, Parameters, call_fits
from agentrl_environments.calls.train_domains import TRAIN

Split = Literal["train", "held_out"]
DOMAINS: Final[Mapping[Split, Mapping[str, Sequence[Skeleton]]]] = {"train": TRAIN, "held_out": HELD_OUT}
KINDS: Final = ("simple", "multiple", "parallel", "parallel_multiple", "irrelevance")

_GREETINGS: Final = ("Hello! ", "Hi there. ", "Good morning. ", "I have a request. ", "Sorry to bother you. ")
_GREETING_SHARE: Final = 0.25
_SINGLE: Final = (
    "Please {c}.",
    "Can you {c}?",
    "Could you {c}, please?",
    "I need you to {c}.",
    "I would like you to {c}.",
    "{C}.",
    "{C}, please.",
    "Would you {c}?",
    "It would help me if you could {c}.",
    "Go ahead and {c}.",
)
_TALK: Final[Mapping[Split, tuple[str, ...]]] = {
    "train": (
        "Tell me a joke about penguins.",
        "What is the capital of Portugal?",
        "Write a short poem about the sea.",
        "Who painted the ceiling with the two hands that almost touch?",
        "Explain to a child why the sky is blue.",
        "Give me three names for a grey cat.",
        "What does the word serendipity mean?",
        "How do I say good evening in Norwegian?",
    ),
    "held_out": (
        "Tell me a riddle about candles.",
        "Which river flows through Vienna?",
        "Write two lines about autumn leaves.",
        "Explain why ice floats on water.",
        "Give me a title for a story about a lost key.",
        "What is the opposite of patience?",
    ),
}
"""Requests that no function of any domain answers."""
_TALK_SHARE: Final = 0.2
"""The share of irrelevance tasks that are such talk."""
_REFUSALS: Final = (
    "None of the functions that I have can do that.",
    "I am sorry, there is no function for this request.",
    "The offered functions do not fit this request, so I call none.",
    "I cannot do that with the functions at hand.",
)


@dataclass(frozen=True, slots=True)
class CallsTask:
    """Functions, a request and its answer. `expected` is empty where no function fits; `refusal` is then a
    right answer. `misfit` is a call that is never right."""

    kind: str
    domain: str
    tools: tuple[Mapping[str, Any], ...]
    request: str
    expected: tuple[Call, ...]
    misfit: Call
    refusal: str

    @property
    def parameters(self) -> Parameters:
        """The parameters of the offered functions by name."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}


def check_kinds(kinds: str | Sequence[str]) -> tuple[str, ...]:
    """The kinds that a setting names. Raises ConfigError for one that is none, and for no kind at all."""
    names = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if not names or any(name not in KINDS for name in names):
        raise ConfigError("kinds", kinds, f"give some of {', '.join(KINDS)}")
    return names


def make_task(seed: int, split: Split, kinds: Sequence[str]) -> CallsTask:
    """The task of a seed, the same in every process."""
    rng = random.Random(f"{split}/{seed}")
    kind = rng.choice(list(kinds))
    domain = rng.choice(list(DOMAINS[split]))
    drawn_skeletons = rng.sample(DOMAINS[split][domain], 3)
    is_greeted = rng.random() < _GREETING_SHARE
    greeting = rng.choice(_GREETINGS) if is_greeted else ""
    if kind == "irrelevance":
        absent_function = drawn_skeletons[0].offer(rng, domain)
        offered = _others(rng, split, domain, drawn_skeletons[1:], rng.randint(1, 3))
        is_talk = rng.random() < _TALK_SHARE
        sentence = rng.choice(_TALK[split]) if is_talk else _framed(rng, [absent_function.request(rng).clause])
        misfit = Call(offered[0].name, offered[0].request(rng).arguments)
        requested = list[tuple[Function, Request]]()
    else:
        function_count = rng.choice((2, 2, 3)) if kind == "parallel_multiple" else 1
        functions = [skeleton.offer(rng, domain) for skeleton in drawn_skeletons[:function_count]]
        call_count = 1 if kind in ("simple", "multiple") else rng.choice((2, 2, 3))
        requested = _requests(rng, functions, max(call_count, function_count))
        other_count = {"simple": 0, "parallel": 0, "multiple": rng.randint(1, 3)}.get(kind, rng.randint(0, 1))
        others = _others(rng, split, domain, drawn_skeletons[function_count:], other_count)
        offered = functions + others
        sentence = _framed(rng, [request.clause for _, request in requested])
        wrong_name = others[0].name if others else f"{functions[0].name}_now"
        misfit = Call(wrong_name, requested[0][1].arguments)
    rng.shuffle(offered)
    return CallsTask(
        kind=kind,
        domain=domain,
        tools=tuple(function.tool for function in offered),
        request=greeting + sentence,
        expected=tuple(Call(function.name, request.arguments) for function, request in requested),
        misfit=misfit,
        refusal=rng.choice(_REFUSALS),
    )


def _others(
    rng: random.Random, split: Split, domain: str, neighbours: Sequence[Skeleton], count: int
) -> list[Function]:
    """Functions beside those of the request: of its own domain, which are easily mistaken, and of others."""
    functions = [skeleton.offer(rng, domain) for skeleton in neighbours if rng.random() < 0.6][:count]
    other_domains = [other for other in DOMAINS[split] if other != domain]
    for other in rng.sample(other_domains, count - len(functions)):
        functions.append(rng.choice(list(DOMAINS[split][other])).offer(rng, other))
    return functions


def _requests(rng: random.Random, functions: Sequence[Function], count: int) -> list[tuple[Function, Request]]:
    """`count` requests, one of each function at least, none of them answered by the call of another."""
    requested = list[tuple[Function, Request]]()
    while len(requested) < count:
        function = functions[len(requested)] if len(requested) < len(functions) else rng.choice(list(functions))
        request = function.request(rng)
        if not any(earlier is function and _is_same(function, first, request) for earlier, first in requested):
            requested.append((function, request))
    return requested


def _is_same(function: Function, first: Request, second: Request) -> bool:
    """Whether one call could answer both requests."""
    schemas = {function.name: object_schema(function.parameters)}
    calls = [Call(function.name, request.arguments) for request in (first, second)]
    return call_fits(schemas, *calls) or call_fits(schemas, *reversed(calls))


def _framed(rng: random.Random, clauses: list[str]) -> str:
    """A request of one or several clauses."""
    capital_clauses = [clause[0].upper() + clause[1:] for clause in clauses]
    if len(clauses) == 1:
        return rng.choice(_SINGLE).replace("{c}", clauses[0]).replace("{C}", capital_clauses[0])
    number = ("two", "three")[len(clauses) - 2]
    frames = (
        f"Please {'; then '.join(clauses)}.",
        f"First {', then '.join(clauses)}.",
        f"I need {number} things: {'; '.join(clauses)}.",
        f"{'. Also, '.join([capital_clauses[0], *clauses[1:]])}.",
        f"Can you do {number} things for me? {'. '.join(capital_clauses)}.",
        f"Please {listed(clauses) if len(clauses) == 2 else ', '.join(clauses[:-1]) + ', and ' + clauses[-1]}.",
    )
    return rng.choice(frames)


def changed(schema: Mapping[str, Any], value: Any) -> Json:
    """A value that the schema allows or nearly allows, and that is not `value`."""
    match schema["type"]:
        case "string" if "enum" in schema:
            return next(other for other in schema["enum"] if other != value)
        case "string":
            return f"{value} two"
        case "boolean":
            return not value
        case "array":
            return value[:-1]
        case "object":
            name = next(iter(value))
            return {**value, name: changed(schema["properties"][name], value[name])}
        case _:
            return value + 1
