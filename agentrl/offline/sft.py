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
    config = parse(document)
    folder = path.parent.resolve()
    beside = {name: [str(folder / name_) for name_ in getattr(config, name)] for name in ("data", "held_out")}
    return config.model_copy(update=beside)


def parse(document: Mapping[str, Any]) -> SFTConfig:
    """Raises ConfigError naming the first wrong field."""
    try:
        config = SFTConfig.model_validate(document)
    except ValidationError as error:
        raise config_error(error, SFTConfig) from None
    config.learner()  # what its settings must fit to each other
    return config


def train(
    config: SFTConfig, out: Path, *, notify: Callable[[str], None] = lambda _: None, overwrite: bool = False
) -> Path:
    """Train from the start in a new folder; `overwrite` replaces a run of ours that is there, and nothing else. Returns
    the last checkpoint's folder. Raises UsageError."""
    run = RunDir(out)
    # Fitted before it is written: `sft.json` holds what was trained with, and a resume on a machine of another kind
    # does not change the dtype halfway.
    config = _fitted(config, notify)
    overwrite = overwrite and (out / SETTINGS).is_file()
    if not overwrite:
        _check_empty(run)
    # Models and data are read before the old run is removed. A typing error in a path must not cost the folder that
    # `--overwrite` was given for. `tests/run/test_sft.py::test_overwrite_replaces_a_run_of_ours_and_nothing_else`.
    training = _Training(config, out)
    with run.lock(_BUSY):
        if overwrite:
            _clear(run)
        _check_empty(run)  # another process may have begun meanwhile
        (out / SETTINGS).write_text(config.model_dump_json(indent=2) + "\n")
        (out / "checkpoints").mkdir()
        return training.run(notify)


def _fitted(config: SFTConfig, notify: Callable[[str], None]) -> SFTConfig:
    """Choose bfloat16, and report it, if this CPU is faster in it and the configuration sets no `dtype`."""
    train = config.train
    if train.device != "cpu" or "dtype" in train.model_fields_set:
        return config
    if not faster_in_bfloat16(Machine.seen(), parameters_of(model_dir(config.model))):
        return config
    notify("chosen for this machine and model: train.dtype = 'bfloat16'")
    return config.model_copy(update={"train": train.model_copy(update={"dtype": "bfloat16"})})


def _check_empty(run: RunDir) -> None:
    if run.path.exists() and any(entry != run.lock_path for entry in run.path.iterdir()):
        alternatives = f", or --resume {run.path}, or --overwrite" if (run.path / SETTINGS).is_file() else ""
        raise UsageError(f"{run.path} is not empty: give another --out{alternatives}")


def _clear(run: RunDir) -> None:
    for entry in run.path.iterdir():
        # The lock is held on this very file. Unlinked, a second process would lock a new file of the same name, and
        # both would write.
        if entry == run.lock_path:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def resume(out: Path, overrides: Sequence[str] = (), *, notify: Callable[[str], None] = lambda _: None) -> Path:
    """Go on from the newest checkpoint; `train.steps` may be raised. Raises UsageError."""
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
    config = parse(document)
    with RunDir(out).lock(_BUSY):
        (out / SETTINGS).write_text(config.model_dump_json(indent=2) + "\n")
        training = _Training(config, out)
        training.load_newest(notify)
        return training.run(notify)


def _name_shared(data: Sequence[Trajectory], held_out: Sequence[Trajectory]) -> None:
    """Name held-out demonstrations that are trained, too: their loss is memory."""
    # Compared as tokens: two rows that differ only in an unused key, or in how their calls are spelled, are the same
    # example to the model.
    trained = {tuple((turn.prompt_ids, turn.token_ids) for turn in each.turns) for each in data}
    shared = sum(tuple((turn.prompt_ids, turn.token_ids) for turn in each.turns) in trained for each in held_out)
    if shared:
        case = f"{shared} of {len(held_out)} held-out demonstrations are in data too: their loss is memory"
        notices.note("demonstrations", case)


