"""Who may import whom, read from the source of every module; and the sizes that ask to be divided.

Every import statement counts, also one inside a function: an import that is put off is still a dependency. Imports
under `if TYPE_CHECKING:` count between our own rooms (a type is knowledge too), but not for other people's packages,
which they do not load.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from each_case import each_case

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = {"agentrl": ROOT, "agentrl_environments": ROOT / "environments", "agentrl_tools": ROOT / "tools"}


@dataclass(frozen=True)
class Import:
    """Module `importer` names module `target`; `types_only` if it stands under `if TYPE_CHECKING:`, `deferred` if
    inside a function."""

    importer: str
    target: str
    types_only: bool
    deferred: bool


@dataclass(frozen=True)
class Rule:
    """Modules below `who` (save those below `unless`) never import anything below `never` (save below `may`)."""

    text: str
    who: tuple[str, ...]
    never: tuple[str, ...]
    unless: tuple[str, ...] = ()
    may: tuple[str, ...] = ()


OURS = tuple(SOURCE_ROOTS)
LEARNING = ("agentrl.rollout", "agentrl.store", "agentrl.learner", "agentrl.run")
CLIENT_SIDE = ("agentrl.rollout", "agentrl.store", "agentrl.env", "agentrl.engine", "agentrl.planning.simulate")
SERVER_SIDE = ("agentrl.engine.embedded", "agentrl.engine.vllm.plugin")  # what runs inside an engine's process
RULES = (
    Rule("records is standard library only", ("agentrl.records", "agentrl.errors"), OURS, may=("agentrl.errors",)),
    Rule("algos imports nothing of agentrl", ("agentrl.algos",), OURS, may=("agentrl.algos",)),
    Rule(
        "statistics knows no other room and no torch",
        ("agentrl.statistics",),
        (*OURS, "torch"),
        may=("agentrl.statistics", "agentrl.errors", "agentrl.host.installation"),
    ),
    Rule(
        "only local_model of the canary's room imports torch",
        ("agentrl.canary",),
        ("torch", "transformers", "safetensors.torch"),
        unless=("agentrl.canary.local_model",),
    ),
    Rule(
        "of the conformance room only adapters import trainers, and only agentrl's imports other rooms of agentrl",
        ("agentrl.conformance",),
        (*OURS, "torch", "trl", "verifiers"),
        unless=(
            "agentrl.conformance.adapters.agentrl_trainer",
            "agentrl.conformance.adapters.trl_trainer",
            "agentrl.conformance.adapters.verifiers_*",
        ),
        may=("agentrl.conformance", "agentrl.errors"),
    ),
    Rule(
        "rollout, store, env, simulate and the client side of engine never import torch or ray",
        CLIENT_SIDE,
        ("torch", "safetensors.torch", "ray"),
        unless=SERVER_SIDE,
    ),
    Rule(
        "learner never imports env, sandbox, trio or httpx",
        ("agentrl.learner",),
        ("agentrl.env", "agentrl.sandbox", "trio", "httpx"),
    ),
    Rule(
        "environments and tools never import rollout, store, learner or run",
        ("agentrl_environments", "agentrl_tools", "agentrl.env", "agentrl.sandbox"),
        LEARNING,
    ),
    Rule("blocks never imports run", ("agentrl.blocks",), ("agentrl.run",)),
    Rule("only run/cluster imports ray", OURS, ("ray",), unless=("agentrl.run.cluster",)),
    Rule(
        "only store/databases/postgres imports psycopg",
        OURS,
        ("psycopg",),
        unless=("agentrl.store.databases.postgres", "agentrl.store.databases.open_store"),
    ),
    Rule("only sandbox/docker imports docker", OURS, ("docker",), unless=("agentrl.sandbox.docker",)),
    Rule(
        "only sandbox/remote/swe_rex.py imports swerex", OURS, ("swerex",), unless=("agentrl.sandbox.remote.swe_rex",)
    ),
    Rule(
        "only sandbox/remote/inspect_sandboxes.py imports inspect_ai",
        OURS,
        ("inspect_ai",),
        unless=("agentrl.sandbox.remote.inspect_sandboxes",),
    ),
    Rule(
        "only view/ and the embedded engine import web servers",
        OURS,
        ("starlette", "uvicorn"),
        unless=("agentrl.view", "agentrl.engine.embedded"),
    ),
    Rule(
        "only the command line imports the recorder",
        OURS,
        ("agentrl.run.recording",),
        unless=("agentrl.run.recording", "agentrl.cli"),
    ),
    Rule(
        "the recorder imports no learner and no process of a run",
        ("agentrl.run.recording",),
        ("agentrl.learner", "agentrl.run.processes", "agentrl.run.children", "agentrl.run.trainer", "torch", "ray"),
    ),
    Rule("only the command line imports the page", OURS, ("agentrl.view",), unless=("agentrl.view", "agentrl.cli")),
    Rule("nothing imports the command line", OURS, ("agentrl.cli",), unless=("agentrl.cli", "agentrl.__main__")),
)


def below(module: str, prefixes: Iterable[str]) -> bool:
    """Whether `module` is one of `prefixes` or inside one; a trailing `*` matches the rest of a name."""
    return any(
        module.startswith(prefix[:-1]) if prefix.endswith("*") else module == prefix or module.startswith(prefix + ".")
        for prefix in prefixes
    )


def imports_of(module: str, source: str, modules: frozenset[str], *, is_package: bool) -> Iterator[Import]:
    """Every import of one module. `from a import b` names `a.b` where that is one of `modules`, else `a`."""

    def names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        base = node.module or ""
        if node.level:
            here = module.split(".")
            parents = here[: len(here) - node.level + is_package]
            base = ".".join([*parents, base] if base else parents)
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            yield inner if inner in modules else base

    def walk(node: ast.AST, types_only: bool, deferred: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in names(node):
                yield Import(module, target, types_only, deferred)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                yield from walk(child, True, deferred)
            for child in node.orelse:
                yield from walk(child, types_only, deferred)
        else:
            deferred = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from walk(child, types_only, deferred)

    yield from walk(ast.parse(source), False, False)


def graph(sources: Mapping[str, str], packages: frozenset[str] = frozenset()) -> list[Import]:
    """All imports of all modules; `packages` are those whose source is an `__init__.py`."""
    modules = frozenset(sources)
    return [
        found
        for module, source in sources.items()
        for found in imports_of(module, source, modules, is_package=module in packages)
    ]


def violations(rule: Rule, imports: Iterable[Import]) -> list[str]:
    return sorted(
        {
            f"{found.importer} imports {found.target}"
            for found in imports
            if below(found.importer, rule.who)
            and not below(found.importer, rule.unless)
            and below(found.target, rule.never)
            and not below(found.target, rule.may)
            and not (found.types_only and not below(found.target, OURS))
        }
    )


def room(module: str) -> str:
    """`agentrl.env.core` lives in `agentrl.env`, `agentrl_tools.shell` in `agentrl_tools`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "agentrl" else parts[0]


