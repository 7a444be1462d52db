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
        act_schema = {"type": "object", "properties": parameters, "required": ["action"], "additionalProperties": False}
        act_tool = SchemaTool(
            "act", "Play one action.", act_schema, lambda arguments: self.act(arguments["action"]), blocking=False
        )
        super().__init__(tools=[act_tool], **settings)

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Write an observation for the model: the "ansi" rendering, highlights in brackets, else the observation as
        JSON. A frame of pixels is named once as what it is, thousands of numbers: override this method for a better
        text."""
        if self._gym.render_mode == "ansi":
            # A background colour marks where the player is. Removed like the other codes, it would take the one thing
            # along that the model has to know.
            rendered = re.sub(r"\x1b\[(?:\d+;)*4\dm(.)\x1b\[0m", r"[\1]", str(self._gym.render()))
            return re.sub(r"\x1b\[[\d;]*m", "", rendered).strip("\n")
        plain_observation = plain(observation)
        if (value_count := _size_of_value(plain_observation)) > _MANY_NUMBERS:
            correction = "override show, or wrap the environment in a smaller one"
            size_notice = f"an observation is {value_count} values as text: {correction}"
            env_name = str(self._gym.spec.id if self._gym.spec else self._gym)
            notices.note("observations of gymnasium", size_notice, place=env_name)
        return json.dumps(plain_observation, ensure_ascii=False)

    def make_task(self, options: Mapping[str, Json]) -> Mapping[str, Json]:
        return {"seed": int(self.np_random.integers(2**31)), "options": dict(options)}

    def prompt(self, task: Mapping[str, Any]) -> str:
        observation, reset_info = self._gym.reset(seed=task["seed"], options=task["options"] or None)
        self._mask, self._return = reset_info.get("action_mask"), 0.0
        action_line = f"Actions: {', '.join(self._names)}." if self._names else ""
        return "\n\n".join(filter(None, [self.rules, action_line, self.show(observation, reset_info)]))

    def on_text(self, text: str) -> str:
        """A bare action name is as good as a call."""
        bare_text = re.sub(r"[^\w ]", "", text).strip().casefold()
        for action_name in self._names:
            if bare_text == action_name.casefold():
                return self.act(action_name)
        if self._names:
            raise ContentParseError(f"write one of {', '.join(self._names)}, or call act")
        raise StructuralParseError("no tool call found; call act")

    def act(self, action: Json) -> str:
        """Play one action and show the observation after it. Raises ToolError for one that is not possible now."""
        action_space: Any = self._gym.action_space
        if self._names:
            action_number = self._names.index(cast(str, action))
            if self._mask is not None and not self._mask[action_number]:
                legal_actions = [
                    action_name for action_name, is_allowed in zip(self._names, self._mask, strict=True) if is_allowed
                ]
                raise ToolError(f"{action} is not possible now; possible: {', '.join(legal_actions) or 'nothing'}")
            played_action: Any = action_number + int(action_space.start)
        else:
            try:
                with np.errstate(over="ignore"):
                    played_action = np.array(action, dtype=action_space.dtype)
            except (OverflowError, TypeError, ValueError) as cast_error:
                raise ToolError(f"no number of {action_space}: {cast_error}") from cast_error
            if not action_space.contains(played_action):
                raise ToolError(f"{action} is outside of {action_space}")
        observation, reward, terminated, truncated, step_info = self._gym.step(played_action)
        self.reward(float(reward))
        self._return += float(reward)
        self._mask = step_info.get("action_mask")
        if terminated or truncated:
            self.finish(truncated=not terminated)
        return self.show(observation, step_info)

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
        random_map = generate_random_map(self._size, p=self._frozen, seed=seed)
        return _made("FrozenLake-v1", {"desc": random_map, "is_slippery": self._slippery})

    def prompt(self, task: Mapping[str, Any]) -> str:
        self._gym.close()
        self._gym = self._map(task["seed"])
        return super().prompt(task)

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:
        shown_rows = [[map_cell.decode() for map_cell in map_row] for map_row in cast(Any, self._gym.unwrapped).desc]
        shown_rows[int(observation) // self._size][int(observation) % self._size] = "@"
        return "\n".join(" ".join(map_row) for map_row in shown_rows)


class Blackjack(TextGym):
    """`agentrl/Blackjack-v0`: hit or stick. Process reward: 1 for a win, -1 for a loss."""

    rules = (
        "Play one hand of blackjack: come closer to 21 than the dealer without going over. An ace counts 11 if usable."
    )

    def __init__(self, **settings: Any) -> None:
        super().__init__("Blackjack-v1", actions=("stick", "hit"), success_return=1.0, **settings)

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:
        own_total, dealer_card, has_usable_ace = (int(observed_number) for observed_number in observation)
        own_hand = f"{own_total} with a usable ace" if has_usable_ace else str(own_total)
        return f"You have {own_hand}. The dealer shows {'an ace' if dealer_card == 1 else dealer_card}."


class Taxi(TextGym):
    """`agentrl/Taxi-v0`: fetch a passenger and bring them to their destination. Actions that do nothing are masked.
    Process reward: -1 a move, 20 for the delivery, -10 for a wrong pickup or dropoff."""

    rules = "Drive the taxi to the passenger, pick them up, drive to the destination and drop them off. | is a wall."
    _stops = ("R", "G", "Y", "B")

    def __init__(self, **settings: Any) -> None:
        action_names = ("south", "north", "east", "west", "pickup", "dropoff")
        super().__init__("Taxi-v4", actions=action_names, success_return=0.0, **settings)

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:
        taxi_env = cast(Any, self._gym.unwrapped)
        taxi_row, taxi_column, passenger, destination = taxi_env.decode(int(observation))
        drawn_map = [[map_cell.decode() for map_cell in map_line] for map_line in taxi_env.desc]
        drawn_map[taxi_row + 1][2 * taxi_column + 1] = "@"
        passenger_state = "is in the taxi" if passenger == len(self._stops) else f"waits at {self._stops[passenger]}"
        situation = f"The taxi is @. The passenger {passenger_state}. The destination is {self._stops[destination]}."
        return "\n".join(["".join(map_line) for map_line in drawn_map] + [situation])


def _made(id: str, kwargs: Mapping[str, Any]) -> AnyEnv:
    """The environment, with its text rendering where it has one."""
    gym_env = gymnasium.make(id, disable_env_checker=True, **kwargs)
    # Made twice: which modes an environment has stands on the environment, and the mode can be given only when it is
    # made.
    if gym_env.render_mode is None and "ansi" in gym_env.metadata.get("render_modes", ()):
        gym_env.close()
        gym_env = gymnasium.make(id, disable_env_checker=True, render_mode="ansi", **kwargs)
    return gym_env


def names_of(space: Any, actions: Sequence[str] | None) -> tuple[str, ...]:
    """The names of a Discrete space's values, by default their numbers; nothing for other spaces."""
    if not isinstance(space, spaces.Discrete):
        if actions is not None:
            raise UsageError(f"actions name the values of a Discrete space, not of {space}")
        return ()
    action_count, first_number = _size_of(space)
    action_names = (
        tuple(actions)
        if actions is not None
        else tuple(str(first_number + action_index) for action_index in range(action_count))
    )
    if len(action_names) != action_count or len(set(action_names)) < action_count:
        raise UsageError(f"{len(action_names)} action names for {action_count} actions: give each its own")
    return action_names


