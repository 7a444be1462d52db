"""Supervised training on demonstrations: a warm start, with the learner, checkpoints and adapters of a run.

    RUN/sft.json                 all settings
    RUN/checkpoints/             as those of a run; `agentrl train --set model=RUN` begins with the newest
    RUN/metrics.jsonl            one JSON object a step

Which demonstrations a step takes follows from the seed and its number alone, so that going on from a checkpoint is as
if nothing had happened. Owns this loop; never knows a store, an engine or an environment.
"""

from __future__ import annotations

import json
import random
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field, ValidationError, field_validator
from torch import Tensor

from agentrl import config as configuration
from agentrl import notices
from agentrl.algos.algorithm import Outputs
from agentrl.algos.sft import Supervised
from agentrl.config import EnvSource, Rollout, RunConfig, Train
from agentrl.config.machine_defaults import Machine, faster_in_bfloat16, parameters_of
from agentrl.config.roles import LearnerSettings
from agentrl.config.sections import Count, Section, check_template, config_error
from agentrl.engine.rendering.renderer import Renderer
from agentrl.errors import ConfigError, UsageError
from agentrl.host.cores import cores
from agentrl.learner.build_learner import build_learner
from agentrl.learner.checkpoints.folders import newest
from agentrl.learner.checkpoints.intact import newest_intact
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import Pack, packs
from agentrl.learner.data.shares import weigh
from agentrl.learner.learner import Learner
from agentrl.models.resolve import model_dir
from agentrl.offline.demonstrations import read
from agentrl.records import Group, GroupState, Trajectory
from agentrl.run.run_folder import RunDir

SETTINGS = "sft.json"
_BUSY = "wait for its end, or give another --out"


def _of_its_own() -> dict[str, Any]:
    """Defaults of `train` where they differ from those of a run: nothing else computes meanwhile."""
    return {"lr": 1e-5, "threads": cores()}


class SFTConfig(Section):
    """The run file of `agentrl sft`."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] = "sft"  # also its folder's, below runs/
    seed: int = 0  # decides the order of the demonstrations and the weights of a fresh adapter
    model: str  # a registered id, a folder, a run, or an id of the Hugging Face hub
    data: Annotated[list[str], Field(min_length=1)]  # files, see `agentrl.offline.demonstrations`
    held_out: list[str] = Field(default_factory=list)  # files whose loss is measured, and not trained
    held_out_every: Count = 20  # steps between two measurements; also before the first step and after the last
    examples_per_step: Count = 16  # demonstrations of one optimizer step
    max_context: Count = 2048  # tokens of one demonstration
    template: dict[str, Any] = Field(default_factory=dict)  # of the chat template: { enable_thinking = false }
    normalise: Literal["token", "sequence"] = "token"  # what weighs the same: every token, or every demonstration
    train: Train = Field(default_factory=lambda: Train(**_of_its_own()))  # as in the run file of `agentrl train`

    # Before validation, and only over what a file leaves out: afterwards a default of `Train` cannot be told from the
    # same value given on purpose.
    @field_validator("train", mode="before")
    @classmethod
    def _with_own_defaults(cls, table: Any) -> Any:
        return _of_its_own() | cast("dict[str, Any]", table) if isinstance(table, dict) else table

    @field_validator("template")
    @classmethod
    def _of_template(cls, template: dict[str, Any]) -> dict[str, Any]:
        return check_template(template)

    def learner(self) -> LearnerSettings:
        """The settings that a learner reads."""
        if self.train.parallel.ranks > 1:
            raise ConfigError("train.parallel.ranks", self.train.parallel.ranks, "a warm start has one: leave it out")
        # A run's configuration is built around the settings, so that the learner reads one kind of settings, and
        # every check that a run makes is made here. The environment is a name that is never opened.
        return RunConfig(
            name=self.name,
            seed=self.seed,
            model=self.model,
            env=EnvSource(id="agentrl/demonstrations"),
            algo=Supervised(normalise=self.normalise),
            rollout=Rollout(max_context=self.max_context, max_tokens_per_turn=1),
            train=self.train,
        ).learner


def load(path: Path, overrides: Sequence[str] = ()) -> SFTConfig:
    """Read a TOML file; files of demonstrations are taken from its folder. Raises UsageError."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}") from error
    for override in overrides:
        configuration.apply_override(document, override)
    sft_config = parse(document)
    file_folder = path.parent.resolve()
    absolute_paths = {
        field_name: [str(file_folder / file_name) for file_name in getattr(sft_config, field_name)]
        for field_name in ("data", "held_out")
    }
    return sft_config.model_copy(update=absolute_paths)


