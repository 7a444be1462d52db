"""Two wrappers that gymnasium's users expect: a transcript to look at, and an outcome at any end.

`Rendered` is put there by a `render_mode`, `Judged` by `gymnasium.make`, outermost. They hold the messages of one
episode at most, and know neither model nor tokens.
"""

from __future__ import annotations

from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import RecordConstructorArgs

from agentrl.env.core import Env, ResetResult, StepResult, as_messages
from agentrl.env.image_parts import with_images
from agentrl.host.terminal_text import printable
from agentrl.records import Message, StopReason
from agentrl.tokens import images

Wrapper = gymnasium.Wrapper[Any, str, Any, str]


class Judged(Wrapper, RecordConstructorArgs):
    """Has the environment judge what there is where a wrapper within truncates: `Judged(TimeLimit(env, 20))`."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        RecordConstructorArgs.__init__(self)
        super().__init__(env)

    def step(self, action: str) -> StepResult:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if truncated and isinstance(self.unwrapped, Env):  # one that ended by itself has nothing to add
            info = {**self.unwrapped.end_now(StopReason.TRUNCATED), **info}
        return observation, float(reward), terminated, truncated, info


class Rendered(Wrapper):
    """Shows the conversation in the environment's `render_mode`: "ansi" keeps it for `render`, "human" prints it."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._shown: list[str] = []

    @property
    def spec(self) -> EnvSpec | None:
        """Spec of the environment: its `render_mode` brings this wrapper with it."""
        return self.env.spec

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        observation, info = self.env.reset(seed=seed, options=options)
        self._shown.clear()
        self._show(observation)
        return observation, info

    def step(self, action: str) -> StepResult:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._show([Message(role="assistant", content=action)])
        self._show(observation)
        return observation, float(reward), terminated, truncated, info

    def render(self) -> Any:
        """The transcript so far, if the mode is "ansi"; what "human" shows was printed as it happened."""
        return "".join(self._shown) if self.render_mode == "ansi" else None

    def _show(self, observation: Any) -> None:
        for message in as_messages(observation):
            if self.render_mode == "human":
                print(shown(message), flush=True)
            else:
                self._shown.append(shown(message) + "\n")


def shown(message: Message) -> str:
    """The speaker, and the text below, as a terminal may show them; of images, their sizes."""
    plain_message = cast("Message", with_images(message))
    image_sizes = [f"[image of {image.width} x {image.height} pixels]" for image in images.of_messages([plain_message])]
    return "\n".join(
        [f"[{plain_message['role']}]", *map(printable, plain_message["content"].splitlines()), *image_sizes]
    )
