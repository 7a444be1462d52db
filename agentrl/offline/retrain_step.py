"""One step of a run trained again, from its store and its newest checkpoint before: what people debug with.

Owns the choice of where to begin, the replay, and the comparison with what the run recorded. It only looks at the run,
which may go on meanwhile. In float32 on one kind of CPU, with the threads of then, the weights are equal bit by bit.

`TokenDump` writes what a step does to each of its tokens, one line of JSON for each turn of each pass. It looks at
passes (`RankWorker.on_pass`) and changes nothing: the loss is computed again, on copies of the models' outputs.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from agentrl import config as configuration
from agentrl.algos.algorithm import Algorithm, Outputs
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, RunFailed, StoreError, UsageError
from agentrl.learner.build_learner import build_learner
from agentrl.learner.checkpoints.folders import complete, step_of
from agentrl.learner.data.prefix_trees import Pack
from agentrl.learner.learner import Learner
from agentrl.learner.optimizers import master_weights
from agentrl.learner.weight_export import circumstances
from agentrl.models.resolve import model_dir, slot_dir
from agentrl.records import Group
from agentrl.run import live_settings
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.metrics import finite

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)


class TokenDump:
    """Writes the passes of a step. A line has `pass`, `episode` and `turn`, the turn's scored `token_ids`, and lists of
    one value for each of these:

    logprob     in nats under the weights of this pass
    ratio       of these to the policy at the start of the step
    loss        the token's part of the policy's loss: its share times what its share is multiplied by
    gradient    derivative of the loss by the token's log-prob: below 0 it is made likelier
    entropy     in nats, of the distribution under the weights of this pass
    and all columns of the algorithm, such as advantage, behaviour, proximal, weight, lag"""

    def __init__(self, file: IO[str], step: int) -> None:
        self._file, self._step = file, step
        self._passes = 0

    def __call__(self, pack: Pack, tokens: Mapping[str, Tensor], outputs: Outputs) -> None:
        loss_K, gradient_K = self._parts(pack.algo, tokens, outputs)
        logprob_K = outputs.logprobs_K.detach()
        token_columns: dict[str, list[Any]] = {
            "token_ids": pack.target_K.tolist(),
            "logprob": logprob_K.tolist(),
            "ratio": (logprob_K - tokens["proximal"]).exp().tolist(),
            "loss": loss_K.tolist(),
            "gradient": gradient_K.tolist(),
            "entropy": outputs.entropy_K.detach().tolist(),
            **{
                column_name: tokens[column_name].tolist()
                for column_name in tokens
                if column_name not in ("episode", "turn")
            },
        }
        token_turns = list(zip(tokens["episode"].tolist(), tokens["turn"].tolist(), strict=True))
        first_position = 0
        for (episode_id, turn_number), token_run in groupby(token_turns):
            end_position = first_position + len(list(token_run))
            turn_line = {
                column_name: _finite(column_values[first_position:end_position])
                for column_name, column_values in token_columns.items()
            }
            self._file.write(
                json.dumps({"pass": self._passes, "episode": episode_id, "turn": turn_number, **turn_line}) + "\n"
            )
            first_position = end_position
        self._passes += 1

    def _parts(self, algo: Algorithm, tokens: Mapping[str, Tensor], outputs: Outputs) -> tuple[Tensor, Tensor]:
        """Return each token's [K] part of the loss, and the derivative of the loss by its log-prob."""
        # A loss is a sum over tokens, each times its weight, so a token's part is its weight times the derivative by
        # it. That holds for every loss that is linear in the weights, without knowing its formula;
        # `tests/run/test_retrain.py::test_what_happens_to_each_token_is_written` checks the sum. Copies, because the
        # derivatives must not reach the tensors of the step that is being looked at.
        weight_K = tokens["weight"].detach().clone().requires_grad_()
        logprobs_K = outputs.logprobs_K.detach().clone().requires_grad_()
        values_K = None if outputs.values_K is None else outputs.values_K.detach()
        weighted_outputs = Outputs(logprobs_K=logprobs_K, entropy_K=outputs.entropy_K.detach(), values_K=values_K)
        with torch.enable_grad():
            loss_total = algo.loss({**tokens, "weight": weight_K}, weighted_outputs, self._step).total
        if not loss_total.requires_grad:  # a step that trains no policy
            return torch.zeros_like(weight_K), torch.zeros_like(weight_K)
        by_weight, by_logprob = torch.autograd.grad(
            loss_total, (weight_K, logprobs_K), allow_unused=True, materialize_grads=True
        )
        return weight_K.detach() * by_weight, by_logprob


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(inner_value) for inner_value in cast("list[Any]", value)]
    # `NaN` and `Infinity` are not JSON; a dump is read with tools that refuse them, and what is not finite is just
    # what one looks for.
    return None if isinstance(value, float) and not math.isfinite(value) else value


