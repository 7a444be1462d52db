"""Every key of the table `meta` has its type in one place, and its rows hold what the programs agree on."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.store import RunStore, run_values
from agentrl.store.run_values import Value

ROOT = Path(agentrl.__file__).parent
VALUES: dict[str, Value[Any]] = {name: one for name, one in vars(run_values).items() if isinstance(one, Value)}
AS_WRITTEN: list[tuple[Value[Any], str, object]] = [  # a value, the text of its row, and what it means
    (run_values.PHASE, "train", "train"),
    (run_values.ENGINE_URLS, '["http://127.0.0.1:1/"]', ["http://127.0.0.1:1/"]),
    (run_values.ROLE_URLS, "{}", {}),
    (run_values.WORKERS, "[0]", [0]),
    (run_values.CREATED_S, "1795625381.9956336", 1795625381.9956336),
    (run_values.TRAIN_ENDED_S, "", None),
    (run_values.MAX_LAG, "1", 1),
    (run_values.MODEL_PARAMS, "858112", 858112),
    (run_values.LEARNER_STARTED, '{"ranks": 1, "step": 0, "start_s": 2.5}', {"ranks": 1, "step": 0, "start_s": 2.5}),
    (run_values.ATTEMPT, "3", 3),
    (run_values.LEARNER_WAITS, "", None),
]


def test_each_key_is_listed_once() -> None:
    keys = [one.key for one in VALUES.values()]
    assert len(keys) == len(set(keys))


def test_a_value_is_read_as_it_was_written() -> None:
    for value, text, means in AS_WRITTEN:
        assert value.of({value.key: text}.get) == means and value.text(means) == text
        assert value.of(lambda _: None) == value.unset


def test_an_unset_value_is_nobodys_to_change() -> None:
    run_values.REQUESTED_SIZE.of(lambda _: None)["engines"] = 3
    assert run_values.REQUESTED_SIZE.of(lambda _: None) == {}


def test_a_value_is_the_same_within_a_transaction(store: RunStore) -> None:
    run_values.WORKERS.set(store, [2, 5])
    db = store._db  # pyright: ignore[reportPrivateUsage]
    with db.read():
        assert run_values.WORKERS.within(db) == [2, 5] and run_values.SCALING.within(db) == {}
        assert run_values.NEXT_TASK.within(db) == 0 and run_values.ATTEMPT.within(db) == 1


@pytest.mark.medium
def test_no_module_names_a_key_by_itself() -> None:
    """Calls of `meta` and `set_meta`, and SQL on the table. The audit reads raw rows on purpose."""
    raw = {"store/run_values.py", "store/schema.py", "store/audit.py"}
    found: list[str] = []
    for path in ROOT.rglob("*.py"):
        name = str(path.relative_to(ROOT))
        if name in raw:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if called in ("meta", "set_meta") and isinstance(node, ast.Call) and node.args:
                found += [f"{name}: {one.value}" for one in node.args[:1] if isinstance(one, ast.Constant)]
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += [f"{name}: {one}" for one in re.findall(r"FROM meta WHERE key = '\w+'", node.value)]
    assert found == []
