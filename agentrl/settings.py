"""What the sections of the run file are made of, and the section of reward sources. `agentrl.config` has the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.errors import ConfigError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A table of the run file: unknown keys are refused, and nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class RewardSource(Section):
    """Who says what single turns are worth, beside the environment. See `docs/rewards.md`."""

    source: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # its name, in tables and records; `env` is the environment's
    kind: Literal["callable", "shaping", "prm", "judge"]  # a function, changes of one, a reward model, a chat model
    call: str | None = None  # callable, shaping: module:name of (trajectory up to the turn) -> float
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0  # shaping: of its formula; returns are undiscounted, so take 1
    url: str | None = None  # prm, judge: the server; a /v1 at the end is taken off
    model: str | None = None  # by which the server knows the model; default: its only one
    api_key_env: str | None = None  # the environment variable with the key that the server asks for
    rubric: str | None = None  # judge: by which it scores the last action, from 0 to 1
    label: Annotated[int, Field(ge=0)] = 0  # prm: which output, of a model with several
    activation: bool = False  # prm: through a sigmoid or softmax first
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0  # its share in a turn's process reward
    version: Count = 1  # of what it says; scores of another version do not count
    concurrency: Count = 8  # calls at once
    call_deadline_s: Positive = 30.0  # of one call
    retries: Annotated[int, Field(ge=0)] = 2  # calls after one that failed
    deadline_s: Positive = 120.0  # after an episode's end: it is waited for no longer
    late: Literal["drop", "neutral", "partial"] = "drop"  # then: leave the episode out, count none, or what there is

    def api_key(self) -> str | None:
        """The key for `url`. Raises ConfigError if the variable that should hold it is not set."""
        if self.api_key_env is None:
            return None
        if not (key := os.environ.get(self.api_key_env)):
            raise ConfigError(
                "rewards.api_key_env", self.api_key_env, "this environment variable is not set: export it"
            )
        return key

    @model_validator(mode="after")
    def _possible(self) -> Self:
        needed = {"callable": ("call",), "shaping": ("call",), "prm": ("url",), "judge": ("url", "rubric")}[self.kind]
        for name in needed:
            if not getattr(self, name):
                raise ConfigError(f"rewards.{name}", getattr(self, name), f"a source of kind {self.kind!r} needs it")
        if self.kind == "shaping" and self.late == "partial":
            hint = "a part of the differences of a potential adds up to a reward: give 'drop' or 'neutral'"
            raise ConfigError("rewards.late", self.late, hint)
        if self.source == "env":
            raise ConfigError("rewards.source", "env", "this is the environment itself: choose another name")
        return self


def check_sources(sources: Sequence[RewardSource], *, stall_deadline_s: float) -> None:
    """Raises ConfigError for sources of one name, or one for which a run would wait until it ends as standing still."""
    names = [one.source for one in sources]
    if len(set(names)) != len(names):
        raise ConfigError("rewards.source", names, "each source has a name of its own")
    for one in sources:
        if one.deadline_s >= stall_deadline_s:
            hint = f"must be below train.stall_deadline_s = {stall_deadline_s:g}, or a silent source ends the run"
            raise ConfigError("rewards.deadline_s", one.deadline_s, hint)
