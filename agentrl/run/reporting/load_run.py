"""A run as tables, for notebooks: steps, episodes, turns, rewards. Reads only, also beside a run that goes on, from a
store in a file or on a server. Each call is a look at the run as it is then."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from agentrl.config import RunConfig
from agentrl.errors import UsageError
from agentrl.host.installation import install_command
from agentrl.records import Trajectory
from agentrl.run.reporting.status import status
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]
    import polars

_MOST = 1000  # episodes a read


class Table(Sequence[dict[str, Any]]):
    """Rows with names, as a list of mappings; `columns`, `to_pandas` and `to_polars` give it otherwise.

    >>> table = Table([{"step": 1, "loss": 0.5}, {"step": 2}])
    >>> table[0]["loss"], table.columns()
    (0.5, {'step': [1, 2], 'loss': [0.5, None]})
    """

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self._rows = list(rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Table: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Table:
        return Table(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"Table of {len(self)} rows: {', '.join(self.columns())}"

    def columns(self) -> dict[str, list[Any]]:
        """The values by name, None where a row has none."""
        column_names = dict.fromkeys(column_name for table_row in self._rows for column_name in table_row)
        return {column_name: [table_row.get(column_name) for table_row in self._rows] for column_name in column_names}

    def to_pandas(self) -> pandas.DataFrame:
        """A data frame of pandas. Raises UsageError if it is not installed."""
        try:
            import pandas  # pyright: ignore[reportMissingTypeStubs]
        except ImportError:
            raise UsageError(f"pandas is not installed: {install_command('pandas')}; or use columns()") from None
        return pandas.DataFrame(self.columns())

    def to_polars(self) -> polars.DataFrame:
        """A data frame of polars, in which mappings and lists are JSON: their keys differ by row. Raises UsageError if
        it is not installed."""
        try:
            import polars
        except ImportError:
            raise UsageError(f"polars is not installed: {install_command('polars')}; or use columns()") from None
        json_columns = {
            column_name: [
                json.dumps(cell_value) if isinstance(cell_value, dict | list) else cell_value
                for cell_value in cell_values
            ]
            for column_name, cell_values in self.columns().items()
        }
        # The whole column decides its type: polars looks at the first hundred rows by default, and a metric that
        # appears at step 200 would be an error.
        return polars.DataFrame(json_columns, strict=False, infer_schema_length=None)


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run's folder, to look at. See `load_run`."""

    path: Path

    def config(self) -> RunConfig:
        """The run's whole configuration."""
        return RunDir.open(self.path).config()

    def summary(self) -> dict[str, Any] | None:
        """The contents of `summary.json`; None before the run's end."""
        summary_path = RunDir.open(self.path).summary
        return cast("dict[str, Any]", json.loads(summary_path.read_text())) if summary_path.exists() else None

    def status(self) -> dict[str, Any]:
        """Return the run's status now, as `agentrl status --json` prints it."""
        return status(RunDir.open(self.path))

    def steps(self, *, undone: bool = False) -> Table:
        """A row for each optimizer step with its metrics (`docs/reference/metrics.md`); with `undone` also steps that a
        restart undid, which `undone` marks."""
        with self._store() as run_store:
            step_rows = run_store.metrics.values("step", undone=undone)
        return Table(
            {
                **step_row.values,
                "step": step_row.step,
                "attempt": step_row.attempt,
                "time_s": step_row.time_s,
                "undone": step_row.undone,
            }
            for step_row in step_rows
        )

    def episodes(self, purpose: str | None = "train") -> Table:
        """A row for each episode of a purpose, or of all (None): `train`, or `eval:SET:before`, `…:during@STEP`,
        `…:after`. One that goes on has no `stop_reason`."""
        with self._store() as run_store:
            return Table(_episodes(run_store, purpose))

    def turns(self, purpose: str | None = "train", *, episode: int | None = None) -> Table:
        """A row for each turn of these episodes, or of one: what the model wrote, what it was answered, the turn's
        reward, and how many tokens were sampled (None once `buffer.keep_steps` has dropped them)."""
        with self._store() as run_store:
            return Table(
                turn_row
                for trajectory in self._trajectories(run_store, purpose, episode)
                for turn_row in _turns(trajectory)
            )

    def rewards(self, purpose: str | None = "train", *, episode: int | None = None) -> Table:
        """A row for each reward that a turn of these episodes, or of one, has earned from a source."""
        with self._store() as run_store:
            return Table(
                reward_row
                for trajectory in self._trajectories(run_store, purpose, episode)
                for reward_row in _rewards(trajectory)
            )

    def _store(self) -> RunStore:
        return RunStore.read(RunDir.open(self.path).store_path)

    @staticmethod
    def _trajectories(store: RunStore, purpose: str | None, episode: int | None) -> Iterator[Trajectory]:
        if episode is not None:
            yield store.reads.trajectory(episode)
            return
        for shown_purpose in store.groups.purposes() if purpose is None else [purpose]:
            yield from store.reads.trajectories(shown_purpose)


def load_run(path: Path | str) -> LoadedRun:
    """The run in the folder `path` as tables. Raises UsageError if there is none."""
    return LoadedRun(RunDir.open(Path(path)).path)


def _episodes(store: RunStore, purpose: str | None) -> Iterator[dict[str, Any]]:
    after_id = 0
    while episode_rows := store.reads.episodes(purpose, after=after_id, limit=_MOST):
        after_id = episode_rows[-1].id
        for episode_row in episode_rows:
            episode_fields = asdict(episode_row)
            task_fields = episode_fields.pop("task")
            yield {
                "episode": episode_fields.pop("id"),
                "group": episode_fields.pop("group_id"),
                "env": task_fields["env"],
                "seed": task_fields["seed"],
                **episode_fields,
                "group_state": episode_row.group_state.value,
                "stop_reason": None if episode_row.stop_reason is None else episode_row.stop_reason.value,
            }


def _turns(trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    for played_turn in trajectory.turns:
        env_step = played_turn.step
        yield {
            "episode": trajectory.episode_id,
            "turn": played_turn.index,
            "turn_id": played_turn.id,
            "role": played_turn.role,
            "text": played_turn.text,
            "observation": None if env_step is None else [dict(message) for message in env_step.observation],
            "reward": played_turn.reward,
            "tokens": len(played_turn.token_ids) or None,
            "finish": played_turn.finish,
            "seconds": played_turn.ended_s - played_turn.started_s,
        }


def _rewards(trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    for played_turn in trajectory.turns:
        for source_name, reward in played_turn.rewards.items():
            yield {
                "episode": trajectory.episode_id,
                "turn": played_turn.index,
                "turn_id": played_turn.id,
                "role": played_turn.role,
                "source": source_name,
                "value": reward,
            }