_OTHERWISE = (
    *(
        "lr",
        "lr_min",
        "lr_schedule",
        "warmup_steps",
        "weight_decay",
        "grad_clip",
        "tokens_per_batch",
        "minibatches",
        "epochs",
        "dtype",
    ),
    *("device", "threads", "compile", "gradient_checkpointing", "logits_mb"),
)
"""The settings of `[train]` with which a step may be trained otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first step after which weights were not the recorded ones, and the names of those tensors, of `of` in all."""

    step: int
    tensors: tuple[str, ...]
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrained:
    """`metrics` are those of now, `recorded` those of the run (None: there are none), by name. `compared` steps had a
    recorded hash; `settings` are those with which the last step was trained on purpose otherwise. `notes` name what
    else is not as it was: any of it may change bits."""

    step: int
    begun: Path | None
    groups: int
    episodes: int
    metrics: Mapping[str, Any]
    recorded: Mapping[str, Any] | None
    tensors: int
    compared: tuple[int, ...]
    difference: Difference | None
    settings: tuple[str, ...]
    notes: tuple[str, ...]
    out: Path | None

    @property
    def equal(self) -> bool:
        """Whether the weights of this very step were compared, and are the recorded ones."""
        return self.difference is None and self.step in self.compared


def retrain(
    run: RunDir,
    step: int,
    *,
    settings: Sequence[str] = (),
    out: Path | None = None,
    dump: Path | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> Retrained:
    """Train optimizer step `step` of a run again. With `settings` (`algo.clip_low=0.1`), that step alone is trained
    otherwise. `out`: a new folder for the weights, as a checkpoint; `dump`: a file for what happens to each token.

    Raises UsageError if the step cannot be trained again, or a folder or file cannot be written; ConfigError for a
    setting."""
    run_config = run.config()
    _otherwise(run_config, settings)  # a bad setting fails at once
    # A checkpoint written into the run's own folder would be its newest, and the run would go on from it.
    if out is not None and out.resolve().is_relative_to(run.path.resolve()):
        raise UsageError(f"--out {str(out)!r} is inside the run, which must not change: give another folder")
    if out is not None and out.exists():
        raise UsageError(f"--out {str(out)!r} is there already: give a new folder")
    with RunStore.read(run.store_path) as run_store, ExitStack() as exit_stack:
        start_checkpoint = _begin(run, run_config, run_store, step)
        first_step = 0 if start_checkpoint is None else step_of(start_checkpoint)
        dump_file = None if dump is None else exit_stack.enter_context(_opened(dump))
        step_replay = _Replay(run_config, run_store, start_checkpoint)
        for earlier_step in range(first_step + 1, step):
            notify(f"step {earlier_step}, on the way to {step}")
            # From the checkpoint on, every step is needed: the moments of the optimizers are the sum of them all. The
            # settings of now hold for the last step alone, or their effect would not be that of one step
            # (`test_a_step_is_trained_otherwise_and_the_steps_before_it_are_not`).
            step_replay.train(earlier_step)
        if (other_config := _otherwise(step_replay.config_of(step), settings)) is not None:
            # A new learner instead of `retune`: other settings may need models (a critic, a moving average) that the
            # run does not have, and a learner makes its models when it is built.
            step_replay.go_on_with(other_config)
        if dump_file is not None:
            # Only for the step in question: earlier steps have thousands of tokens that nobody asked about.
            step_replay.learner.worker.on_pass = TokenDump(dump_file, step - 1)
        step_groups, new_metrics, recorded_metrics = step_replay.train(step)
        saved_folder = None
        if out is not None:
            saved_folder = _saved(step_replay.learner, out)
    return Retrained(
        step=step,
        begun=start_checkpoint,
        groups=len([step_group for step_group in step_groups if not step_group.skipped]),
        episodes=sum(len(step_group.trajectories) for step_group in step_groups),
        metrics=new_metrics,
        recorded=recorded_metrics,
        tensors=len(step_replay.learner.models.tensors()),
        compared=tuple(step_replay.compared),
        difference=step_replay.difference,
        settings=tuple(settings),
        notes=tuple(dict.fromkeys(step_replay.notes)),
        out=saved_folder,
    )


class _Replay:
    """A learner that goes over the steps of a run once more."""

    def __init__(self, config: RunConfig, store: RunStore, begun: Path | None) -> None:
        self._run_config = self._config = config
        self._store, self._as_it_was = store, True
        self.learner = build_learner(config.learner, model_dir(config.model), folder_of=partial(slot_dir, config))
        if begun is not None:
            try:
                self.learner.load(begun)
            except OSError as error:
                # Nothing locks the run: it must not notice that somebody looks
                # (`tests/run/test_retrain.py::test_nothing_of_the_run_is_written`). A checkpoint that disappears
                # between the choice and the reading is therefore an ordinary outcome.
                correction = "the run goes on and removed it: give the command again"
                raise UsageError(
                    f"checkpoint {str(begun)!r} cannot be read ({error.strerror}): {correction}"
                ) from error
        self._recorded = {
            metric_row.step: metric_row.values
            for metric_row in store.metrics.values("weights", after=self.learner.step_index)
        }
        self._metrics = {
            metric_row.step: metric_row.values
            for metric_row in store.metrics.values("step", after=self.learner.step_index)
        }
        self.compared: list[int] = []
        self.difference: Difference | None = None
        self.notes: list[str] = []

    def config_of(self, step: int) -> RunConfig:
        """The configuration with which the run trained a step."""
        return live_settings.held_at(self._store, self._run_config, self._metrics.get(step), step)

    def go_on_with(self, config: RunConfig) -> None:
        """Have the next step trained with other settings, from the same weights and optimizers. A model that the run
        did not have and these settings need, such as a critic, starts fresh, with a note."""
        old_learner = self.learner
        new_learner = build_learner(config.learner, model_dir(config.model), folder_of=partial(slot_dir, config))
        # The masters, not the weights in the dtype of computing: a step smaller than half a unit of bfloat16 is in
        # the masters only, and without it the step would begin from other weights than the run had.
        for new_side, old_side in zip(new_learner.models.policies(), old_learner.models.policies(), strict=True):
            master_weights.load(new_side.module, master_weights.state(old_side.module))
        if new_learner.models.critic is not None:
            if old_learner.models.critic is not None and new_learner.models.critic.own == old_learner.models.critic.own:
                new_side, old_side = new_learner.models.critic.tensors(), old_learner.models.critic.tensors()
                with torch.no_grad():
                    for part_name, new_tensor in new_side.items():
                        new_tensor.copy_(old_side[part_name])
            else:
                self.notes.append("the critic is new: the run has none of this kind")
        for part_name, moving_model in new_learner.models.moving.items():
            if (state := old_learner.models.moving.get(part_name)) is None:
                self.notes.append(f"the moving {part_name} is new: the run has none of this kind")
            else:
                old_side = state.tensors()
                for parameter, new_tensor in moving_model.tensors().items():
                    new_tensor.copy_(old_side[parameter])
        for part_name, optimizer in new_learner.models.optimizers.items():
            old_optimizer = old_learner.models.optimizers.get(part_name)
            # Moments belong to parameters by their order. With other sizes they would belong to other parameters, and
            # fresh ones are the honest start. The groups' settings are the new ones: they are what is being tried.
            if old_optimizer is not None and _sizes(old_optimizer) == _sizes(optimizer):
                state = {
                    "state": old_optimizer.state_dict()["state"],
                    "param_groups": optimizer.state_dict()["param_groups"],
                }
                optimizer.load_state_dict(state)
        new_learner.worker.step_index = new_learner.state.checkpoint_step = old_learner.step_index
        self.learner, self._as_it_was, self._config = new_learner, False, config

    def train(self, step: int) -> tuple[list[Group], dict[str, Any], Mapping[str, Any] | None]:
        """One step: its groups, its metrics now, and those of the run."""
        step_metrics, weight_marks = self._metrics.get(step), self._recorded.get(step)
        # A setting that was changed while the run went on holds from its step on, here as then.
        if self._as_it_was and (step_config := self.config_of(step)) != self._config:
            self._config = step_config
            self.learner.retune(step_config.learner)
        step_groups = self._groups(step, step_metrics)
        own_circumstances = circumstances(self._config.train) | {"ranks": 1}
        if weight_marks is not None and self._as_it_was:
            run_circumstances = cast("dict[str, Any]", weight_marks["with"])
            # The number of threads decides how a matrix product is split and so the order of its sums. With another
            # one the last bits differ, and the comparison would report a difference that is none.
            torch.set_num_threads(int(run_circumstances["threads"]))
            own_circumstances["threads"] = run_circumstances["threads"]
            self.notes += [
                f"{circumstance}: {run_circumstances[circumstance]} in the run, {own_circumstances[circumstance]} here"
                for circumstance in own_circumstances
                if run_circumstances.get(circumstance, own_circumstances[circumstance])
                != own_circumstances[circumstance]
            ]
        lag_bound = step_metrics.get("max_lag") if step_metrics else None  # alarms may have lowered it
        step_report = self.learner.step(
            step_groups, step_of=self._store.versions.step_of, undone=self._store.versions.is_undone, max_lag=lag_bound
        )
        if weight_marks is not None and self._as_it_was:
            self._compare(step, cast("list[str]", weight_marks["hashes"]))
        return step_groups, cast("dict[str, Any]", finite(asdict(step_report))), step_metrics

    def _groups(self, step: int, metrics: Mapping[str, Any] | None) -> list[Group]:
        try:
            retaken_groups = self._store.trained.retake(step)
        except StoreError as error:
            raise UsageError(f"{error}: the run goes on, and its retention came between") from error
        if metrics is None:
            self.notes.append(f"step {step}: the run recorded no metrics of it")
            return retaken_groups
        positions = {
            group_id: position for position, group_id in enumerate(cast("list[int]", metrics.get("groups", [])))
        }
        group_weights = cast("dict[str, float]", metrics.get("group_weights", {}))
        # The order of groups decides which minibatch they are in, and the order of sums. The store has them by
        # number; the run's metrics have the order in which the step took them, and what each weighed.
        ordered_groups = sorted(
            retaken_groups, key=lambda group: (group.skipped, positions.get(group.id, len(positions)))
        )
        return [
            replace(retaken_group, weight=group_weights.get(str(retaken_group.id), 1.0))
            for retaken_group in ordered_groups
        ]

    def _compare(self, step: int, recorded: Sequence[str]) -> None:
        own_hashes = self.learner.hashes()
        self.compared.append(step)
        # By position: the record has hashes without names, in the order of the learner's tensors. `zip_longest` so
        # that a tensor too many or too few is a difference instead of an end.
        hash_pairs = itertools.zip_longest(own_hashes.items(), recorded, fillvalue=("(a tensor that is not here)", ""))
        different_names = tuple(
            named_hash[0] for named_hash, recorded_hash in hash_pairs if named_hash[1] != recorded_hash
        )
        if different_names and self.difference is None:
            self.difference = Difference(step=step, tensors=different_names, of=len(own_hashes))


def _otherwise(config: RunConfig, settings: Sequence[str]) -> RunConfig | None:
    """The configuration of a step that is trained otherwise; None without settings. Raises ConfigError."""
    if not settings:
        return None
    document = config.model_dump(mode="json")
    for setting in settings:
        setting_key = setting.partition("=")[0].strip()
        # What decided which episodes exist (environment, rollout, model) cannot be changed afterwards. Refused here,
        # so that nobody takes the unchanged result for an answer.
        if not setting_key.startswith("algo.") and setting_key not in (
            f"train.{field_name}" for field_name in _OTHERWISE
        ):
            allowed_text = f"a step is trained again with another algo.…, or train.{', '.join(_OTHERWISE)}"
            raise ConfigError("--set", setting, allowed_text)
        configuration.apply_override(document, setting)
    return configuration.parse(document)


def _begin(run: RunDir, config: RunConfig, store: RunStore, step: int) -> Path | None:
    """The newest checkpoint before `step` from which all steps up to it can be trained again; None for the weights that
    the run began with. Raises UsageError if one of these steps lacks tokens or episodes."""
    # By step, what the store lacks of it: "" if nothing. A step that it does not know lacks all its episodes.
    missing_by_step = store.trained.steps_trained()
    start_by_step = {
        0: None,
        **{step_of(checkpoint_folder): checkpoint_folder for checkpoint_folder in complete(run.checkpoints)},
    }
    if step not in missing_by_step:
        trained_text = (
            f"it has trained {_ranges(sorted(missing_by_step))}" if missing_by_step else "it has trained none yet"
        )
        raise UsageError(f"--step {step}: the run has no such step: {trained_text}")
    # The newest start costs the fewest steps. An earlier one never helps when its own steps are gone, since it needs
    # those of the newest as well.
    newest_start = max(each_step for each_step in start_by_step if each_step < step)
    incomplete_steps = [
        each_step for each_step in range(newest_start + 1, step + 1) if missing_by_step.get(each_step, "episodes")
    ]
    if not incomplete_steps:
        return start_by_step[newest_start]
    possible_steps = [
        each_step
        for each_step in missing_by_step
        if not any(
            missing_by_step.get(needed_step, "episodes")
            for needed_step in range(
                max(start_step for start_step in start_by_step if start_step < each_step) + 1, each_step + 1
            )
        )
    ]
    possible_text = f"steps that can be: {_ranges(possible_steps)}" if possible_steps else "no step can be"
    if any(missing_by_step.get(each_step) == "episodes" for each_step in incomplete_steps):
        raise UsageError(f"--step {step} cannot be trained again: the store has lost episodes of it; {possible_text}")
    way_text = f"from {'its initial weights' if newest_start == 0 else start_by_step[newest_start]}"
    needed_text = f"on it needs steps {newest_start + 1} to {step}"
    available = (
        f"retention has dropped tokens of {_ranges(incomplete_steps)} (buffer.keep_steps = {config.buffer.keep_steps}; "
        f"train.keep_checkpoints = {config.train.keep_checkpoints}: more of them keep later starts)"
    )
    raise UsageError(
        f"--step {step} cannot be trained again: {way_text} {needed_text}, and {available}; {possible_text}"
    )


def _ranges(steps: Sequence[int]) -> str:
    """Steps in order as `1 to 4, 7`."""
    range_texts: list[str] = []
    for _, consecutive in itertools.groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0]):
        step_run = [step_number for _, step_number in consecutive]
        range_texts.append(str(step_run[0]) if len(step_run) == 1 else f"{step_run[0]} to {step_run[-1]}")
    return ", ".join(range_texts)


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [parameter.numel() for parameter_group in optimizer.param_groups for parameter in parameter_group["params"]]


def _saved(learner: Learner, out: Path) -> Path:
    try:
        return learner.save(out)
    except (OSError, RunFailed) as error:
        raise UsageError(f"--out {str(out)!r} cannot be written: {error}") from error


def _opened(dump: Path) -> Any:
    try:
        if not dump.parent.exists() and dump.parent.parent.is_dir():  # RUN/tokens
            dump.parent.mkdir()
        return dump.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--dump {str(dump)!r} cannot be written: {error.strerror}") from error
