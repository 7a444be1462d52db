"""The training tasks of a run, from its file: one stream, a mixture of sources, a curriculum over them.

The position in the source is the store's task counter, and a curriculum reads past results back from the store, so a
restart goes on where the run stopped. It never knows which worker plays the tasks.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.config import RunConfig, TaskTable
from agentrl.env import dataset_env
from agentrl.env.datasets import digest, read_rows
from agentrl.env.tasks import Curriculum, Epochs, Mixture, Rows, Seeds, TaskSource
from agentrl.records import Task
from agentrl.store.interfaces import ControlStore
from agentrl.store.run_values import ROWS_DIGESTS

_DIGESTS = "rows_digests"
"""The row of the store with the digest of each data set, as the run last began or went on with it."""

_APART = 1_000_003  # distance between the task seeds of two runs


def task_source(config: RunConfig) -> TaskSource:
    """The training tasks by index, the same in every process and after every restart.

    Raises UsageError for rows that cannot be read. Without `[[tasks]]` the tasks are the seeds of `[env]`."""
    tables = _tables(config)
    sources = [_source(config, table) for table in tables]
    source = sources[0] if len(sources) == 1 else Mixture(sources, [table.weight for table in tables])
    if config.curriculum is None:
        return source
    return Curriculum(source, **config.curriculum.model_dump())


def first_tasks(config: RunConfig) -> list[Task]:
    """The first task of each table. Raises UsageError for rows that cannot be read."""
    return [tasks[0] for tasks in source_tasks(config, 1)]


def source_tasks(config: RunConfig, count: int) -> list[list[Task]]:
    """The first tasks of each table, at most `count`. Raises UsageError for rows that cannot be read."""
    sources = [_source(config, table) for table in _tables(config)]
    return [
        [source.task(at) for at in range(min(count, count if source.size is None else source.size))]
        for source in sources
    ]


def data_sets_of(config: RunConfig) -> dict[str, str]:
    """The data sets of the run file, by field and name."""
    named = {f"tasks.{at}.rows": table.rows for at, table in enumerate(config.tasks)}
    named |= {
        f"eval.sets.{at}.kwargs.rows": {**config.env.kwargs, **held_out.kwargs}.get("rows")
        for at, held_out in enumerate(config.eval.sets)
        if (held_out.id or config.env.id) == dataset_env.ID
    }
    return {f"{field} = {where!r}": where for field, where in named.items() if where is not None}


def digests_of(config: RunConfig) -> dict[str, str]:
    """A digest of each of `data_sets_of`. Raises UsageError for one that cannot be read."""
    return {name: digest(where) for name, where in data_sets_of(config).items()}


def changed_rows(now: Mapping[str, str], store: ControlStore) -> list[str]:
    """Those of the data sets `now` that are others than when the run last began or went on. Writes `now` down."""
    before = ROWS_DIGESTS.of(store.meta)
    if now != before:
        ROWS_DIGESTS.set(store, dict(now))
    return [name for name, value in now.items() if before.get(name, value) != value]


def _tables(config: RunConfig) -> list[TaskTable]:
    return config.tasks or [TaskTable(first_seed=config.env.first_seed)]


def _source(config: RunConfig, table: TaskTable) -> TaskSource:
    env = table.id or config.env.id
    same = env == config.env.id
    kwargs = {**(config.env.kwargs if same else {}), **table.kwargs}
    options = {**(config.env.options if same else {}), **table.options}
    epochs = 1 if config.curriculum else table.epochs  # a curriculum itself decides how often to play a task
    if table.rows is not None:
        found = read_rows(table.rows)
        return Rows(env, found, kwargs=kwargs, options=options, seed=config.seed, epochs=epochs)
    if table.seeds is not None:
        seeds = Seeds(env, kwargs=kwargs, options=options, first_seed=table.first_seed, size=table.seeds)
        return Epochs(seeds, seed=config.seed, epochs=epochs)
    return Seeds(env, kwargs=kwargs, options=options, first_seed=table.first_seed + config.seed * _APART)
