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

_SERVED = ("prm", "judge", "agent_judge", "teacher")
_OF_KINDS = {  # settings of a reward source, and what has a use for them
    "call": ("callable", "tests", "agent_judge"),
    **dict.fromkeys(("command", "files", "sandbox", "image"), ("tests", "agent_judge")),
    "score": ("tests",),
    "gamma": ("shaping",),
    "margin_tokens": ("overlong",),
    **dict.fromkeys(("url", "model", "api_key_env"), _SERVED),
    **dict.fromkeys(("prompt", "envs"), ("teacher",)),
    "rubric": ("judge", "agent_judge"),
    **dict.fromkeys(("label", "activation"), ("prm",)),
}

_LEAST_JUDGE_S = 60.0  # for some messages of a chat model and the commands between them

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
    first_field = next(iter(config.algorithms))
    is_process_off = all(algorithm.process_weight == 0 for algorithm in config.algorithms.values())
    for reward_source in config.rewards:
        yield from _of_source(reward_source)
        if is_process_off and reward_source.kind != "teacher":
            problem = f"leaves reward source {reward_source.source!r} without effect"
            yield f"{first_field}.process_weight = 0 {problem}: {_typed(first_field, 'process_weight', 1)}"
    yield from _of_engines(config)
    yield from _of_training(config)
    for field_name, algorithm in config.algorithms.items():
        if isinstance(algorithm, Clipped):
            yield from _of_algorithm(field_name, algorithm)
    yield from _of_alarms(config)
    if config.league != LeagueSettings() and not config.league_roles:
        for setting_name in sorted(_changed(config.league)):
            reason = 'no [[roles]] table has plays = "league" or "either"'
            hint = f"--set league.{setting_name}={_default(config.league, setting_name)}"
            yield f"league.{setting_name} has no effect, as {reason}: {hint}"
    if config.eval.every and not config.eval.sets:
        yield "eval.every has no effect without held-out sets: give an [[eval.sets]] table with a name"


def _of_engines(config: RunConfig) -> Iterator[str]:
    engine_settings, set_keys = config.engine, config.engine.model_fields_set
    if engine_settings.hedge_after is not None and len(engine_settings.urls or engine_settings.places) == 1:
        hint = "give engine.replicas the GPUs of another" if engine_settings.gpus else "--set engine.replicas=2"
        yield f"engine.hedge_after has no effect while there is one engine: {hint}"
    if engine_settings.weights_url is not None and config.sends_adapters:
        yield "engine.weights_url has no effect, as only adapters travel: --set engine.weights_url=false"
    if engine_settings.kind == "sglang" and "kv_cache_mb" in set_keys and not engine_settings.urls:
        yield "engine.kv_cache_mb has no effect on SGLang: --set engine.sglang.mem-fraction-static=0.8 bounds it"
    if engine_settings.urls and (useless_keys := sorted(set_keys & _OF_OWN_ENGINES)):
        problem = "no effect on engines at engine.urls, which others start"
        yield f"[engine] {', '.join(useless_keys)}: {problem}: leave it out"


def _of_algorithm(field: str, algo: Clipped) -> Iterator[str]:
    changed_names = _changed(algo)
    for setting_names, is_useless, reason in _OF_ALGORITHMS:
        for setting_name in setting_names:
            if setting_name in changed_names and is_useless(algo):
                hint = _typed(field, setting_name, _default(algo, setting_name))
                yield f"{field}.{setting_name} has no effect {reason.format(field)}: {hint}"


def _typed(field: str, name: str, value: object) -> str:
    """The fix for an algorithm's setting. The command line reaches no entry of a list: there the fix is to leave it
    out."""
    if isinstance(value, tuple):  # one word for a shell
        value = str(list(cast("tuple[Any, ...]", value))).replace(" ", "")
    return f"--set {field}.{name}={value}" if field == "algo" else "leave it out"