def circle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """One import circle, first and last name equal; empty if there is none."""
    sorter = graphlib.TopologicalSorter[str]()
    for importer, target in edges:
        if importer != target:
            sorter.add(importer, target)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def our_sources() -> tuple[dict[str, str], frozenset[str]]:
    sources: dict[str, str] = {}
    packages: set[str] = set()
    for package, root in SOURCE_ROOTS.items():
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if not all((root.joinpath(*parts[:depth]) / "__init__.py").is_file() for depth in range(1, len(parts))):
                continue  # package data, such as the sources that an environment hands to its agent
            if parts[-1] == "__init__":
                parts = parts[:-1]
                packages.add(".".join(parts))
            sources[".".join(parts)] = path.read_text()
    return sources, frozenset(packages)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return graph(*our_sources())


@pytest.mark.medium
def test_every_rule_holds(imports: list[Import]) -> None:
    assert {rule.text: broken for rule in RULES if (broken := violations(rule, imports))} == {}


def test_no_circle_between_files(imports: list[Import]) -> None:
    """Imports that wait for a call count, and so do those of types alone. Those of a package from its own files do not:
    `import agentrl` and vLLM's plugin make them wait."""
    ours = [found for found in imports if below(found.target, OURS)]
    edges = [(found.importer, found.target) for found in ours if not below(found.target, (found.importer,))]
    assert " -> ".join(circle(edges)) == ""


def test_no_circle_between_rooms(imports: list[Import]) -> None:
    ours = [found for found in imports if below(found.target, OURS) and found.importer != "agentrl"]
    assert " -> ".join(circle((room(found.importer), room(found.target)) for found in ours)) == ""


