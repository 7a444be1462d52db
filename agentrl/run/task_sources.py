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
    task_tables = _tables(config)
    table_sources = [_source(config, task_table) for task_table in task_tables]
    task_stream = (
        table_sources[0]
        if len(table_sources) == 1
        else Mixture(table_sources, [task_table.weight for task_table in task_tables])
    )
    if config.curriculum is None:
        return task_stream
    return Curriculum(task_stream, **config.curriculum.model_dump())


def first_tasks(config: RunConfig) -> list[Task]:
    """The first task of each table. Raises UsageError for rows that cannot be read."""
    return [table_tasks[0] for table_tasks in source_tasks(config, 1)]


def source_tasks(config: RunConfig, count: int) -> list[list[Task]]:
    """The first tasks of each table, at most `count`. Raises UsageError for rows that cannot be read."""
    table_sources = [_source(config, task_table) for task_table in _tables(config)]
    return [
        [
            table_source.task(task_index)
            for task_index in range(min(count, count if table_source.size is None else table_source.size))
        ]
        for table_source in table_sources
    ]


def data_sets_of(config: RunConfig) -> dict[str, str]:
    """The data sets of the run file, by field and name."""
    rows_by_field = {
        f"tasks.{table_index}.rows": task_table.rows for table_index, task_table in enumerate(config.tasks)
    }
    rows_by_field |= {
        f"eval.sets.{table_index}.kwargs.rows": _rows_of(config, eval_set)
        for table_index, eval_set in enumerate(config.eval.sets)
    }
    return {
        f"{field_name} = {rows_place!r}": rows_place
        for field_name, rows_place in rows_by_field.items()
        if rows_place is not None
    }


def digests_of(config: RunConfig) -> dict[str, str]:
    """A digest of each of `data_sets_of`. Raises UsageError for one that cannot be read."""
    return {set_name: digest(rows_place) for set_name, rows_place in data_sets_of(config).items()}


def with_held_out_sizes(config: RunConfig) -> RunConfig:
    """The configuration in which a held-out set of a file has as many tasks as the file has rows, unless `n` is set.
    A set of seeds has no end and takes `n`; a file has one, and 256 tasks of 12 rows would ask each 21 or 22 times."""
    sized_sets: list[HeldOut] = []
    for set_index, held_out in enumerate(config.eval.sets):
        rows_place = _rows_of(config, held_out)
        if rows_place is not None:
            row_count = len(read_rows(rows_place))
            if not row_count:
                raise UsageError(
                    f"{rows_place} has no rows: eval.sets.{set_index} would measure nothing; leave the set out"
                )
            if "n" not in held_out.model_fields_set:
                held_out = held_out.model_copy(update={"n": row_count})
            elif held_out.n > row_count:
                case_text = f"eval.sets.{set_index}.n = {held_out.n} asks {row_count} rows more than once each"
                notices.note("held-out rows", f"{case_text}: leave n out", place=rows_place)
        sized_sets.append(held_out)
    return config.model_copy(update={"eval": config.eval.model_copy(update={"sets": sized_sets})})


def held_out_rows(config: RunConfig) -> int | None:
    """How many rows the environment of a configuration asks by seed; None for one of another kind."""
    rows_place = config.env.kwargs.get("rows") if config.env.id in dataset_env.IDS else None
    return None if rows_place is None else len(read_rows(rows_place)) or None


def name_shared_rows(config: RunConfig) -> None:
    """Name held-out rows that are training rows too: what is measured on them is memory. Two rows are the same if the
    columns that the prompt names are."""
    prompt_template = str(config.env.kwargs.get("prompt", "{prompt}"))
    trained_questions = {
        _question(data_row, prompt_template)
        for task_table in config.tasks
        if task_table.rows
        for data_row in read_rows(task_table.rows)
    }
    for set_index, held_out in enumerate(config.eval.sets):
        rows_place = _rows_of(config, held_out)
        if rows_place is None or not trained_questions:
            continue
        set_rows = read_rows(rows_place)
        # Named and not refused: a set may hold a few rows on purpose, and only its author knows.
        if shared_count := sum(_question(data_row, prompt_template) in trained_questions for data_row in set_rows):
            shared_text = f"{shared_count} of {len(set_rows)} rows of eval.sets.{set_index} are training rows too"
            notices.note("held-out rows", f"{shared_text}: success on them is memory", place=rows_place)


def _rows_of(config: RunConfig, held_out: HeldOut) -> str | None:
    """The file of a held-out set of rows."""
    if (held_out.id or config.env.id) not in dataset_env.IDS:
        return None
    return {**config.env.kwargs, **held_out.kwargs}.get("rows")


def _question(row: Mapping[str, Json], prompt: str) -> str:
    """Return the columns of a row that the prompt names, or the row if it names none, as text that can be compared."""
    column_names = [
        field_name.split(".")[0].split("[")[0] for _, field_name, _, _ in string.Formatter().parse(prompt) if field_name
    ]
    cell_values = [row.get(column_name) for column_name in column_names] if column_names else [dict(row)]
    return json.dumps(_without_nulls(cell_values), sort_keys=True)


def _without_nulls(value: Json) -> Json:
    """JSON without the nulls that Parquet pads messages with, so that rows of two files can be compared."""
    if isinstance(value, dict):
        dict_items = cast("dict[str, Json]", value).items()
        return {item_key: _without_nulls(item_value) for item_key, item_value in dict_items if item_value is not None}
    return (
        [_without_nulls(item_value) for item_value in cast("list[Json]", value)] if isinstance(value, list) else value
    )


def changed_rows(now: Mapping[str, str], store: RunStore) -> list[str]:
    """Return the names of the data sets in `now` that differ from when the run last began or went on. Stores `now`."""
    earlier_digests = ROWS_DIGESTS.of(store.meta)
    if now != earlier_digests:
        ROWS_DIGESTS.set(store, dict(now))
    return [set_name for set_name, row_digest in now.items() if earlier_digests.get(set_name, row_digest) != row_digest]


def _tables(config: RunConfig) -> list[TaskTable]:
    return config.tasks or [TaskTable()]


def _source(config: RunConfig, table: TaskTable) -> TaskSource:
    env_id = table.id or config.env.id
    is_same_env = env_id == config.env.id
    env_kwargs = {**(config.env.kwargs if is_same_env else {}), **table.kwargs}
    env_options = {**(config.env.options if is_same_env else {}), **table.options}
    epoch_count = 1 if config.curriculum else table.epochs  # a curriculum itself decides how often to play a task
    if table.rows is not None:
        data_rows = read_rows(table.rows)
        return Rows(env_id, data_rows, kwargs=env_kwargs, options=env_options, seed=config.seed, epochs=epoch_count)
    if table.seeds is not None:
        seed_source = Seeds(
            env_id, kwargs=env_kwargs, options=env_options, first_seed=table.first_seed, size=table.seeds
        )
        return Epochs(seed_source, seed=config.seed, epochs=epoch_count)
    return Seeds(env_id, kwargs=env_kwargs, options=env_options, first_seed=table.first_seed + config.seed * _APART)
