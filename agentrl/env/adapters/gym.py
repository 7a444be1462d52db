"""Any `gymnasium.Env` with small actions, played through one tool; FrozenLake, Blackjack and Taxi with good texts.

The observation becomes text, the action the argument of a tool whose schema holds the legal values. Step rewards are
passed on as process rewards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from agentrl import notices
from agentrl.env.limits import EpisodeLimits
from agentrl.env.tool_env import Grade, ToolEnv
from agentrl.env.tools.tool_results import plain_json
from agentrl.env.tools.tools import SchemaTool
from agentrl.errors import ContentParseError, StructuralParseError, ToolError, UsageError
from agentrl.records import Json

AnyEnv = gymnasium.Env[Any, Any]

_MANY_NUMBERS = 1_000


class TextGym(ToolEnv):
    """A gymnasium environment as a language environment.

    `env` is an id, made with `kwargs`, or an environment. Discrete, MultiDiscrete, MultiBinary and Box actions are
    understood; `actions` names discrete ones, and the model may also write a bare name instead of a tool call. An
    `action_mask` in the info (as Taxi has) is enforced: an illegal action is answered with the legal ones. The
    episode is a success if its return reaches `success_return`. Override `show` for a better text of what is seen."""

    limits = EpisodeLimits(turns=100)
    blocking = False
    replayable = True
    graded = False  # step rewards are the whole signal
    rules: str = ""

    def __init__(
        self,
        env: str | AnyEnv,
        *,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        success_return: float | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(env, str) and kwargs:
            raise UsageError("kwargs are for making an environment by its id: this one is made already")
        self._gym: AnyEnv = _made(env, kwargs or {}) if isinstance(env, str) else env
        self._success_return = success_return
        self._names = names_of(self._gym.action_space, actions)
        parameters = {"action": _schema_of(self._gym.action_space, self._names)}
        schema = {"type": "object", "properties": parameters, "required": ["action"], "additionalProperties": False}
        act = SchemaTool(
            "act", "Play one action.", schema, lambda arguments: self.act(arguments["action"]), blocking=False
        )
        super().__init__(tools=[act], **settings)

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Write an observation for the model: the "ansi" rendering, highlights in brackets, else the observation as
        JSON. A frame of pixels is named once as what it is, thousands of numbers: override this method for a better
        text."""
        if self._gym.render_mode == "ansi":
            # A background colour marks where the player is. Removed like the other codes, it would take the one thing
            # along that the model has to know.
            drawn = re.sub(r"\x1b\[(?:\d+;)*4\dm(.)\x1b\[0m", r"[\1]", str(self._gym.render()))
            return re.sub(r"\x1b\[[\d;]*m", "", drawn).strip("\n")
        seen = plain(observation)
        if (size := _size_of_value(seen)) > _MANY_NUMBERS:
            notice = f"an observation is {size} values as text: override show, or wrap the environment in a smaller one"
            notices.note(
                "observations of gymnasium", notice, place=str(self._gym.spec.id if self._gym.spec else self._gym)
            )
        return json.dumps(seen, ensure_ascii=False)

    def make_task(self, options: Mapping[str, Json]) -> Mapping[str, Json]:
        return {"seed": int(self.np_random.integers(2**31)), "options": dict(options)}

    def prompt(self, task: Mapping[str, Any]) -> str:
        observation, info = self._gym.reset(seed=task["seed"], options=task["options"] or None)
        self._mask, self._return = info.get("action_mask"), 0.0
        actions = f"Actions: {', '.join(self._names)}." if self._names else ""
        return "\n\n".join(filter(None, [self.rules, actions, self.show(observation, info)]))

    def on_text(self, text: str) -> str:
        """A bare action name is as good as a call."""
        answer = re.sub(r"[^\w ]", "", text).strip().casefold()
        for name in self._names:
            if answer == name.casefold():
                return self.act(name)
        if self._names:
            raise ContentParseError(f"write one of {', '.join(self._names)}, or call act")
        raise StructuralParseError("no tool call found; call act")

    def act(self, action: Json) -> str:
        """Play one action and show the observation after it. Raises ToolError for one that is not possible now."""
        space: Any = self._gym.action_space
        if self._names:
            number = self._names.index(cast(str, action))
            if self._mask is not None and not self._mask[number]:
                legal = [name for name, allowed in zip(self._names, self._mask, strict=True) if allowed]
                raise ToolError(f"{action} is not possible now; possible: {', '.join(legal) or 'nothing'}")
            played: Any = number + int(space.start)
        else:
            try:
                with np.errstate(over="ignore"):
                    played = np.array(action, dtype=space.dtype)
            except (OverflowError, TypeError, ValueError) as error:
                raise ToolError(f"no number of {space}: {error}") from error
            if not space.contains(played):
                raise ToolError(f"{action} is outside of {space}")
        observation, reward, terminated, truncated, info = self._gym.step(played)
        self.reward(float(reward))
        self._return += float(reward)
        self._mask = info.get("action_mask")
        if terminated or truncated:
            self.finish(truncated=not terminated)
        return self.show(observation, info)

    def grade(self) -> Grade | None:
        """The outcome is 0: step rewards are the whole signal. Without a `success_return` there is no success."""
        if self._success_return is None:
            return None
        return Grade(outcome=0.0, success=self._return >= self._success_return, info={"return": self._return})

    async def aclose(self) -> None:
        await super().aclose()
        self._gym.close()


