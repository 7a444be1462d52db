"""Settings of a run file that another one takes back: they would have no effect, or end what they allow.

None of them is refused, as a run may go on without. Knows settings alone, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from pydantic import BaseModel

from agentrl.algos.clipped_loss import Clipped
from agentrl.config.league import LeagueSettings
from agentrl.config.run_config import RunConfig
from agentrl.config.sections import RewardSource

_SERVED = ("prm", "judge", "teacher")
_OF_KINDS = {  # settings of a reward source, and what has a use for them
    "call": ("callable", "tests"),
    **dict.fromkeys(("command", "files", "score", "sandbox", "image"), ("tests",)),
    "gamma": ("shaping",),
    "margin_tokens": ("overlong",),
    **dict.fromkeys(("url", "model", "api_key_env"), _SERVED),
    **dict.fromkeys(("prompt", "envs"), ("teacher",)),
    "rubric": ("judge",),
    **dict.fromkeys(("label", "activation"), ("prm",)),
}

_OF_OWN_ENGINES = {"replicas", "threads"}
"""Settings of engines that the run starts."""


_OF_ALGORITHMS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("kl_form",), lambda algo: not algo.kl_weight, "without {}.kl_weight"),
    (("reject_bounds",), lambda algo: algo.reject == "none", "without {}.reject"),
    (("importance_bounds",), lambda algo: algo.importance == "none", "with {}.importance = 'none'"),
    (("distil_level",), lambda algo: not algo.distil_weight, "without {}.distil_weight"),
)
"""Settings of algorithms, when they have no effect on one that has them, and what takes it."""


def contradictions(config: RunConfig) -> Iterator[str]:
    """One line for each, with what to change."""
    yield from _of_deadlines(config)
    yield from _of_groups(config)
    first = next(iter(config.algorithms))
    off = all(algo.process_weight == 0 for algo in config.algorithms.values())
    for source in config.rewards:
        yield from _of_source(source)
        if off and source.kind != "teacher":
            problem = f"leaves reward source {source.source!r} without effect"
            yield f"{first}.process_weight = 0 {problem}: {_typed(first, 'process_weight', 1)}"
    yield from _of_engines(config)
    yield from _of_training(config)
    for field, algo in config.algorithms.items():
        if isinstance(algo, Clipped):
            yield from _of_algorithm(field, algo)
    yield from _of_alarms(config)
    if config.league != LeagueSettings() and not config.league_roles:
        for name in sorted(_changed(config.league)):
            how = 'no [[roles]] table has plays = "league" or "either"'
            yield f"league.{name} has no effect, as {how}: --set league.{name}={_default(config.league, name)}"
    if config.eval.every and not config.eval.sets:
        yield "eval.every has no effect without held-out sets: give an [[eval.sets]] table with a name"


def _of_engines(config: RunConfig) -> Iterator[str]:
    engine, set_keys = config.engine, config.engine.model_fields_set
    if engine.hedge_after is not None and len(engine.urls or engine.places) == 1:
        more = "give engine.replicas the GPUs of another" if engine.gpus else "--set engine.replicas=2"
        yield f"engine.hedge_after has no effect while there is one engine: {more}"
    if engine.weights_url is not None and config.sends_adapters:
        yield "engine.weights_url has no effect, as only adapters travel: --set engine.weights_url=false"
    if engine.kind == "sglang" and "kv_cache_mb" in set_keys and not engine.urls:
        yield "engine.kv_cache_mb has no effect on SGLang: --set engine.sglang.mem-fraction-static=0.8 bounds it"
    if engine.urls and (useless := sorted(set_keys & _OF_OWN_ENGINES)):
        yield f"[engine] {', '.join(useless)}: no effect on engines at engine.urls, which others start: leave it out"


def _of_algorithm(field: str, algo: Clipped) -> Iterator[str]:
    changed = _changed(algo)
    for names, useless, why in _OF_ALGORITHMS:
        for name in names:
            if name in changed and useless(algo):
                yield f"{field}.{name} has no effect {why.format(field)}: {_typed(field, name, _default(algo, name))}"


def _typed(field: str, name: str, value: object) -> str:
    """The fix for an algorithm's setting. The command line reaches no entry of a list: there the fix is to leave it
    out."""
    if isinstance(value, tuple):  # one word for a shell
        value = str(list(cast("tuple[Any, ...]", value))).replace(" ", "")
    return f"--set {field}.{name}={value}" if field == "algo" else "leave it out"


def _of_alarms(config: RunConfig) -> Iterator[str]:
    """An action whose alarm has no bound: an alarm without a bound never goes off."""
    alarms = config.alarms
    for name in alarms.actions:
        bounds = [bound for bound in type(alarms).model_fields if bound in (f"{name}_above", f"{name}_below")]
        if bounds and getattr(alarms, bounds[0]) is None:
            limit = _default(alarms, bounds[0]) or 0.1
            yield f"alarms.actions.{name} has no effect without alarms.{bounds[0]}: --set alarms.{bounds[0]}={limit}"


def _changed(section: BaseModel) -> set[str]:
    return {name for name in type(section).model_fields if getattr(section, name) != _default(section, name)}


def _default(section: BaseModel, name: str) -> Any:
    return type(section).model_fields[name].get_default(call_default_factory=True)


def _of_training(config: RunConfig) -> Iterator[str]:
    train, set_keys = config.train, config.train.model_fields_set
    if train.optimizer == "sgd" and "betas" in set_keys:
        yield "train.betas has no effect with train.optimizer = 'sgd': --set train.optimizer=adamw"
    if train.warmup_steps >= train.steps and "warmup_steps" in set_keys:
        how = f"the rate never reaches train.lr within train.steps = {train.steps}"
        yield f"train.warmup_steps = {train.warmup_steps}: {how}: --set train.warmup_steps={train.steps // 10}"


def _of_deadlines(config: RunConfig) -> Iterator[str]:
    rollout, stall_s = config.rollout, config.train.stall_deadline_s
    for name in ("turn_deadline_s", "step_deadline_s"):
        if (value := getattr(rollout, name)) >= stall_s:
            how = f"while every episode is in one, the run ends after train.stall_deadline_s = {stall_s:g}"
            yield f"rollout.{name} = {value:g}: {how}: --set train.stall_deadline_s={2 * value:g}"
    for name in ("turn_deadline_s", "episode_deadline_s"):
        if (value := getattr(rollout, name)) > rollout.group_deadline_s:
            how = f"longer episodes are lost to rollout.group_deadline_s = {rollout.group_deadline_s:g}"
            yield f"rollout.{name} = {value:g}: {how}: --set rollout.group_deadline_s={2 * value:g}"


def _of_groups(config: RunConfig) -> Iterator[str]:
    buffer = config.buffer
    if buffer.synchronous and config.quorum is not None:
        yield "buffer.max_lag = 0 leaves the late members of a quorum untrained: --set buffer.max_lag=1"


def _of_source(source: RewardSource) -> Iterator[str]:
    changed = _changed(source)
    useless = [
        name for name, kinds in _OF_KINDS.items() if not {source.kind, source.measure} & {*kinds} and name in changed
    ]
    if source.kind == "teacher" and source.weight != 1.0:
        useless.append("weight")
    if useless:
        subject = f"reward source {source.source!r} of kind {source.kind!r}"
        yield f"{subject} has no use for {', '.join(useless)}: leave it out"
