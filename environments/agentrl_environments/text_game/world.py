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
        drawn_world = _draw(rng, rooms, locks)
        if solve(drawn_world, begin(drawn_world)) is not None:
            return drawn_world


def begin(world: World) -> State:
    """The state in which every game of a world starts."""
    return State(room=world.start, lying=dict(world.things))


def won(world: World, state: State) -> bool:
    """Whether the treasure was carried back to where the game began."""
    return state.room == world.start and world.treasure in state.held


def act(world: World, state: State, command: str) -> tuple[State, str]:
    """Apply one command; one that makes no sense changes nothing and says why."""
    verb_word, _, object_words = " ".join(command.lower().split()).partition(" ")
    object_words = object_words.removeprefix("the ")
    match verb_word:
        case "look":
            return state, describe(world, state)
        case "inventory":
            return state, f"You carry {_listed(state.held)}."
        case "go":
            return _go(world, state, object_words)
        case "take":
            return _take(world, state, object_words)
        case "drop":
            if object_words not in state.held:
                return state, f"You do not carry {object_words or 'that'}."
            lying_things = {**state.lying, object_words: state.room}
            return replace(state, held=state.held - {object_words}, lying=lying_things), f"You drop the {object_words}."
        case "unlock":
            return _unlock(world, state, object_words)
        case "open":
            if object_words != "chest" or state.room != world.chest:
                return state, f"There is no {object_words or 'such thing'} to open here."
            return replace(state, chest_open=True), f"The chest is open. Inside: {world.treasure}."
        case _:
            return state, f"That means nothing here. {HELP}"


def describe(world: World, state: State) -> str:
    """The player's view: room, doors, things."""
    door_words = [
        direction + (f" ({lock_colour} door, locked)" if (lock_colour := _lock(world, state, direction)) else "")
        for direction in world.exits[state.room]
    ]
    things_here = sorted(
        lying_thing
        for lying_thing, thing_room in state.lying.items()
        if thing_room == state.room and _seen(world, state, lying_thing)
    )
    if state.room == world.chest:
        things_here.append("an open chest" if state.chest_open else "a closed chest")
    seen_words = f" You see {', '.join(things_here)}." if things_here else ""
    return f"You are in the {state.room}. Ways: {', '.join(door_words)}.{seen_words}"


def solve(world: World, state: State) -> list[str] | None:
    """The shortest list of commands that wins from here (breadth first), None if nothing does."""
    seen_keys = {state.key}
    open_states: deque[tuple[State, list[str]]] = deque([(state, [])])
    while open_states:
        reached_state, commands = open_states.popleft()
        if won(world, reached_state):
            return commands
        for command in _useful(world, reached_state):
            following, _ = act(world, reached_state, command)
            if following.key not in seen_keys:
                seen_keys.add(following.key)
                open_states.append((following, [*commands, command]))
    return None


def _useful(world: World, state: State) -> Iterator[str]:
    """Commands that a shortest solution may need here: dropping things never helps."""
    needed_things = {world.treasure, *(f"{lock_colour} key" for lock_colour in world.locks.values())}
    for lying_thing, thing_room in state.lying.items():
        if thing_room == state.room and lying_thing in needed_things and _seen(world, state, lying_thing):
            yield f"take {lying_thing}"
    if state.room == world.chest and not state.chest_open:
        yield "open chest"
    for direction in world.exits[state.room]:
        lock_colour = _lock(world, state, direction)
        yield f"unlock {direction}" if lock_colour else f"go {direction}"


def _go(world: World, state: State, direction: str) -> tuple[State, str]:
    following = world.exits[state.room].get(direction)
    if following is None:
        return state, f"There is no way {direction or 'without a direction'}."
    if lock_colour := _lock(world, state, direction):
        return state, f"The {lock_colour} door is locked."
    state = replace(state, room=following)
    return state, describe(world, state)


