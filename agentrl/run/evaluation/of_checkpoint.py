"""Subjects of `agentrl eval`: the newest checkpoint of a run, the model of a run file, or a model as it is.

A checkpoint is a whole model, the shared adapter merged, and is measured as such, as is that of each role with a model
of its own. If roles have adapters of their own,
or past selves play, the adapters are measured over the model that the run began with, as in training: `Adapters` has
copies, for the run may go on meanwhile. Never plays an episode.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import config as configuration
from agentrl.config import RunConfig
from agentrl.env import dataset_env
from agentrl.errors import UsageError
from agentrl.learner.checkpoints import digests
from agentrl.learner.checkpoints.folders import newest_written, of_role, step_of, write_state
from agentrl.models.resolve import refuse_missing_folder
from agentrl.run import league
from agentrl.run.evaluation import held_out as evaluation
from agentrl.run.run_folder import RunDir
from agentrl.run.task_sources import with_held_out_sizes
from agentrl.store import RunStore
from agentrl.store.run_values import LEAGUE


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The weights that a run trained over its model: the checkpoint with its adapters, and the run, which has a league
    if past selves play."""

    source: RunDir
    checkpoint: Path

    def copy_into(self, run: RunDir) -> None:
        """Have a new run begin with these adapters, and know the same past selves. Raises UsageError."""
        try:
            self._copy_into(run)
        except OSError as error:  # shutil.Error is one
            correction = "a run that goes on keeps only its newest: give the same command again"
            raise UsageError(f"{self.checkpoint} cannot be copied ({error}): {correction}") from None

    def _copy_into(self, run: RunDir) -> None:
        checkpoint = run.checkpoints / self.checkpoint.name
        shutil.copytree(self.checkpoint / "adapter", checkpoint / "adapter")
        write_state(checkpoint, {"step": step_of(checkpoint)})  # it trained nothing of this run
        with RunStore.read(self.source.store_path) as source_store, RunStore.open(run.store_path) as run_store:
            league_members = LEAGUE.of(source_store.meta)
            if league_members is not None:
                LEAGUE.set(run_store, league_members)
        for version, member_folder in league.folders(self.source).items():
            shutil.copytree(member_folder, run.path / "league" / str(version))


def measured(
    subject: str | Path | RunConfig, env: str | None, n: int | None, settings: Sequence[str] = ()
) -> tuple[RunConfig, Adapters | None]:
    """The configuration with which `n` episodes of each held-out set (None: as many as it has) measure `subject`: a
    run's folder, a model, or the model of a configuration or of its file; under `settings` (`section.key=value`). And
    its adapters, if they are measured as such. Raises UsageError, or ModelError for a damaged checkpoint."""
    adapters = None
    if not isinstance(subject, RunConfig) and Path(subject).suffix == ".toml" and Path(subject).is_file():
        subject = configuration.load(Path(subject), [*settings])  # without them the file may be incomplete
    document: dict[str, Any]
    if isinstance(subject, RunConfig):
        document = subject.model_dump(mode="json", exclude_unset=True)
        subject = subject.model
    elif RunDir(subject_path := Path(subject)).store_path.exists():
        run_folder = RunDir.open(subject_path)
        run_config, checkpoint = run_folder.config(), newest_written(run_folder.checkpoints)
        if checkpoint is not None:
            digests.check(checkpoint)
        document = run_config.model_dump(mode="json")
        if checkpoint is not None and (run_config.adapted_roles or run_config.league_roles):
            adapters = Adapters(source=run_folder, checkpoint=checkpoint)
        elif checkpoint is not None:
            role_models: dict[str, str] = document["rollout"]["roles"]
            first_model = document["model"]  # who is frozen stays what the run began with
            # "frozen" means the model that the run began with. Now that the model is the checkpoint, that has to be
            # said by name, or the policy would be measured against itself.
            role_models.update(
                {role_name: first_model for role_name, policy in role_models.items() if policy == "frozen"}
            )
            document["model"] = str(checkpoint)
            for role_table in document["roles"]:
                if role_table["model"] is not None:
                    role_table["model"] = str(of_role(checkpoint, role_table["name"]))
    else:
        if env is None:
            if not subject_path.is_dir():
                refuse_missing_folder(str(subject))
            elif not any(subject_path.glob("*config.json")):
                raise UsageError(f"{subject} holds neither a run nor a model: name a folder that does")
            raise UsageError(f"{subject} is a model: name the environment with --env")
        document = {"model": str(subject), "env": {"id": env}}
    if env is not None and env != document["env"]["id"]:
        document["env"] = {"id": env}
        document["tasks"], document["curriculum"] = [], None
        document["eval"] = {}
    held_out_sets: list[dict[str, Any]] = document.get("eval", {}).get("sets") or [{"name": "tasks", "kwargs": {}}]
    document["eval"] = {"sets": [{**held_out, **({} if n is None else {"n": n})} for held_out in held_out_sets]}
    for override in settings:
        configuration.apply_override(document, override)
    run_config = configuration.parse(document)
    _check_rows(subject, run_config)
    run_config = with_held_out_sizes(run_config)
    return run_config, adapters


def _check_rows(what: str | Path, config: RunConfig) -> None:
    """Refuse held-out sets of a data set without rows: none of their episodes could begin."""
    for held_out in config.eval.sets:
        first_task = evaluation.tasks_of(config, held_out, 1)[0]
        if first_task.env in dataset_env.IDS and not first_task.kwargs.get("rows") and not first_task.options:
            correction = "name some with --set env.kwargs.rows=FILE, or give the run eval_dataset"
            raise UsageError(f"{what} has no held-out rows: {correction}")
