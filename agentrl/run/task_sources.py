"""The training tasks of a run, from its file: one stream, a mixture of sources, a curriculum over them.

The position in the source is the store's task counter, and a curriculum reads past results back from the store, so a
restart goes on where the run stopped. It never knows which worker plays the tasks.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from typing import cast

from agentrl import notices
from agentrl.config import RunConfig, TaskTable
from agentrl.config.sections import HeldOut
from agentrl.env import dataset_env
from agentrl.env.datasets import digest, read_rows
from agentrl.env.tasks import Curriculum, Epochs, Mixture, Rows, Seeds, TaskSource
from agentrl.errors import UsageError
from agentrl.records import Json, Task
from agentrl.store import RunStore
from agentrl.store.run_values import ROWS_DIGESTS

_DIGESTS = "rows_digests"
"""The row of the store with the digest of each data set, as the run last began or went on with it."""

# More than a run plays, so that two runs which differ in their seed alone share no task. Held-out seeds begin far
# above, at a billion.
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
        [source.task(number) for number in range(min(count, count if source.size is None else source.size))]
        for source in sources
    ]


def data_sets_of(config: RunConfig) -> dict[str, str]:
    """The data sets of the run file, by field and name."""
    by_field = {f"tasks.{number}.rows": table.rows for number, table in enumerate(config.tasks)}
    by_field |= {
        f"eval.sets.{number}.kwargs.rows": _rows_of(config, each) for number, each in enumerate(config.eval.sets)
    }
    return {f"{field} = {where!r}": where for field, where in by_field.items() if where is not None}


def digests_of(config: RunConfig) -> dict[str, str]:
    """A digest of each of `data_sets_of`. Raises UsageError for one that cannot be read."""
    return {name: digest(where) for name, where in data_sets_of(config).items()}


def with_held_out_sizes(config: RunConfig) -> RunConfig:
    """The configuration in which a held-out set of a file has as many tasks as the file has rows, unless `n` is set.
    A set of seeds has no end and takes `n`; a file has one, and 256 tasks of 12 rows would ask each 21 or 22 times."""
    sets: list[HeldOut] = []
    for number, held_out in enumerate(config.eval.sets):
        where = _rows_of(config, held_out)
        if where is not None:
            size = len(read_rows(where))
            if not size:
                raise UsageError(f"{where} has no rows: eval.sets.{number} would measure nothing; leave the set out")
            if "n" not in held_out.model_fields_set:
                held_out = held_out.model_copy(update={"n": size})
            elif held_out.n > size:
                case = f"eval.sets.{number}.n = {held_out.n} asks {size} rows more than once each"
                notices.note("held-out rows", f"{case}: leave n out", place=where)
        sets.append(held_out)
    return config.model_copy(update={"eval": config.eval.model_copy(update={"sets": sets})})


def held_out_rows(config: RunConfig) -> int | None:
    """How many rows the environment of a configuration asks by seed; None for one of another kind."""
    where = config.env.kwargs.get("rows") if config.env.id in dataset_env.IDS else None
    return None if where is None else len(read_rows(where)) or None


def name_shared_rows(config: RunConfig) -> None:
    """Name held-out rows that are training rows too: what is measured on them is memory. Two rows are the same if the
    columns that the prompt names are."""
    prompt = str(config.env.kwargs.get("prompt", "{prompt}"))
    trained = {_question(row, prompt) for table in config.tasks if table.rows for row in read_rows(table.rows)}
    for number, held_out in enumerate(config.eval.sets):
        where = _rows_of(config, held_out)
        if where is None or not trained:
            continue
        rows = read_rows(where)
        # Named and not refused: a set may hold a few rows on purpose, and only its author knows.
        if shared := sum(_question(row, prompt) in trained for row in rows):
            case = (
                f"{shared} of {len(rows)} rows of eval.sets.{number} are training rows too: success on them is memory"
            )
            notices.note("held-out rows", case, place=where)


def _rows_of(config: RunConfig, held_out: HeldOut) -> str | None:
    """The file of a held-out set of rows."""
    if (held_out.id or config.env.id) not in dataset_env.IDS:
        return None
    return {**config.env.kwargs, **held_out.kwargs}.get("rows")


def _question(row: Mapping[str, Json], prompt: str) -> str:
    """Return the columns of a row that the prompt names, or the row if it names none, as text that can be compared."""
    columns = [name.split(".")[0].split("[")[0] for _, name, _, _ in string.Formatter().parse(prompt) if name]
    cells = [row.get(column) for column in columns] if columns else [dict(row)]
    return json.dumps(_without_nulls(cells), sort_keys=True)


def _without_nulls(value: Json) -> Json:
    """JSON without the nulls that Parquet pads messages with, so that rows of two files can be compared."""
    if isinstance(value, dict):
        items = cast("dict[str, Json]", value).items()
        return {name: _without_nulls(item) for name, item in items if item is not None}
    return [_without_nulls(item) for item in cast("list[Json]", value)] if isinstance(value, list) else value


def changed_rows(now: Mapping[str, str], store: RunStore) -> list[str]:
    """Return the names of the data sets in `now` that differ from when the run last began or went on. Stores `now`."""
    before = ROWS_DIGESTS.of(store.meta)
    if now != before:
        ROWS_DIGESTS.set(store, dict(now))
    return [name for name, value in now.items() if before.get(name, value) != value]


def _tables(config: RunConfig) -> list[TaskTable]:
    return config.tasks or [TaskTable()]


def _source(config: RunConfig, table: TaskTable) -> TaskSource:
    env = table.id or config.env.id
    same = env == config.env.id
    kwargs = {**(config.env.kwargs if same else {}), **table.kwargs}
    options = {**(config.env.options if same else {}), **table.options}
    epochs = 1 if config.curriculum else table.epochs  # a curriculum itself decides how often to play a task
    if table.rows is not None:
        rows = read_rows(table.rows)
        return Rows(env, rows, kwargs=kwargs, options=options, seed=config.seed, epochs=epochs)
    if table.seeds is not None:
        seeds = Seeds(env, kwargs=kwargs, options=options, first_seed=table.first_seed, size=table.seeds)
        return Epochs(seeds, seed=config.seed, epochs=epochs)
    return Seeds(env, kwargs=kwargs, options=options, first_seed=table.first_seed + config.seed * _APART)