def _take(world: World, state: State, thing: str) -> tuple[State, str]:
    if state.lying.get(thing) != state.room or not _seen(world, state, thing):
        return state, f"There is no {thing or 'such thing'} to take here."
    lying_things = {thing_name: thing_room for thing_name, thing_room in state.lying.items() if thing_name != thing}
    return replace(state, held=state.held | {thing}, lying=lying_things), f"You take the {thing}."


def _unlock(world: World, state: State, direction: str) -> tuple[State, str]:
    lock_colour = _lock(world, state, direction)
    if lock_colour is None:
        return state, f"There is no locked door {direction or 'there'}."
    if f"{lock_colour} key" not in state.held:
        return state, f"You need the {lock_colour} key."
    return replace(state, unlocked=state.unlocked | {lock_colour}), f"The {lock_colour} door is unlocked."


def _lock(world: World, state: State, direction: str) -> str | None:
    """The colour of the lock in the way, None if the way is free or there is none."""
    lock_colour = world.locks.get((state.room, direction))
    return None if lock_colour in state.unlocked else lock_colour


def _seen(world: World, state: State, thing: str) -> bool:
    """Things are in plain sight, save the treasure in the closed chest."""
    return thing != world.treasure or state.chest_open


def _draw(rng: np.random.Generator, rooms: int, locks: int) -> World:
    """Any world; the keys may lie where nobody gets to."""
    room_names = [str(room_name) for room_name in rng.permutation(ROOMS)[:rooms]]
    start_room = room_names[0]
    room_places: dict[str, tuple[int, int]] = {start_room: (0, 0)}
    room_exits: dict[str, dict[str, str]] = {room_name: {} for room_name in room_names}
    door_to: dict[str, tuple[str, str]] = {}  # of every room but the first: the way by which it is reached
    for room_name in room_names[1:]:
        from_room, direction = door_to[room_name] = _free(rng, room_places)
        (x, y), (dx, dy) = room_places[from_room], DIRECTIONS[direction]
        room_places[room_name] = (x + dx, y + dy)
        room_exits[from_room][direction], room_exits[room_name][OPPOSITE[direction]] = room_name, from_room
    chest_room = max(room_names[1:], key=lambda room: sum(map(abs, room_places[room])))
    needed_doors = list(_way(door_to, chest_room))
    other_doors = [door_to[room_name] for room_name in room_names[1:] if door_to[room_name] not in needed_doors]
    locked_doors = [*_shuffled(rng, needed_doors), *_shuffled(rng, other_doors)][:locks]
    front_locks = dict(zip(locked_doors, COLOURS, strict=False))
    back_locks = {
        (room_exits[from_room][direction], OPPOSITE[direction]): lock_colour
        for (from_room, direction), lock_colour in front_locks.items()
    }
    treasure = str(rng.choice(TREASURES))
    all_things = [f"{lock_colour} key" for lock_colour in front_locks.values()]
    all_things += [str(other_thing) for other_thing in rng.permutation(OTHERS)[: rooms // 2]]
    lying_things = {other_thing: str(rng.choice(room_names)) for other_thing in all_things}
    return World(
        room_exits, front_locks | back_locks, start_room, chest_room, treasure, {**lying_things, treasure: chest_room}
    )


def _free(rng: np.random.Generator, places: Mapping[str, tuple[int, int]]) -> tuple[str, str]:
    """A room and a direction in which nothing is yet."""
    free_ways = [
        (from_room, direction)
        for (from_room, (x, y)), (direction, (dx, dy)) in itertools.product(places.items(), DIRECTIONS.items())
        if (x + dx, y + dy) not in places.values()
    ]
    return free_ways[int(rng.integers(len(free_ways)))]


def _way(door_to: Mapping[str, tuple[str, str]], room: str) -> Iterator[tuple[str, str]]:
    """The doors between the first room and this one; the rooms are a tree, so that there is no other way."""
    while room in door_to:
        yield door_to[room]
        room = door_to[room][0]


def _shuffled(rng: np.random.Generator, doors: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [doors[int(door_index)] for door_index in rng.permutation(len(doors))]


def _listed(things: frozenset[str]) -> str:
    return ", ".join(sorted(things)) or "nothing"
