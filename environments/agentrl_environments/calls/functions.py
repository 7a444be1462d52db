"""Skeletons of functions: a seed chooses their names and descriptions, draws arguments, and writes a clause that asks
for the call. Owns no domain and no score.

A clause is a request without its beginning and its full stop ("reserve the book Low Tide for Ada Dahl"), so that any
frame of `agentrl_environments.calls.tasks` may stand around it. It has the words of each required argument in braces,
by the first of the parameter's names, or `{object.field}` for the field of an object. The phrase of an optional
parameter is added to the clause where the request gives it, with `{}` for the words of its argument.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from agentrl.records import Json
from agentrl_environments.calls.vocabulary import Draw

_SMALL_NUMBERS: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
)
_SPELLED: Final = 0.3
"""The share of small whole numbers that a request writes as words."""
_OPTIONAL_SHARE: Final = 0.5
"""The share of optional arguments that a request gives."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """An argument and its words in the request; of an object the words of each field."""

    value: Json
    words: str
    field_words: Mapping[str, str] = field(default_factory=dict[str, str])


class Kind(Protocol):
    """The type of a parameter."""

    def named(self, rng: random.Random) -> Kind:
        """Itself, with names chosen for all fields within it."""
        ...

    def schema(self) -> dict[str, Json]:
        """The JSON schema, without a description."""
        ...

    def draw(self, rng: random.Random) -> Drawn: ...


class _Plain:
    """A type without fields."""

    def named(self, rng: random.Random) -> Any:
        return self


@dataclass(frozen=True)
class Text(_Plain):
    draw_text: Draw

    def schema(self) -> dict[str, Json]:
        return {"type": "string"}

    def draw(self, rng: random.Random) -> Drawn:
        drawn_text = self.draw_text(rng)
        return Drawn(drawn_text, drawn_text)


@dataclass(frozen=True)
class Choice(_Plain):
    """An enum: its values, each with its words in a request."""

    words_of: Mapping[str, str]

    def schema(self) -> dict[str, Json]:
        return {"type": "string", "enum": list(self.words_of)}

    def draw(self, rng: random.Random) -> Drawn:
        return Drawn(*rng.choice(list(self.words_of.items())))


@dataclass(frozen=True)
class Whole(_Plain):
    lowest: int
    highest: int

    def schema(self) -> dict[str, Json]:
        return {"type": "integer"}

    def draw(self, rng: random.Random) -> Drawn:
        number = rng.randint(self.lowest, self.highest)
        is_spelled = number < len(_SMALL_NUMBERS) and rng.random() < _SPELLED
        return Drawn(number, _SMALL_NUMBERS[number] if is_spelled else str(number))


@dataclass(frozen=True)
class Real(_Plain):
    """A number of tenths."""

    lowest: int
    highest: int

    def schema(self) -> dict[str, Json]:
        return {"type": "number"}

    def draw(self, rng: random.Random) -> Drawn:
        tenths = rng.randint(10 * self.lowest, 10 * self.highest)
        # As the request has it, without a point where it has none: 19 and not 19.0.
        number = tenths / 10 if tenths % 10 else tenths // 10
        return Drawn(number, str(number))


@dataclass(frozen=True)
class Flag(_Plain):
    yes: str
    no: str

    def schema(self) -> dict[str, Json]:
        return {"type": "boolean"}

    def draw(self, rng: random.Random) -> Drawn:
        is_yes = rng.random() < 0.5
        return Drawn(is_yes, self.yes if is_yes else self.no)


@dataclass(frozen=True)
class Several(_Plain):
    """An array of two or more different items of a plain type."""

    item: Kind
    most: int = 3

    def schema(self) -> dict[str, Json]:
        return {"type": "array", "items": self.item.schema()}

    def draw(self, rng: random.Random) -> Drawn:
        item_count, drawn_items = rng.randint(2, self.most), list[Drawn]()
        while len(drawn_items) < item_count:
            drawn_item = self.item.draw(rng)
            if all(drawn_item.value != other.value for other in drawn_items):
                drawn_items.append(drawn_item)
        return Drawn([drawn.value for drawn in drawn_items], listed([drawn.words for drawn in drawn_items]))


@dataclass(frozen=True)
class Record:
    """An object whose fields are all required."""

    fields: tuple[Parameter, ...]

    def named(self, rng: random.Random) -> Record:
        return Record(tuple(parameter.named(rng) for parameter in self.fields))

    def schema(self) -> dict[str, Json]:
        return object_schema(self.fields)

    def draw(self, rng: random.Random) -> Drawn:
        drawn_by_key = {parameter.key: parameter.kind.draw(rng) for parameter in self.fields}
        return Drawn(
            {parameter.name: drawn_by_key[parameter.key].value for parameter in self.fields},
            "",
            {key: drawn.words for key, drawn in drawn_by_key.items()},
        )


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that a function may have. `names` are separated by blanks, the first is its key in clauses;
    `descriptions` are separated by a bar. One with a `phrase` is optional, and has a `default`."""

    names: str
    kind: Kind
    descriptions: str
    phrase: str = ""
    default: Json = None
    key: str = ""

    def named(self, rng: random.Random) -> Parameter:
        """This parameter with one name and one description."""
        return replace(
            self,
            key=self.names.split()[0],
            names=rng.choice(self.names.split()),
            descriptions=rng.choice(self.descriptions.split("|")),
            kind=self.kind.named(rng),
        )

    @property
    def name(self) -> str:
        return self.names

    def schema(self) -> dict[str, Json]:
        default = {"default": self.default} if self.phrase else {}
        return {**self.kind.schema(), "description": self.descriptions, **default}


