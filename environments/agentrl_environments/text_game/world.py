"""The world of the text game: rooms on a grid, locked doors, things to carry.

Pure: a state and a command in, a state and a text out. It knows no model and no reward.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

DIRECTIONS: Final = {"north": (0, 1), "east": (1, 0), "south": (0, -1), "west": (-1, 0)}
OPPOSITE: Final = {"north": "south", "south": "north", "east": "west", "west": "east"}
ROOMS: Final = (
    *("hall", "kitchen", "library", "cellar", "attic", "garden", "workshop", "chapel", "pantry", "study", "stable"),
    *("gallery", "laundry", "armoury", "nursery", "greenhouse"),
)
COLOURS: Final = ("red", "blue", "green")
TREASURES: Final = ("crown", "chalice", "violin", "telescope", "sceptre")
OTHERS: Final = ("rope", "candle", "book", "bucket", "spoon", "blanket")

HELP: Final = (
    "Commands: look, inventory, go DIRECTION, take THING, drop THING, unlock DIRECTION (with the key of its colour in"
    " hand), open chest."
)


@dataclass(frozen=True, slots=True)
class World:
    """It never changes. `exits` are the neighbours of a room by direction, `locks` the colours of locked doors, both
    sides named; the treasure lies in a closed chest in the room `chest`."""

    exits: Mapping[str, Mapping[str, str]]
    locks: Mapping[tuple[str, str], str]
    start: str
    chest: str
    treasure: str
    things: Mapping[str, str]  # where each thing lies at first; the treasure's room is the chest's


@dataclass(frozen=True, slots=True)
class State:
    """Places of the player and all things. `unlocked` are colours; a thing in nobody's room is held."""

    room: str
    held: frozenset[str] = frozenset()
    lying: Mapping[str, str] = field(default_factory=dict[str, str])
    unlocked: frozenset[str] = frozenset()
    chest_open: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal states."""
        return self.room, self.held, tuple(sorted(self.lying.items())), self.unlocked, self.chest_open


def draw(rng: np.random.Generator, rooms: int, locks: int) -> World:
    """A world of `rooms` rooms with `locks` locked doors, on the way to the treasure first, that can be won: drawn anew
    until it can."""
    while True:
        world = _draw(rng, rooms, locks)
        if solve(world, begin(world)) is not None:
            return world


def begin(world: World) -> State:
    """The state in which every game of a world starts."""
    return State(room=world.start, lying=dict(world.things))


def won(world: World, state: State) -> bool:
    """Whether the treasure was carried back to where the game began."""
    return state.room == world.start and world.treasure in state.held


def act(world: World, state: State, command: str) -> tuple[State, str]:
    """Apply one command; one that makes no sense changes nothing and says why."""
    verb, _, rest = " ".join(command.lower().split()).partition(" ")
    rest = rest.removeprefix("the ")
    match verb:
        case "look":
            return state, describe(world, state)
        case "inventory":
            return state, f"You carry {_listed(state.held)}."
        case "go":
            return _go(world, state, rest)
        case "take":
            return _take(world, state, rest)
        case "drop":
            if rest not in state.held:
                return state, f"You do not carry {rest or 'that'}."
            lying = {**state.lying, rest: state.room}
            return replace(state, held=state.held - {rest}, lying=lying), f"You drop the {rest}."
        case "unlock":
            return _unlock(world, state, rest)
        case "open":
            if rest != "chest" or state.room != world.chest:
                return state, f"There is no {rest or 'such thing'} to open here."
            return replace(state, chest_open=True), f"The chest is open. Inside: {world.treasure}."
        case _:
            return state, f"That means nothing here. {HELP}"


def describe(world: World, state: State) -> str:
    """The player's view: room, doors, things."""
    doors = [
        direction + (f" ({colour} door, locked)" if (colour := _lock(world, state, direction)) else "")
        for direction in world.exits[state.room]
    ]
    here = sorted(thing for thing, room in state.lying.items() if room == state.room and _seen(world, state, thing))
    if state.room == world.chest:
        here.append("an open chest" if state.chest_open else "a closed chest")
    seen = f" You see {', '.join(here)}." if here else ""
    return f"You are in the {state.room}. Ways: {', '.join(doors)}.{seen}"


def solve(world: World, state: State) -> list[str] | None:
    """The shortest list of commands that wins from here (breadth first), None if nothing does."""
    seen = {state.key}
    queue: deque[tuple[State, list[str]]] = deque([(state, [])])
    while queue:
        at, done = queue.popleft()
        if won(world, at):
            return done
        for command in _useful(world, at):
            following, _ = act(world, at, command)
            if following.key not in seen:
                seen.add(following.key)
                queue.append((following, [*done, command]))
    return None