def _of_alarms(config: RunConfig) -> Iterator[str]:
    """An action whose alarm has no bound: an alarm without a bound never goes off."""
    alarms = config.alarms
    for alarm_name in alarms.actions:
        bound_names = [
            bound_name
            for bound_name in type(alarms).model_fields
            if bound_name in (f"{alarm_name}_above", f"{alarm_name}_below")
        ]
        if bound_names and getattr(alarms, bound_names[0]) is None:
            proposed_bound = _default(alarms, bound_names[0]) or 0.1
            problem = f"alarms.actions.{alarm_name} has no effect without alarms.{bound_names[0]}"
            yield f"{problem}: --set alarms.{bound_names[0]}={proposed_bound}"


def _changed(section: BaseModel) -> set[str]:
    return {
        setting_name
        for setting_name in type(section).model_fields
        if getattr(section, setting_name) != _default(section, setting_name)
    }


def _default(section: BaseModel, name: str) -> Any:
    return type(section).model_fields[name].get_default(call_default_factory=True)


def _of_training(config: RunConfig) -> Iterator[str]:
    train_settings, set_keys = config.train, config.train.model_fields_set
    if train_settings.optimizer == "sgd" and "betas" in set_keys:
        yield "train.betas has no effect with train.optimizer = 'sgd': --set train.optimizer=adamw"
    if train_settings.warmup_steps >= train_settings.steps and "warmup_steps" in set_keys:
        reason = f"the rate never reaches train.lr within train.steps = {train_settings.steps}"
        hint = f"--set train.warmup_steps={train_settings.steps // 10}"
        yield f"train.warmup_steps = {train_settings.warmup_steps}: {reason}: {hint}"


def _of_deadlines(config: RunConfig) -> Iterator[str]:
    rollout, stall_s = config.rollout, config.train.stall_deadline_s
    for deadline_name in ("turn_deadline_s", "step_deadline_s"):
        if (deadline_s := getattr(rollout, deadline_name)) >= stall_s:
            reason = f"while every episode is in one, the run ends after train.stall_deadline_s = {stall_s:g}"
            yield f"rollout.{deadline_name} = {deadline_s:g}: {reason}: --set train.stall_deadline_s={2 * deadline_s:g}"
    for deadline_name in ("turn_deadline_s", "episode_deadline_s"):
        if (deadline_s := getattr(rollout, deadline_name)) > rollout.group_deadline_s:
            reason = f"longer episodes are lost to rollout.group_deadline_s = {rollout.group_deadline_s:g}"
            hint = f"--set rollout.group_deadline_s={2 * deadline_s:g}"
            yield f"rollout.{deadline_name} = {deadline_s:g}: {reason}: {hint}"


def _of_groups(config: RunConfig) -> Iterator[str]:
    buffer_settings = config.buffer
    if buffer_settings.synchronous and config.quorum is not None:
        yield "buffer.max_lag = 0 leaves the late members of a quorum untrained: --set buffer.max_lag=1"


def _of_source(source: RewardSource) -> Iterator[str]:
    changed_names = _changed(source)
    useless_names = [
        setting_name
        for setting_name, useful_kinds in _OF_KINDS.items()
        if not {source.kind, source.measure} & {*useful_kinds} and setting_name in changed_names
    ]
    if source.kind == "teacher" and source.weight != 1.0:
        useless_names.append("weight")
    source_description = f"reward source {source.source!r} of kind {source.kind!r}"
    if useless_names:
        yield f"{source_description} has no use for {', '.join(useless_names)}: leave it out"
    # A judge whose first messages take half of the model's time has to give its verdict on what the policy says of its
    # work, without a look at the work. That is no failure that a run would show.
    if source.measure == "agent_judge" and source.call_deadline_s < _LEAST_JUDGE_S:
        problem = f"rewards.call_deadline_s = {source.call_deadline_s:g} leaves {source_description} no time to look"
        yield f"{problem} at the work: give {_LEAST_JUDGE_S:g} or more, and rewards.deadline_s above it"