def object_schema(parameters: tuple[Parameter, ...]) -> dict[str, Json]:
    """The JSON schema of an object with these members."""
    return {
        "type": "object",
        "properties": {parameter.name: parameter.schema() for parameter in parameters},
        "required": [parameter.name for parameter in parameters if not parameter.phrase],
    }


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A function under all of its names. `names` are separated by blanks, `descriptions` and `clauses` by a bar."""

    names: str
    descriptions: str
    clauses: str
    parameters: tuple[Parameter, ...]

    def offer(self, rng: random.Random, domain: str) -> Function:
        """The function under one name, with names for its parameters in one order."""
        words = rng.choice(self.names.split()).split("_")
        if rng.random() < 0.2:
            words = [domain, *words]
        is_camel = rng.random() < 0.25
        name = words[0] + "".join(word.capitalize() for word in words[1:]) if is_camel else "_".join(words)
        named_parameters = [parameter.named(rng) for parameter in self.parameters]
        rng.shuffle(named_parameters)
        description = rng.choice(self.descriptions.split("|"))
        return Function(name, description, self, tuple(named_parameters))


@dataclass(frozen=True, slots=True)
class Request:
    """A call that a user wants: the clause that asks for it, and the arguments that the clause gives."""

    clause: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Function:
    """A function as a task offers it."""

    name: str
    description: str
    skeleton: Skeleton
    parameters: tuple[Parameter, ...]

    @property
    def tool(self) -> dict[str, Json]:
        """The function in OpenAI's schema."""
        parameters = object_schema(self.parameters)
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    def request(self, rng: random.Random) -> Request:
        """A request with arguments drawn."""
        clause = rng.choice(self.skeleton.clauses.split("|"))
        words_by_key, arguments, optional_phrases = dict[str, str](), dict[str, Json](), ""
        for parameter in self.parameters:
            if parameter.phrase and rng.random() >= _OPTIONAL_SHARE:
                continue
            drawn = parameter.kind.draw(rng)
            if parameter.phrase:
                # A default that is asked for may be left out of the call; no request draws one, as few users do.
                while drawn.value == parameter.default:
                    drawn = parameter.kind.draw(rng)
                optional_phrases += parameter.phrase.replace("{}", drawn.words)
            arguments[parameter.name] = drawn.value
            words_by_key[parameter.key] = drawn.words
            words_by_key |= {f"{parameter.key}.{key}": words for key, words in drawn.field_words.items()}
        filled_clause = re.sub(r"\{([\w.]+)\}", lambda place: words_by_key[place[1]], clause)
        return Request(filled_clause + optional_phrases, arguments)


def function(names: str, descriptions: str, clauses: str, *parameters: Parameter) -> Skeleton:
    """A skeleton, as the lists of domains write it."""
    return Skeleton(names, descriptions, clauses, parameters)


def choice(values: str) -> Choice:
    """An enum whose values are their own words in a request."""
    return Choice({value: value.replace("_", " ") for value in values.split()})


def listed(words: list[str]) -> str:
    """Words as a sentence lists them: a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
