"""Callbacks of a run, and the events that they receive: plain data, which needs nothing of the run to be read.

    class Best(agentrl.Callback):
        def on_eval(self, evaluation: agentrl.EvalEnded) -> None:
            print(evaluation.step, evaluation.success)

    agentrl.Trainer(…, callbacks=[Best(), agentrl.Callback(on_step=lambda step: print(step.values["loss"]))])

Never knows who calls them, see `agentrl.run.callbacks.delivery`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import UsageError
from agentrl.records import Json, StopReason

HOOKS = ("on_start", "on_episode", "on_step", "on_weights", "on_eval", "on_end")


class StopTraining(Exception):
    """Raise it in a callback to end training in order: the learner saves its step, the held-out sets are measured, and
    `Trainer.train` returns. Its text is the reason, which `summary.json` keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """A run begins, or goes on, at optimizer step `step`. `attempt` is 1 at first, and grows whenever the run goes back
    to a checkpoint. `config` is its whole run file, defaults included."""

    path: Path
    config: Mapping[str, Any]
    step: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """An optimizer step is done, and engines serve its weights. `values` are its metrics, see
    `docs/reference/metrics.md`. A step that a restart undid is trained again, and is another event with a higher
    `attempt`."""

    id: str
    step: int
    attempt: int
    time_s: float
    values: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnded:
    """An episode is over and scored. `purpose` is `train`, or the name of an evaluation. `detail` is the cause if it
    failed through no doing of the policy, which `stop_reason.by_policy` says. `turns` and `tokens` are counts."""

    id: str
    episode: int
    group: int
    purpose: str
    env: str
    seed: int
    stop_reason: StopReason
    outcome: float | None
    success: bool | None
    detail: str
    turns: int
    tokens: int
    started_s: float | None
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalEnded:
    """All episodes of the held-out set `name` are played. `when` is `before`, `during` or `after`, `step` the optimizer
    step that is measured. Means are over the `n` episodes that the policy itself ended, None if there is none;
    `failed` counts the others. `pass_at` has pass@k by k: `value`, and the ends of its interval, `low` and `high`.
    `pass_all` has pass^k in the same form."""

    id: str
    name: str
    when: str
    step: int
    success: float | None
    outcome: float | None
    turns: float | None
    tokens: float | None
    n: int
    failed: int
    time_s: float
    pass_at: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    pass_all: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsServed:
    """Engines sample from weight version `version`, which optimizer step `step` made (0: what the run began with)."""

    id: str
    version: int
    step: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run is over, at optimizer step `step`. `finished`: `Trainer.train` returns its summary; else it raises, and
    the run may be resumed."""

    path: Path
    step: int
    finished: bool


Event = EpisodeEnded | StepEnded | WeightsServed | EvalEnded


class Callback:
    """Override the hooks you need, or give functions for them. Hooks are called in a thread of their own, one at a
    time: training never waits for them.

    Each callback receives each event once, also when the run is stopped or killed and resumed: the run's store keeps
    its place under its `name` (by default that of its class), and a resumed run goes on from there. Only a kill between
    the end of a hook and the write of that place delivers an event again, with the same `id`. With `from_start` every
    start delivers all events of the run from its first step on: for what is counted in memory.

    If a hook raises, its traceback is printed, and its event counts as delivered. With `errors = "stop"` the learner
    saves its step, and `Trainer.train` raises CallbackError; with "warn" the run goes on, and so does the callback. A
    hook that takes longer than `deadline_s` is named on stderr with the line it stands at, and the run goes on."""

    name: str = ""
    from_start: bool = False
    errors: Literal["stop", "warn"] = "stop"
    deadline_s: float = 60.0

    def __init__(
        self,
        *,
        name: str | None = None,
        on_start: Callable[[RunStarted], object] | None = None,
        on_episode: Callable[[EpisodeEnded], object] | None = None,
        on_step: Callable[[StepEnded], object] | None = None,
        on_weights: Callable[[WeightsServed], object] | None = None,
        on_eval: Callable[[EvalEnded], object] | None = None,
        on_end: Callable[[RunEnded], object] | None = None,
        errors: Literal["stop", "warn"] | None = None,
        deadline_s: float | None = None,
    ) -> None:
        arguments = {
            "name": name,
            "errors": errors,
            "deadline_s": deadline_s,
            "on_start": on_start,
            "on_episode": on_episode,
            "on_step": on_step,
            "on_weights": on_weights,
            "on_eval": on_eval,
            "on_end": on_end,
        }
        # Into the instance and not by assignment to the class: a function given for a hook hides the method of this one
        # object, and `overridden` finds both forms in one way.
        vars(self).update(
            {argument_name: argument for argument_name, argument in arguments.items() if argument is not None}
        )

    def on_start(self, run: RunStarted, /) -> None:
        """The run begins or goes on. Called at every start."""

    def on_episode(self, episode: EpisodeEnded, /) -> None:
        """An episode is over."""

    def on_step(self, step: StepEnded, /) -> None:
        """An optimizer step is done."""

    def on_weights(self, weights: WeightsServed, /) -> None:
        """Engines serve new weights."""

    def on_eval(self, evaluation: EvalEnded, /) -> None:
        """A held-out set is measured."""

    def on_end(self, end: RunEnded, /) -> None:
        """The run is over, however it ended. Called at every end, but not if the process is killed."""


def overridden(callback: Callback) -> list[str]:
    """The hooks that a callback has something to do in."""
    return [
        hook_name
        for hook_name in HOOKS
        if hook_name in vars(callback) or getattr(type(callback), hook_name) != getattr(Callback, hook_name)
    ]


def name_of(callback: Callback) -> str:
    return callback.name or type(callback).__qualname__


def check_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks as a list. Raises UsageError for one that would never be called, or that has the name of
    another."""
    callback_names: set[str] = set()
    for callback in callbacks:
        if not isinstance(callback, Callback):  # pyright: ignore[reportUnnecessaryIsInstance]
            correction = "derive its class from agentrl.Callback, or give agentrl.Callback(on_step=…)"
            raise UsageError(f"{callback!r} is no callback: {correction}")
        callback_name = name_of(callback)
        if callback_name in callback_names:
            raise UsageError(f"two callbacks have the name {callback_name!r}: give one of them another, name=…")
        callback_names.add(callback_name)
        if callback.errors not in ("stop", "warn"):
            raise UsageError(f"callback {callback_name}: errors = {callback.errors!r}: give 'stop' or 'warn'")
        hook_names = overridden(callback)
        # A misspelt `on_steps` is no error in Python: the method exists and nobody calls it. A run of two days without
        # its callback is found out too late (law 8).
        for unknown_hook in [
            attribute for attribute in dir(callback) if attribute.startswith("on_") and attribute not in HOOKS
        ]:
            raise UsageError(
                f"callback {callback_name}: {unknown_hook} is never called; the hooks are {', '.join(HOOKS)}"
            )
        if not hook_names:
            raise UsageError(f"callback {callback_name} has no hook: give it one of {', '.join(HOOKS)}")
        for hook_name in hook_names:
            # Called from a thread, it would return a coroutine that nobody awaits, and Python's warning comes at the
            # end of the run.
            if inspect.iscoroutinefunction(getattr(callback, hook_name)):
                correction = "hooks run in a thread, so give a function; it may call asyncio.run_coroutine_threadsafe"
                raise UsageError(f"callback {callback_name}: {hook_name} is a coroutine function: {correction}")
    return list(callbacks)