def client_side_modules() -> list[str]:
    return [
        module
        for module in our_sources()[0]
        if below(module, CLIENT_SIDE) and not below(module, SERVER_SIDE) and not module.endswith("__main__")
    ]


@pytest.mark.medium
@each_case(
    ("modules", "absent"),
    [
        (["agentrl"], "torch transformers ray"),
        (client_side_modules(), "torch ray docker"),
        (["agentrl.blocks.sync"], "torch transformers ray docker"),
        (["agentrl.sandbox", "agentrl.cli"], "torch transformers ray docker swerex inspect_ai"),
        (["agentrl_environments", "agentrl_tools"], "torch transformers ray docker"),
        (["agentrl.run.trainer", "agentrl.run.processes.worker_process"], "torch transformers ray docker matplotlib"),
        (["agentrl.run.comparison.compare", "agentrl.statistics.power"], "torch transformers ray docker scipy"),
        # What `agentrl status` imports, in the process of the command: nothing that plays or serves.
        (
            ["agentrl_command", "agentrl.cli.main", "agentrl.run.reporting.status"],
            "gymnasium numpy httpx jinja2 jsonschema",
        ),
    ],
)
def test_a_fresh_interpreter_stays_light(modules: list[str], absent: str) -> None:
    code = f"import sys, importlib; [importlib.import_module(m) for m in {modules}]\n"
    code += f"print([m for m in {absent.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "[]", done.stderr


# --- the reader itself, on sources that break the rules ---------------------------------------------------------


def test_the_reader_sees_imports_wherever_they_stand() -> None:
    source = """
import a.b as c
from . import sibling, CONSTANT
from .sibling import name
from ..env import core
if TYPE_CHECKING:
    import torch
else:
    import numpy
try:
    import fast
except ImportError:
    pass
def f():
    from agentrl.store import journal
class C:
    async def g(self):
        import ray
"""
    modules = {"agentrl.room.here": source, "agentrl.room.sibling": "", "agentrl.env.core": "", "agentrl.store": ""}
    found = {(one.target, one.types_only, one.deferred) for one in graph(modules)}
    assert found == {
        ("a.b", False, False),
        ("agentrl.room.sibling", False, False),
        ("agentrl.room", False, False),
        ("agentrl.env.core", False, False),
        ("torch", True, False),
        ("numpy", False, False),
        ("fast", False, False),
        ("agentrl.store", False, True),
        ("ray", False, True),
    }


@each_case(
    "module, source, broken",
    [
        ("agentrl.algos.losses", "from agentrl.records import Turn", "algos imports nothing of agentrl"),
        ("agentrl.statistics.paired", "from agentrl.run.comparison.results import Results", "statistics knows no"),
        ("agentrl.canary.verdict", "import torch", "only local_model of the canary's room"),
        ("agentrl.conformance.judges", "from agentrl.records import Turn", "of the conformance room only"),
        ("agentrl.store.episodes.journal", "def f():\n import torch.nn", "rollout, store, env"),
        ("agentrl.learner.learner", "if TYPE_CHECKING:\n from agentrl.env import Env", "learner never imports"),
        ("agentrl.learner.learner", "import httpx", "learner never imports"),
        ("agentrl.store.audit", "import psycopg", "only store/databases/postgres"),
        ("agentrl_tools.shell", "import agentrl.rollout.worker", "environments and tools"),
        ("agentrl.blocks.fleet", "from agentrl.run.serving.serve import key_of", "blocks never imports run"),
        ("agentrl.run.local", "import ray", "only run/cluster"),
        ("agentrl.sandbox.backend_pool", "from docker.errors import APIError", "only sandbox/docker imports"),
        ("agentrl.sandbox.remote.box", "import swerex", "only sandbox/remote/swe_rex.py"),
        ("agentrl.sandbox.remote.box", "from inspect_ai.util import sandbox", "only sandbox/remote/inspect"),
        ("agentrl.run.reporting.live_view", "from starlette.routing import Route", "only view/ and the embedded"),
        (
            "agentrl.run.trainer",
            "from agentrl.view.page_server import served",
            "only the command line imports the page",
        ),
        ("agentrl.learner.learner", "import agentrl.cli", "nothing imports the command line"),
        ("agentrl.records", "from agentrl.config import load", "records is standard library only"),
    ],
)
def test_each_rule_can_be_broken(module: str, source: str, broken: str) -> None:
    found = graph({module: source})
    assert next(rule.text for rule in RULES if violations(rule, found)).startswith(broken)