class FrozenLake(TextGym):
    """`agentrl/FrozenLake-v0`: cross a frozen lake. Every seed has a map of its own (gymnasium's does not follow
    `reset(seed=)`). Process reward: 1 at the goal."""

    rules = (
        "Walk over a frozen lake from the start to the goal G. F is ice, H a hole that ends the walk, @ is you."
        " Answer with one move at a time."
    )

    def __init__(self, *, size: int = 4, frozen: float = 0.8, slippery: bool = False, **settings: Any) -> None:
        self._size, self._frozen, self._slippery = size, frozen, slippery
        super().__init__(self._map(0), actions=("left", "down", "right", "up"), success_return=1.0, **settings)

    def _map(self, seed: int) -> AnyEnv:
        drawn = generate_random_map(self._size, p=self._frozen, seed=seed)
        return _made("FrozenLake-v1", {"desc": drawn, "is_slippery": self._slippery})

    def prompt(self, task: Mapping[str, Any]) -> str:
        self._gym.close()
        self._gym = self._map(task["seed"])
        return super().prompt(task)

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:
        rows = [[cell.decode() for cell in row] for row in cast(Any, self._gym.unwrapped).desc]
        rows[int(observation) // self._size][int(observation) % self._size] = "@"
        return "\n".join(" ".join(row) for row in rows)


class Blackjack(TextGym):
    """`agentrl/Blackjack-v0`: hit or stick. Process reward: 1 for a win, -1 for a loss."""

    rules = (
        "Play one hand of blackjack: come closer to 21 than the dealer without going over. An ace counts 11 if usable."
    )

    def __init__(self, **settings: Any) -> None:
        super().__init__("Blackjack-v1", actions=("stick", "hit"), success_return=1.0, **settings)

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:
        total, dealer, ace = (int(part) for part in observation)
        mine = f"{total} with a usable ace" if ace else str(total)
        return f"You have {mine}. The dealer shows {'an ace' if dealer == 1 else dealer}."


class Taxi(TextGym):
    """`agentrl/Taxi-v0`: fetch a passenger and bring them to their destination. Actions that do nothing are masked.
    Process reward: -1 a move, 20 for the delivery, -10 for a wrong pickup or dropoff."""

    rules = "Drive the taxi to the passenger, pick them up, drive to the destination and drop them off. | is a wall."
    _stops = ("R", "G", "Y", "B")

    def __init__(self, **settings: Any) -> None:
        actions = ("south", "north", "east", "west", "pickup", "dropoff")
        super().__init__("Taxi-v4", actions=actions, success_return=0.0, **settings)

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:
        taxi = cast(Any, self._gym.unwrapped)
        row, column, passenger, destination = taxi.decode(int(observation))
        drawn = [[cell.decode() for cell in line] for line in taxi.desc]
        drawn[row + 1][2 * column + 1] = "@"
        waits = "is in the taxi" if passenger == len(self._stops) else f"waits at {self._stops[passenger]}"
        situation = f"The taxi is @. The passenger {waits}. The destination is {self._stops[destination]}."
        return "\n".join(["".join(line) for line in drawn] + [situation])


def _made(id: str, kwargs: Mapping[str, Any]) -> AnyEnv:
    """The environment, with its text rendering where it has one."""
    env = gymnasium.make(id, disable_env_checker=True, **kwargs)
    # Made twice: which modes an environment has stands on the environment, and the mode can be given only when it is
    # made.
    if env.render_mode is None and "ansi" in env.metadata.get("render_modes", ()):
        env.close()
        env = gymnasium.make(id, disable_env_checker=True, render_mode="ansi", **kwargs)
    return env


def names_of(space: Any, actions: Sequence[str] | None) -> tuple[str, ...]:
    """The names of a Discrete space's values, by default their numbers; nothing for other spaces."""
    if not isinstance(space, spaces.Discrete):
        if actions is not None:
            raise UsageError(f"actions name the values of a Discrete space, not of {space}")
        return ()
    count, start = _size_of(space)
    names = tuple(actions) if actions is not None else tuple(str(start + i) for i in range(count))
    if len(names) != count or len(set(names)) < count:
        raise UsageError(f"{len(names)} action names for {count} actions: give each its own")
    return names


def _size_of_value(value: Any) -> int:
    """How many values stand in a plain observation."""
    if isinstance(value, dict | list):
        items = cast("dict[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
        return sum(map(_size_of_value, items))
    return 1


def _size_of(space: Any) -> tuple[int, int]:
    return int(space.n), int(space.start)


def _schema_of(space: Any, names: Sequence[str]) -> Mapping[str, Json]:
    """The JSON schema of an action. Raises UsageError for spaces that have no small one."""
    if names:
        return {"type": "string", "enum": list(names)}
    shape: tuple[int, ...] = space.shape or ()
    length: dict[str, Json] = {"type": "array", "minItems": shape[0], "maxItems": shape[0]} if len(shape) == 1 else {}
    if length and isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        return {**length, "items": {"type": "integer"}}
    if length and isinstance(space, spaces.Box):
        return {**length, "items": {"type": "number", **_bounds_of(space)}}
    raise UsageError(f"actions from {space} have no small JSON form: wrap the environment so that they are Discrete")


def _bounds_of(space: Any) -> dict[str, Json]:
    # JSON has no infinity, so an unbounded side cannot stand in the schema. `contains` checks each number all the same.
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        return {}
    return {"minimum": float(space.low.min()), "maximum": float(space.high.max())}


def plain(value: Any) -> Any:
    """An observation as JSON has it: arrays, sets and numbers of numpy as plain values, keys as texts."""
    return plain_json(value, "show")
