"""Which parts of the store a room may hold, read from the source of every module; and the calls that are awaited."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentrl
from agentrl.rollout.memory_store import MemoryStore
from agentrl.store import RunStore, interfaces
from agentrl.store.journal_writer import JournalWriter

ROOT = Path(agentrl.__file__).parent
ROLES = [role for role in vars(interfaces).values() if inspect.isclass(role) and role.__module__ == interfaces.__name__]
MOST = 20
"""Public calls of a part: what a reader can hold in his head."""


def annotations(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


def holds_the_handle(module: Path) -> bool:
    trees = annotations(ast.parse(module.read_text()))
    return any(isinstance(node, ast.Name) and node.id == "RunStore" for tree in trees for node in ast.walk(tree))


@pytest.mark.medium
def test_what_plays_episodes_scores_them_or_learns_holds_no_handle_of_all_parts() -> None:
    """An episode that could take, or a scorer that could close groups, would be one mistake away from doing so."""
    rooms = ("env", "sandbox", "rewards", "engine", "learner", "algos", "rollout")
    modules = {
        str(path.relative_to(ROOT)) for room in rooms for path in (ROOT / room).rglob("*.py") if holds_the_handle(path)
    }
    assert modules == {"rollout/admitter.py"}, "it starts groups, and is told of every change"


def test_a_part_is_small_and_knows_no_other_handle(path: Path) -> None:
    with RunStore.create(path, "{}") as store:
        parts = {name: part for name, part in vars(store).items() if not name.startswith("_")}
    assert len(parts) > 10
    for name, part in parts.items():
        calls = [call for call in dir(part) if not call.startswith("_")]
        assert 0 < len(calls) <= MOST, (name, calls)
        assert not any(isinstance(value, RunStore) for value in vars(part).values()), name


def calls_of(role: type) -> dict[str, inspect.Signature]:
    """The calls of a role and of those that it is made of."""
    kinds = [kind for kind in role.__mro__ if kind.__module__ == interfaces.__name__]
    return {
        name: inspect.signature(call)
        for kind in kinds
        for name, call in vars(kind).items()
        if inspect.isfunction(call) and not name.startswith("_")
    }


def test_no_call_of_a_role_takes_a_function_and_no_role_knows_of_a_database() -> None:
    assert len(ROLES) == 4
    for role in ROLES:
        words = {word for signature in calls_of(role).values() for word in re.findall(r"\w+", str(signature))}
        assert not words & {"Callable", "Database", "sqlite3", "Cursor", "Row"}, role


def test_the_journal_in_memory_takes_what_the_store_takes() -> None:
    """That a `JournalWriter` does is seen by the type checker, which reads its calls from the parts of the store."""
    expected = {name: list(call.parameters.values()) for name, call in calls_of(interfaces.EpisodeStore).items()}
    assert {
        name: list(inspect.signature(getattr(MemoryStore, name)).parameters.values()) for name in expected
    } == expected
    for role in (interfaces.RolloutStore, interfaces.RewardStore):
        for name in calls_of(role):
            assert name == "post_partial" or inspect.iscoroutinefunction(getattr(JournalWriter, name)), name