def parse(document: Mapping[str, Any]) -> SFTConfig:
    """Raises ConfigError naming the first wrong field."""
    try:
        sft_config = SFTConfig.model_validate(document)
    except ValidationError as error:
        raise config_error(error, SFTConfig) from None
    sft_config.learner()  # what its settings must fit to each other
    return sft_config


def train(
    config: SFTConfig, out: Path, *, notify: Callable[[str], None] = lambda _: None, overwrite: bool = False
) -> Path:
    """Train from the start in a new folder; `overwrite` replaces a run of ours that is there, and nothing else. Returns
    the last checkpoint's folder. Raises UsageError."""
    run_folder = RunDir(out)
    # Fitted before it is written: `sft.json` holds what was trained with, and a resume on a machine of another kind
    # does not change the dtype halfway.
    config = _fitted(config, notify)
    overwrite = overwrite and (out / SETTINGS).is_file()
    if not overwrite:
        _check_empty(run_folder)
    # Models and data are read before the old run is removed. A typing error in a path must not cost the folder that
    # `--overwrite` was given for. `tests/run/test_sft.py::test_overwrite_replaces_a_run_of_ours_and_nothing_else`.
    training = _Training(config, out)
    with run_folder.lock(_BUSY):
        if overwrite:
            _clear(run_folder)
        _check_empty(run_folder)  # another process may have begun meanwhile
        (out / SETTINGS).write_text(config.model_dump_json(indent=2) + "\n")
        (out / "checkpoints").mkdir()
        return training.run(notify)


def _fitted(config: SFTConfig, notify: Callable[[str], None]) -> SFTConfig:
    """Choose bfloat16, and report it, if this CPU is faster in it and the configuration sets no `dtype`."""
    train_settings = config.train
    if train_settings.device != "cpu" or "dtype" in train_settings.model_fields_set:
        return config
    if not faster_in_bfloat16(Machine.seen(), parameters_of(model_dir(config.model))):
        return config
    notify("chosen for this machine and model: train.dtype = 'bfloat16'")
    return config.model_copy(update={"train": train_settings.model_copy(update={"dtype": "bfloat16"})})


def _check_empty(run: RunDir) -> None:
    if run.path.exists() and any(folder_entry != run.lock_path for folder_entry in run.path.iterdir()):
        alternatives = f", or --resume {run.path}, or --overwrite" if (run.path / SETTINGS).is_file() else ""
        raise UsageError(f"{run.path} is not empty: give another --out{alternatives}")


def _clear(run: RunDir) -> None:
    for folder_entry in run.path.iterdir():
        # The lock is held on this very file. Unlinked, a second process would lock a new file of the same name, and
        # both would write.
        if folder_entry == run.lock_path:
            continue
        if folder_entry.is_dir() and not folder_entry.is_symlink():
            shutil.rmtree(folder_entry)
        else:
            folder_entry.unlink()