def _size_of_value(value: Any) -> int:
    """How many values stand in a plain observation."""
    if isinstance(value, dict | list):
        inner_values = cast("dict[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
        return sum(map(_size_of_value, inner_values))
    return 1


def _size_of(space: Any) -> tuple[int, int]:
    return int(space.n), int(space.start)


def _schema_of(space: Any, names: Sequence[str]) -> Mapping[str, Json]:
    """The JSON schema of an action. Raises UsageError for spaces that have no small one."""
    if names:
        return {"type": "string", "enum": list(names)}
    action_shape: tuple[int, ...] = space.shape or ()
    array_schema: dict[str, Json] = (
        {"type": "array", "minItems": action_shape[0], "maxItems": action_shape[0]} if len(action_shape) == 1 else {}
    )
    if array_schema and isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        return {**array_schema, "items": {"type": "integer"}}
    if array_schema and isinstance(space, spaces.Box):
        return {**array_schema, "items": {"type": "number", **_bounds_of(space)}}
    raise UsageError(f"actions from {space} have no small JSON form: wrap the environment so that they are Discrete")


def _bounds_of(space: Any) -> dict[str, Json]:
    # JSON has no infinity, so an unbounded side cannot stand in the schema. `contains` checks each number all the same.
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        return {}
    return {"minimum": float(space.low.min()), "maximum": float(space.high.max())}


def plain(value: Any) -> Any:
    """An observation as JSON has it: arrays, sets and numbers of numpy as plain values, keys as texts."""
    return plain_json(value, "show")
