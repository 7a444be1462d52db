"""PettingZoo's turn-by-turn (AEC) environments as an environment of roles."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl import registry
from agentrl.env.adapters.gym import names_of, plain
from agentrl.env.multi_agent import RolesEnv
from agentrl.errors import ContentParseError, ToolError, UsageError
from agentrl.records import Json

Show = Callable[[str, Any, Mapping[str, Any]], str]


class PettingZoo(RolesEnv):
    """`agentrl/PettingZoo-v0`. A turn-by-turn environment of PettingZoo. `env` is an AEC environment, a factory, or
    its reference (`"pettingzoo.classic.tictactoe_v3:env"`), made with `kwargs`. Roles are its agents; all need
    Discrete actions, which `actions` may name.

    A role writes the name of its action alone, or at the end as `action: NAME`. Where the environment gives an action
    mask, the legal actions are listed and others refused. `show(role, observation, info)` makes the text; the default
    is the observation as plain values. The outcome of a role is its return; who forfeits gets `forfeit_outcome`."""

    blocking = False
    replayable = True
    rules: str = ""

    def __init__(
        self,
        env: str | Any,
        *,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        show: Show | None = None,
        rules: str = "",
        forfeit_outcome: float = -1.0,
    ) -> None:
        make_env = registry.load_reference(env) if isinstance(env, str) else env
        self._env: Any = make_env(**dict(kwargs or {})) if callable(make_env) else make_env
        if not hasattr(self._env, "agent_selection") and not hasattr(self._env, "agent_iter"):
            raise UsageError(f"{self._env} is no AEC environment: convert parallel ones with parallel_to_aec")
        self._agents = {str(agent): agent for agent in self._env.possible_agents}
        self.roles = tuple(self._agents)
        self._names = {
            role_name: names_of(self._env.action_space(agent), actions) for role_name, agent in self._agents.items()
        }
        wordless = [role_name for role_name, action_names in self._names.items() if not action_names]
        if wordless:
            raise UsageError(f"{', '.join(wordless)} take no Discrete actions: only those have names to write")
        self._show, self.rules, self._forfeit_outcome = show, rules, forfeit_outcome

    def start(self, task: Mapping[str, Json]) -> str:
        self._env.reset(seed=int(self.np_random.integers(2**31)), options=dict(task) or None)
        self._returns = dict.fromkeys(self.roles, 0.0)
        self._briefed: set[str] = set()
        self.cut_off = False
        return str(self._env.agent_selection)

    def see(self, role: str) -> str:
        observation, _, _, _, info = self._env.last()
        opening = [] if role in self._briefed else [self.rules, f"You are {role}."]
        self._briefed.add(role)
        if self._show is not None:
            shown_text = self._show(role, observation, info)
        else:
            shown_text = json.dumps(plain(_without_mask(observation)), ensure_ascii=False)
        legal_names = self._legal(role, observation, info)
        return "\n".join(filter(None, [*opening, shown_text, f"Possible actions: {', '.join(legal_names)}."]))

    def play(self, role: str, text: str) -> str | None:
        observation, _, _, _, info = self._env.last()
        action_name, legal_names = self._named(role, text), self._legal(role, observation, info)
        if action_name not in legal_names:
            raise ToolError(f"{action_name} is not possible now; possible: {', '.join(legal_names)}")
        action_space = self._env.action_space(self._agents[role])
        try:
            self._env.step(self._names[role].index(action_name) + int(action_space.start))
        except Exception as game_error:  # a game without a mask refuses an illegal move itself
            raise ToolError(
                f"the game cannot take {action_name} now ({type(game_error).__name__}: {game_error})"
            ) from game_error
        for agent, amount in self._env.rewards.items():
            self._returns[str(agent)] += float(amount)
        self.cut_off = any(self._env.truncations.values()) and not any(self._env.terminations.values())
        # An agent that is out still gets its turn in PettingZoo, in which it must play None. No role is asked for that.
        while self._env.agents and self._gone(self._env.agent_selection):
            self._env.step(None)
        return str(self._env.agent_selection) if self._env.agents else None

    def outcomes(self, forfeited: str | None) -> Mapping[str, float]:
        return {
            role_name: self._forfeit_outcome if role_name == forfeited else total_return
            for role_name, total_return in self._returns.items()
        }

    async def aclose(self) -> None:
        await super().aclose()
        self._env.close()

    def _gone(self, agent: Any) -> bool:
        return bool(self._env.terminations[agent] or self._env.truncations[agent])

    def _named(self, role: str, text: str) -> str:
        matches = re.findall(r"(?:action|move)\s*[:=]\s*([^\n]+)", text, re.IGNORECASE)
        # The last one counts: a model that thinks aloud names several moves before it decides.
        last_word = re.sub(r"[^\w ]", "", matches[-1] if matches else text).strip().casefold()
        for action_name in self._names[role]:
            if last_word == re.sub(r"[^\w ]", "", action_name).casefold():
                return action_name
        raise ContentParseError("write the name of one possible action, for example: action: " + self._names[role][0])

    def _legal(self, role: str, observation: Any, info: Mapping[str, Any]) -> list[str]:
        action_names = self._names[role]
        action_mask = _mask_in(observation) or _mask_in(info)
        return (
            [action_name for action_name, is_allowed in zip(action_names, action_mask, strict=True) if is_allowed]
            if action_mask
            else list(action_names)
        )


def _mask_in(source: Any) -> list[int]:
    return [int(is_allowed) for is_allowed in source["action_mask"]] if _holds(source, "action_mask") else []


def _without_mask(observation: Any) -> Any:
    return observation["observation"] if _holds(observation, "observation") else observation


def _holds(source: Any, key: str) -> bool:
    return isinstance(source, Mapping) and key in source