def _useful(world: World, state: State) -> Iterator[str]:
    """Commands that a shortest solution may need here: dropping things never helps."""
    needed = {world.treasure, *(f"{colour} key" for colour in world.locks.values())}
    for thing, room in state.lying.items():
        if room == state.room and thing in needed and _seen(world, state, thing):
            yield f"take {thing}"
    if state.room == world.chest and not state.chest_open:
        yield "open chest"
    for direction in world.exits[state.room]:
        colour = _lock(world, state, direction)
        yield f"unlock {direction}" if colour else f"go {direction}"


def _go(world: World, state: State, direction: str) -> tuple[State, str]:
    following = world.exits[state.room].get(direction)
    if following is None:
        return state, f"There is no way {direction or 'without a direction'}."
    if colour := _lock(world, state, direction):
        return state, f"The {colour} door is locked."
    state = replace(state, room=following)
    return state, describe(world, state)


def _take(world: World, state: State, thing: str) -> tuple[State, str]:
    if state.lying.get(thing) != state.room or not _seen(world, state, thing):
        return state, f"There is no {thing or 'such thing'} to take here."
    lying = {name: room for name, room in state.lying.items() if name != thing}
    return replace(state, held=state.held | {thing}, lying=lying), f"You take the {thing}."


def _unlock(world: World, state: State, direction: str) -> tuple[State, str]:
    colour = _lock(world, state, direction)
    if colour is None:
        return state, f"There is no locked door {direction or 'there'}."
    if f"{colour} key" not in state.held:
        return state, f"You need the {colour} key."
    return replace(state, unlocked=state.unlocked | {colour}), f"The {colour} door is unlocked."


def _lock(world: World, state: State, direction: str) -> str | None:
    """The colour of the lock in the way, None if the way is free or there is none."""
    colour = world.locks.get((state.room, direction))
    return None if colour in state.unlocked else colour


def _seen(world: World, state: State, thing: str) -> bool:
    """Things are in plain sight, save the treasure in the closed chest."""
    return thing != world.treasure or state.chest_open


def _draw(rng: np.random.Generator, rooms: int, locks: int) -> World:
    """Any world; the keys may lie where nobody gets to."""
    names = [str(name) for name in rng.permutation(ROOMS)[:rooms]]
    start = names[0]
    places: dict[str, tuple[int, int]] = {start: (0, 0)}
    exits: dict[str, dict[str, str]] = {name: {} for name in names}
    door_to: dict[str, tuple[str, str]] = {}  # of every room but the first: the way by which it is reached
    for name in names[1:]:
        room, direction = door_to[name] = _free(rng, places)
        (x, y), (dx, dy) = places[room], DIRECTIONS[direction]
        places[name] = (x + dx, y + dy)
        exits[room][direction], exits[name][OPPOSITE[direction]] = name, room
    chest = max(names[1:], key=lambda room: sum(map(abs, places[room])))
    needed = list(_way(door_to, chest))
    others = [door_to[name] for name in names[1:] if door_to[name] not in needed]
    doors = [*_shuffled(rng, needed), *_shuffled(rng, others)][:locks]
    front = dict(zip(doors, COLOURS, strict=False))
    back = {(exits[room][direction], OPPOSITE[direction]): colour for (room, direction), colour in front.items()}
    treasure = str(rng.choice(TREASURES))
    things = [f"{colour} key" for colour in front.values()]
    things += [str(thing) for thing in rng.permutation(OTHERS)[: rooms // 2]]
    lying = {thing: str(rng.choice(names)) for thing in things}
    return World(exits, front | back, start, chest, treasure, {**lying, treasure: chest})


def _free(rng: np.random.Generator, places: Mapping[str, tuple[int, int]]) -> tuple[str, str]:
    """A room and a direction in which nothing is yet."""
    free = [
        (room, direction)
        for (room, (x, y)), (direction, (dx, dy)) in itertools.product(places.items(), DIRECTIONS.items())
        if (x + dx, y + dy) not in places.values()
    ]
    return free[int(rng.integers(len(free)))]


def _way(door_to: Mapping[str, tuple[str, str]], room: str) -> Iterator[tuple[str, str]]:
    """The doors between the first room and this one; the rooms are a tree, so that there is no other way."""
    while room in door_to:
        yield door_to[room]
        room = door_to[room][0]


def _shuffled(rng: np.random.Generator, doors: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [doors[int(at)] for at in rng.permutation(len(doors))]


def _listed(things: frozenset[str]) -> str:
    return ", ".join(sorted(things)) or "nothing"
