"""Settings of a run file that another one takes back: they would have no effect, or end what they allow.

None of them is refused, as a run may go on without. Knows settings alone, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config import RunConfig
from agentrl.settings import RewardSource

_SERVED = ("prm", "judge", "teacher")
_OF_KINDS = {  # settings of a reward source, and what has a use for them
    "call": ("callable", "tests"),
    **dict.fromkeys(("command", "files", "score", "sandbox", "image", "box_s"), ("tests",)),
    **dict.fromkeys(("potential", "gamma"), ("shaping",)),
    **dict.fromkeys(("most_tokens", "margin_tokens"), ("overlong",)),
    **dict.fromkeys(("url", "model", "api_key_env"), _SERVED),
    **dict.fromkeys(("prompt", "envs"), ("teacher",)),
    "rubric": ("judge",),
    **dict.fromkeys(("label", "activation"), ("prm",)),
}

_OF_OWN_ENGINES = {"replicas", "threads"}
"""Settings of engines that the run starts."""


def contradictions(config: RunConfig) -> Iterator[str]:
    """One line for each, with what to change."""
    yield from _of_deadlines(config)
    yield from _of_groups(config)
    for source in config.rewards:
        yield from _of_source(source)
    yield from _of_engines(config)
    yield from _of_training(config)
    if config.eval.every and not config.eval.sets:
        yield "eval.every has no effect without held-out sets: give an [[eval.sets]] table with a name"


def _of_engines(config: RunConfig) -> Iterator[str]:
    engine, given = config.engine, config.engine.model_fields_set
    if engine.hedge_after is not None and len(engine.urls or engine.places) == 1:
        yield "engine.hedge_after has no effect while there is one engine: --set engine.replicas=2"
    if engine.weights_url is not None and config.sync == "adapter":
        yield "engine.weights_url has no effect, as only adapters travel: --set engine.weights_url=false"
    if engine.canary_tolerance is not None and not engine.canary:
        yield "engine.canary_tolerance has no effect without the canary: --set engine.canary=true"
    if engine.stage == "file" and (engine.kind == "embedded" or config.sync not in ("full", "delta")):
        yield "engine.stage has no effect: vLLM alone stages, and only what is a file: --set engine.stage=auto"
    if engine.kind == "embedded" and engine.dtype != "float32" and not engine.urls:
        yield f"engine.dtype = {engine.dtype!r}: the embedded engine computes in float32: --set engine.dtype=float32"
    if engine.urls and (useless := sorted(given & _OF_OWN_ENGINES)):
        yield f"[engine] {', '.join(useless)}: no effect on engines at engine.urls, which others start: leave it out"


def _of_training(config: RunConfig) -> Iterator[str]:
    train, given = config.train, config.train.model_fields_set
    if train.optimizer == "sgd" and "betas" in given:
        yield "train.betas has no effect with train.optimizer = 'sgd': --set train.optimizer=adamw"
    if train.warmup_steps >= train.steps and "warmup_steps" in given:
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
    buffer, pivot = config.buffer, config.rollout.pivot
    if buffer.quorum is not None and config.quorum is None:
        closes = "all members" if buffer.close == "full" else "all members at buffer.max_lag = 0"
        yield f"buffer.quorum has no effect, as groups wait for {closes}: --set buffer.quorum=false"
    if buffer.close == "quorum" and buffer.max_lag == 0:
        yield "buffer.max_lag = 0 leaves the late members of a quorum untrained: --set buffer.max_lag=1"
    if buffer.window != type(buffer).model_fields["window"].default and buffer.order != "windowed":
        yield f"buffer.window has no effect with buffer.order = {buffer.order!r}: --set buffer.order=windowed"
    if pivot is not None and pivot.below and pivot.rule != "low_reward":
        yield f"rollout.pivot.below has no effect with rule = {pivot.rule!r}: --set rollout.pivot.rule=low_reward"


def _of_source(source: RewardSource) -> Iterator[str]:
    useless = [
        name
        for name, kinds in _OF_KINDS.items()
        if not {source.kind, source.measure} & {*kinds}
        and getattr(source, name) != type(source).model_fields[name].get_default(call_default_factory=True)
    ]
    if source.kind == "teacher" and source.weight != 1.0:
        useless.append("weight")
    if useless:
        what = f"reward source {source.source!r} of kind {source.kind!r}"
        yield f"{what} has no use for {', '.join(useless)}: leave it out"