class _Training:
    def __init__(self, config: SFTConfig, out: Path) -> None:
        self._config, self._out = config, out
        folder = model_dir(config.model)
        self._learner = build_learner(config.learner(), folder, folder_of=model_dir)
        renderer = Renderer(folder, template_kwargs=config.template)
        vocab = self._learner.model.vocab
        self._data, self._held_out = (
            [
                demonstration
                for file in files
                for demonstration in read(Path(file), renderer, vocab=vocab, max_context=config.max_context)
            ]
            for files in (config.data, config.held_out)
        )
        _name_shared(self._data, self._held_out)
        # A batch asks for the order of its pass once for each of its members; an order of a million numbers is not
        # drawn anew each time. Bound in the constructor, as `functools.cache` on a method would keep every instance
        # alive.
        self._permutation = cache(self._permuted)

    def load_newest(self, notify: Callable[[str], None]) -> None:
        """Go on from the newest intact checkpoint, if there is one. Raises RunFailed if all are damaged."""
        checkpoint, damage = newest_intact(self._out / "checkpoints")
        if damage:
            notify(damage)
        if checkpoint is not None:
            self._learner.load(checkpoint)

    def run(self, notify: Callable[[str], None]) -> Path:
        learner, every = self._learner, self._config.train
        if self._held_out and learner.step_index == 0:
            self._tell(notify, {"step": 0, **self.held_out()})
        while learner.step_index < every.steps:
            accuracy = _Accuracy(learner)
            report = learner.step(self.batch(learner.step_index), step_of=lambda _: learner.step_index)
            row: dict[str, Any] = {
                "step": report.step,
                "loss": report.loss,
                "token_accuracy": accuracy.close(),
                "tokens": report.tokens_scored,
                "grad_norm": report.grad_norm,
                "lr": report.lr,
                "seconds": sum(report.seconds.values()),
            }
            over = report.step == every.steps
            if self._held_out and (over or report.step % self._config.held_out_every == 0):
                row |= self.held_out()
            self._tell(notify, row)
            if over or report.step % every.checkpoint_every == 0:
                learner.save(self._out / "checkpoints")
        checkpoint = newest(self._out / "checkpoints")
        assert checkpoint is not None
        return checkpoint

    def batch(self, step: int) -> list[Group]:
        """The demonstrations of step number `step` (from 0), a group for each update: each is in one step of every pass
        over the data."""
        size, n = self._config.examples_per_step, len(self._data)
        # A place in the endless sequence of passes: pass `place // n`, and there the `place % n`-th of its order. A
        # batch may reach over the end of a pass, and no demonstration is left out because `n` does not divide. The
        # state that a resume needs is the step's number alone
        # (`tests/run/test_sft.py::test_going_on_is_as_if_nothing_had_happened`).
        drawn = [
            (place, self._data[self._permutation(place // n)[place % n]])
            for place in range(step * size, (step + 1) * size)
        ]
        updates = min(self._config.train.minibatches, size)
        bounds = [size * part // updates for part in range(updates + 1)]
        return [_group(drawn[start:stop]) for start, stop in pairwise(bounds)]

    def _permuted(self, epoch: int) -> list[int]:
        order = list(range(len(self._data)))
        # A text as the seed: `seed + epoch` would make pass 1 of seed 0 the pass 0 of seed 1, and two seeds the same
        # experiment but for one pass.
        random.Random(f"{self._config.seed}/{epoch}").shuffle(order)
        return order

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        """Loss and accuracy over all tokens of the held-out demonstrations."""
        learner = self._learner
        settings = learner.settings
        group = _group(list(enumerate(self._held_out)))
        (rows,) = weigh([[group_rows(group, settings.algo, step_of=lambda _: 0, step_now=0, max_lag=0)]])
        loss = hits = tokens = 0.0
        for pack in packs(
            rows, settings.train.tokens_per_batch, learner.model.device, shared=not learner.model.obstacle
        ):
            accuracy = _Accuracy(learner)
            # Under `no_grad` no activations are stored and nothing is computed again: a measurement costs a third of
            # a step over as many tokens.
            outputs = learner.worker.passes.forward(pack, trained=())
            accuracy.count(pack, pack.columns, outputs)
            accuracy.close()
            # The weights sum to 1 over all packs, as in a step, so the sum over packs is the mean that `normalise`
            # names, and it can be compared with the loss of training.
            loss -= float((pack.columns["weight"] * outputs.logprobs_K).sum())
            hits, tokens = hits + accuracy.hits, tokens + accuracy.tokens
        return {"held_out_loss": loss, "held_out_accuracy": hits / tokens}

    def _tell(self, notify: Callable[[str], None], row: Mapping[str, Any]) -> None:
        with (self._out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        notify("  ".join(f"{name} {value:.4g}" for name, value in row.items() if value is not None))


class _Accuracy:
    """How often the likeliest token is the demonstrated one: listens to the output layer until it is closed. That layer
    computes a pass [1, P, V] at once, or is passed by and then computes it in chunks [C, V]."""

    def __init__(self, learner: Learner) -> None:
        self.hits = self.tokens = 0
        self._learner, self._best = learner, list[Tensor]()
        # A hook, since logits are not among a pass's outputs: [K, V] of them would be the largest tensor of a step.
        # Their maximum is taken where they exist anyway, and only its index stays.
        output: Any = learner.model.module.get_output_embeddings()
        self._hook = output.register_forward_hook(self._heard)
        learner.worker.on_pass = self.count

    def _heard(self, _: object, __: object, logits: Tensor) -> None:
        is_whole = logits.dim() == 3
        best = logits.detach().argmax(-1)
        self._best = [best[0]] if is_whole else [*self._best, best]

    def count(self, pack: Pack, tokens: Mapping[str, Tensor], outputs: Outputs) -> None:
        # Where the pass goes by the layer and applies it in chunks, the first entry is of the model's own call, whose
        # result nobody reads, and the chunks follow. Where it does not, there is that one call.
        chunks = self._best[1:] or self._best
        self.hits += int((torch.cat(chunks)[pack.predictor_K] == pack.target_K).sum())
        self.tokens += len(pack.target_K)

    def close(self) -> float | None:
        self._hook.remove()
        self._learner.worker.on_pass = None
        return self.hits / self.tokens if self.tokens else None


def _group(drawn: Sequence[tuple[int, Trajectory]]) -> Group:
    """Numbered demonstrations as members of one group, so that a pass computes their common beginning once: an
    environment's instruction, the schemas of its tools. The numbers tell apart two copies in one step."""
    number, first = drawn[0]
    members = tuple(
        replace(trajectory, episode_id=place, group_id=number, member=member)
        for member, (place, trajectory) in enumerate(drawn)
    )
    return Group(id=number, task=first.task, state=GroupState.TAKEN, size=len(members), trajectories=members)
