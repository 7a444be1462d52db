"""Each process of a run holds its store by its role, and no wider: read from the source of every module."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentrl
from agentrl.rollout.memory_store import MemoryStore
from agentrl.store import interfaces
from agentrl.store.asynchronous import AsyncStore

ROOT = Path(agentrl.__file__).parent

MAY_HOLD = {
    "rollout/worker.py": {"RolloutStore"},
    "rollout/episode.py": {"EpisodeStore"},
    "rollout/generate_turn.py": {"Posted"},
    "rollout/admitter.py": {"AdmissionStore"},
    "rewards/scorer.py": {"RewardStore"},
    "run/processes/learner_process.py": {"LearnerStore"},
    "run/supervisor.py": {"ControlStore", "ReadStore"},
    "run/processes/processes.py": {"ControlStore", "ReadStore"},
    "run/processes/engine_health.py": {"Versions"},
    "run/reporting/report.py": {"ReadStore"},
    "run/telemetry.py": {"Recorder"},
}


def named(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "agentrl.store.interfaces":
            yield from (alias.name for alias in node.names)


def annotations(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


@pytest.mark.parametrize(("module", "held"), MAY_HOLD.items())
def test_a_process_holds_the_store_by_its_role(module: str, held: set[str]) -> None:
    assert set(named(ast.parse((ROOT / module).read_text()))) == held


# commands of their own, beside no role
OPENS = {"run/reward_services.py", "run/run_folder.py", "offline/episode_export.py"}


def test_no_module_outside_the_store_types_a_handle_of_all_roles() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if not path.is_relative_to(ROOT / "store")
        for annotation in annotations(ast.parse(path.read_text()))
        if any(isinstance(node, ast.Name) and node.id == "RunStore" for node in ast.walk(annotation))
    }
    assert found <= OPENS


ROLES = [role for role in vars(interfaces).values() if inspect.isclass(role) and role.__module__ == interfaces.__name__]


def calls_of(role: type) -> dict[str, inspect.Signature]:
    """The calls of a role and of those that it is made of."""
    kinds = [kind for kind in role.__mro__ if kind.__module__ == interfaces.__name__]
    return {
        name: inspect.signature(call)
        for kind in kinds
        for name, call in vars(kind).items()
        if inspect.isfunction(call) and not name.startswith("_")
    }


@pytest.mark.parametrize("role", ROLES)
def test_no_call_of_a_role_takes_a_function_and_no_role_knows_of_a_database(role: type) -> None:
    words = {word for signature in calls_of(role).values() for word in re.findall(r"\w+", str(signature))}
    assert not words & {"Callable", "Database", "sqlite3", "Cursor", "Row"}


@pytest.mark.parametrize(
    ("store", "role"),
    [
        (AsyncStore, interfaces.RolloutStore),
        (AsyncStore, interfaces.RewardStore),
        (MemoryStore, interfaces.EpisodeStore),
    ],
)
def test_a_stores_other_faces_take_what_the_store_takes(store: type, role: type) -> None:
    """A type checker reads a role's calls where they are used, and not whether a class has them."""
    theirs = {name: inspect.signature(getattr(store, name)) for name in calls_of(role)}
    assert {name: list(own.parameters.values()) for name, own in theirs.items()} == {
        name: list(own.parameters.values()) for name, own in calls_of(role).items()
    }
    assert all(inspect.iscoroutinefunction(getattr(store, name)) for name in theirs if name != "post_partial")