def resume(out: Path, overrides: Sequence[str] = (), *, notify: Callable[[str], None] = lambda _: None) -> Path:
    """Go on from the newest checkpoint, with `train.steps` raised by one of the `overrides` if there are still steps to
    take. Returns the folder of the last checkpoint. Raises UsageError for a folder without such a run, and for an
    override of another setting."""
    try:
        document = json.loads((out / SETTINGS).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{out} holds no run of agentrl sft ({SETTINGS}: {error})") from error
    for override in overrides:
        # Which demonstrations a step takes, and the schedule of its learning rate, follow from the settings. Changed
        # halfway, the run would be neither the old one nor a new one, and its checkpoints would not tell.
        if not override.startswith("train.steps="):
            raise UsageError(f"--set {override}: a run that goes on keeps its settings, but for train.steps")
        configuration.apply_override(document, override)
    sft_config = parse(document)
    with RunDir(out).lock(_BUSY):
        (out / SETTINGS).write_text(sft_config.model_dump_json(indent=2) + "\n")
        training = _Training(sft_config, out)
        training.load_newest(notify)
        return training.run(notify)


def _name_shared(data: Sequence[Trajectory], held_out: Sequence[Trajectory]) -> None:
    """Name held-out demonstrations that are trained, too: their loss is memory."""
    # Compared as tokens: two rows that differ only in an unused key, or in how their calls are spelled, are the same
    # example to the model.
    trained_tokens = {
        tuple((shown_turn.prompt_ids, shown_turn.token_ids) for shown_turn in demonstration.turns)
        for demonstration in data
    }
    shared_count = sum(
        tuple((shown_turn.prompt_ids, shown_turn.token_ids) for shown_turn in demonstration.turns) in trained_tokens
        for demonstration in held_out
    )
    if shared_count:
        case_text = f"{shared_count} of {len(held_out)} held-out demonstrations are in data too: their loss is memory"
        notices.note("demonstrations", case_text)


class _Training:
    def __init__(self, config: SFTConfig, out: Path) -> None:
        self._config, self._out = config, out
        model_folder = model_dir(config.model)
        self._learner = build_learner(config.learner(), model_folder, folder_of=model_dir)
        renderer = Renderer(model_folder, template_kwargs=config.template)
        vocab_size = self._learner.model.vocab
        self._data, self._held_out = (
            [
                demonstration
                for data_file in data_files
                for demonstration in read(Path(data_file), renderer, vocab=vocab_size, max_context=config.max_context)
            ]
            for data_files in (config.data, config.held_out)
        )
        _name_shared(self._data, self._held_out)
        # A batch asks for the order of its pass once for each of its members; an order of a million numbers is not
        # drawn anew each time. Bound in the constructor, as `functools.cache` on a method would keep every instance
        # alive.
        self._permutation = cache(self._permuted)

    def load_newest(self, notify: Callable[[str], None]) -> None:
        """Go on from the newest intact checkpoint, if there is one. Raises RunFailed if all are damaged."""
        checkpoint, damage_text = newest_intact(self._out / "checkpoints")
        if damage_text:
            notify(damage_text)
        if checkpoint is not None:
            self._learner.load(checkpoint)

    def run(self, notify: Callable[[str], None]) -> Path:
        learner, train_settings = self._learner, self._config.train
        if self._held_out and learner.step_index == 0:
            self._tell(notify, {"step": 0, **self.held_out()})
        while learner.step_index < train_settings.steps:
            accuracy = _Accuracy(learner)
            step_report = learner.step(self.batch(learner.step_index), step_of=lambda _: learner.step_index)
            metric_row: dict[str, Any] = {
                "step": step_report.step,
                "loss": step_report.loss,
                "token_accuracy": accuracy.close(),
                "tokens": step_report.tokens_scored,
                "grad_norm": step_report.grad_norm,
                "lr": step_report.lr,
                "seconds": sum(step_report.seconds.values()),
            }
            is_last = step_report.step == train_settings.steps
            if self._held_out and (is_last or step_report.step % self._config.held_out_every == 0):
                metric_row |= self.held_out()
            self._tell(notify, metric_row)
            if is_last or step_report.step % train_settings.checkpoint_every == 0:
                learner.save(self._out / "checkpoints")
        checkpoint = newest(self._out / "checkpoints")
        assert checkpoint is not None
        return checkpoint

    def batch(self, step: int) -> list[Group]:
        """The demonstrations of step number `step` (from 0), a group for each update: each is in one step of every pass
        over the data."""
        batch_size, data_count = self._config.examples_per_step, len(self._data)
        # A position in the endless sequence of passes: pass `position // data_count`, and there entry
        # `position % data_count` of its order. A batch may reach over the end of a pass, and no demonstration is left
        # out because `data_count` does not divide. The state that a resume needs is the step's number alone
        # (`tests/run/test_sft.py::test_going_on_is_as_if_nothing_had_happened`).
        drawn_members = [
            (position, self._data[self._permutation(position // data_count)[position % data_count]])
            for position in range(step * batch_size, (step + 1) * batch_size)
        ]
        update_count = min(self._config.train.minibatches, batch_size)
        group_bounds = [batch_size * update_index // update_count for update_index in range(update_count + 1)]
        return [_group(drawn_members[group_start:group_end]) for group_start, group_end in pairwise(group_bounds)]

    def _permuted(self, epoch: int) -> list[int]:
        pass_order = list(range(len(self._data)))
        # A text as the seed: `seed + epoch` would make pass 1 of seed 0 the pass 0 of seed 1, and two seeds the same
        # experiment but for one pass.
        random.Random(f"{self._config.seed}/{epoch}").shuffle(pass_order)
        return pass_order

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        """Loss and accuracy over all tokens of the held-out demonstrations."""
        learner = self._learner
        settings = learner.settings
        held_out_group = _group(list(enumerate(self._held_out)))
        (weighed_rows,) = weigh(
            [[group_rows(held_out_group, settings.algo, step_of=lambda _: 0, step_now=0, max_lag=0)]]
        )
        mean_loss = hit_count = token_count = 0.0
        for token_pack in packs(
            weighed_rows, settings.train.tokens_per_batch, learner.model.device, shared=not learner.model.obstacle
        ):
            accuracy = _Accuracy(learner)
            # Under `no_grad` no activations are stored and nothing is computed again: a measurement costs a third of
            # a step over as many tokens.
            pass_outputs = learner.worker.passes.forward(token_pack, trained=())
            accuracy.count(token_pack, token_pack.columns, pass_outputs)
            accuracy.close()
            # The weights sum to 1 over all packs, as in a step, so the sum over packs is the mean that `normalise`
            # names, and it can be compared with the loss of training.
            mean_loss -= float((token_pack.columns["weight"] * pass_outputs.logprobs_K).sum())
            hit_count, token_count = hit_count + accuracy.hits, token_count + accuracy.tokens
        return {"held_out_loss": mean_loss, "held_out_accuracy": hit_count / token_count}

    def _tell(self, notify: Callable[[str], None], row: Mapping[str, Any]) -> None:
        with (self._out / "metrics.jsonl").open("a") as metrics_file:
            metrics_file.write(json.dumps(row) + "\n")
        notify(
            "  ".join(
                f"{metric_name} {metric_value:.4g}"
                for metric_name, metric_value in row.items()
                if metric_value is not None
            )
        )


class _Accuracy:
    """How often the likeliest token is the demonstrated one: listens to the output layer until it is closed. That layer
    computes a pass [1, P, V] at once, or is passed by and then computes it in chunks [C, V]."""

    def __init__(self, learner: Learner) -> None:
        self.hits = self.tokens = 0
        self._learner, self._best = learner, list[Tensor]()
        # A hook, since logits are not among a pass's outputs: [K, V] of them would be the largest tensor of a step.
        # Their maximum is taken where they exist anyway, and only its index stays.
        output_layer: Any = learner.model.module.get_output_embeddings()
        self._hook = output_layer.register_forward_hook(self._heard)
        learner.worker.on_pass = self.count

    def _heard(self, _: object, __: object, logits: Tensor) -> None:
        is_whole = logits.dim() == 3
        best_tokens = logits.detach().argmax(-1)
        self._best = [best_tokens[0]] if is_whole else [*self._best, best_tokens]

    def count(self, pack: Pack, tokens: Mapping[str, Tensor], outputs: Outputs) -> None:
        # Where the pass goes by the layer and applies it in chunks, the first entry is of the model's own call, whose
        # result nobody reads, and the chunks follow. Where it does not, there is that one call.
        best_chunks = self._best[1:] or self._best
        self.hits += int((torch.cat(best_chunks)[pack.predictor_K] == pack.target_K).sum())
        self.tokens += len(pack.target_K)

    def close(self) -> float | None:
        self._hook.remove()
        self._learner.worker.on_pass = None
        return self.hits / self.tokens if self.tokens else None


def _group(drawn: Sequence[tuple[int, Trajectory]]) -> Group:
    """Numbered demonstrations as members of one group, so that a pass computes their common beginning once: an
    environment's instruction, the schemas of its tools. The numbers tell apart two copies in one step."""
    group_number, first_demonstration = drawn[0]
    group_members = tuple(
        replace(trajectory, episode_id=position, group_id=group_number, member=member)
        for member, (position, trajectory) in enumerate(drawn)
    )
    return Group(
        id=group_number,
        task=first_demonstration.task,
        state=GroupState.TAKEN,
        size=len(group_members),
        trajectories=group_members,
    )
