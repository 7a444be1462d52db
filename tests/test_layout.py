"""The rooms of the house: how many files one holds, what lies loose, and that a name means one thing."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "agentrl"
MOST_FILES = 20  # of one folder, `__init__.py` among them
MOST_OF_A_SETTING = 10  # files from the run file to its uses
LOOSE = {"__init__.py", "errors.py", "protocols.py", "records.py", "registration.py", "registry.py"}
ONE_IDEA = {
    "backend.py": "the backend of a kind of box",
    "buffer.py": "the buffer: what a store does for it, and its public face",
    "chaos.py": "faults on purpose: the command, the run, the kit",
    "learner.py": "the learner, and its public face",
    "demonstrations.py": "demonstrations: the run that trains on them, and those of an environment",
    "environment.py": "the environment of a package of environments",
    "judge.py": "judges: a model that scores, and the box that holds the tests",
    "league.py": "a league's settings, and its work in a run",
    "lora.py": "adapters as an engine and as the learner compute them",
    "plan.py": "the command `plan`, and its computation",
    "rewards.py": "rewards: the command, and those that environments share",
    "server.py": "an engine's HTTP server: the embedded one's, vLLM's",
    "sft.py": "supervised training: the command, its loss, its run",
    "shared_engines.py": "engines that runs share: settings, command, service",
    "tasks.py": "where tasks come from: any source, and those of an environment",
    "texts.py": "the texts that an environment shows to the policy",
}
"""File names that stand in more than one room, each for one idea."""
ONE_CLASS = {
    "Calculator": "the environment, and the tool of its name; entry points and users name both",
    "EngineFleet": "the block, and the same for programs without a loop (`agentrl.blocks.sync`)",
    "Learner": "what trains a policy, and its public face",
    "Rollouts": "the block, and the same for programs without a loop (`agentrl.blocks.sync`)",
}
"""Public class names that stand in more than one module, each for one idea."""
DATA = {"repositories", "harbor_tasks"}  # code of made-up projects, which agents change


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "env" or "scaffold" not in path.parts)


def shipped() -> list[Path]:
    """The modules of the wheel, but for projects that are the data of environments."""
    beside = [path for top in ("environments", "tools") for path in sorted((ROOT / top).rglob("*.py"))]
    return modules() + [path for path in beside if not DATA & {*path.parts}]


def test_no_folder_holds_more_than_a_reader_takes_in_at_a_look() -> None:
    count: defaultdict[Path, int] = defaultdict(int)
    for path in modules():
        count[path.parent] += 1
    assert {str(folder.relative_to(ROOT)): n for folder, n in count.items() if n > MOST_FILES} == {}


def test_nothing_lies_loose() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == LOOSE


def test_a_file_name_stands_for_one_idea() -> None:
    rooms: defaultdict[str, list[str]] = defaultdict(list)
    for path in shipped():
        if path.name not in ("__init__.py", "__main__.py"):
            rooms[path.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in rooms.items() if len(found) > 1 and name not in ONE_IDEA} == {}
    assert [name for name in ONE_IDEA if len(rooms[name]) < 2] == []


def test_a_public_class_name_stands_for_one_idea() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in shipped():
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.M):
            places[name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in ONE_CLASS} == {}
    assert [name for name in ONE_CLASS if len(places[name]) < 2] == []


def test_every_room_says_what_it_is() -> None:
    rooms = [path for path in modules() if path.name == "__init__.py"]
    assert [str(room.relative_to(ROOT)) for room in rooms if not ast.get_docstring(ast.parse(room.read_text()))] == []


def test_a_room_names_only_files_that_it_has() -> None:
    gone = [
        f"{room.parent.relative_to(ROOT)} names {name}"
        for room in PACKAGE.rglob("__init__.py")
        for name in re.findall(r"[a-z_]+\.py\b", ast.get_docstring(ast.parse(room.read_text())) or "")
        if not any(room.parent.rglob(name))
    ]
    assert not gone, "\n".join(gone)


def test_the_table_of_the_store_names_each_of_its_folders_and_files() -> None:
    table = re.findall(
        r"^    (\w+)  ", ast.get_docstring(ast.parse((PACKAGE / "store/__init__.py").read_text())) or "", re.M
    )
    files = [path.relative_to(PACKAGE / "store") for path in (PACKAGE / "store").rglob("*.py")]
    inside = {Path(file.parts[0]).stem for file in files if file.name != "__init__.py" or len(file.parts) > 1}
    assert sorted(table) == sorted(inside)


BESIDE_A_RUN = (
    "blocks",
    "planning",
    "testing",
    "cli",
    "offline",
    "view",
    "sandbox",
    "engine/embedded",
    "engine/vllm/plugin",
    "rollout/text_policy.py",
    "run/health",
    "run/training_server",
)
"""Rooms that no token and no setting passes on its way through a run: loops of one's own, also those of the clients of
a training server, forecasts, tests, the inside of an engine, policies that write texts, advice on what stands in a
store."""


def names_in(path: Path) -> set[str]:
    """The names that a module's code uses: variables, attributes and arguments; not its comments and texts."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case _:
                pass
    return found


def passes(*names: str) -> list[str]:
    """The files of a run whose code handles one of these names."""
    inside = [(path.relative_to(PACKAGE).as_posix(), path) for path in modules()]
    return [place for place, path in inside if not place.startswith(BESIDE_A_RUN) and names_in(path) & {*names}]


def test_a_sampled_token_passes_few_files() -> None:
    assert len(passes("token_ids", "logprobs")) <= 31


def test_a_setting_passes_few_files_from_the_run_file_to_its_uses() -> None:
    for setting in ("max_lag", "group_size", "groups_per_step"):
        assert len(passes(setting)) <= MOST_OF_A_SETTING, setting


def test_no_file_holds_the_marks_of_a_conflict() -> None:
    """`.ci/run` and the documents are read by no checker of code."""
    marks = ["git", "grep", "-nE", "^(<{7}|>{7}) ", "--", "."]
    found = subprocess.run(marks, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout) == (1, ""), found.stderr  # 1: nothing is there
    subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, timeout=60, check=True)
