"""The ids by which a run file and its tables name a task.

In a module of its own, as commands that only read a run need them, and the sources of tasks load numpy.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final

from agentrl.records import Task

_ID: Final = 10  # characters of a task's id


def task_key(task: Task) -> str:
    """A key that is equal for equal tasks, wherever they stand in a source."""
    # Without the index: the same row of a data set comes back in each pass at another index, and its record has to be
    # found there. A hash of the standard library, since Python's own differs from process to process.
    task_text = json.dumps([task.env, task.seed, dict(task.kwargs), dict(task.options)], sort_keys=True)
    return hashlib.sha256(task_text.encode()).hexdigest()[:32]


def task_id(task: Task) -> str:
    """The name of a task in `rollout.skip_tasks`: its environment, arguments, options and seed."""
    return task_key(task)[:_ID]


def row_id(task: Task) -> str:
    """Return a task's id without the seed: a row of a data set is played under another seed in each epoch."""
    return task_key(Task(index=0, env=task.env, seed=0, kwargs=task.kwargs, options=task.options))[:_ID]
