"""The mini repositories as data: sound, of the promised size, and written by the rules of their README."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

from each_case import each_case

from agentrl_environments.repo_repair.repository import FOLDER, REPOSITORIES, load, without_tests

NAMES = sorted(name for names in REPOSITORIES.values() for name in names)
FORBIDDEN = {"isinstance", "assertIsInstance", "assertNotIsInstance", "assertAlmostEqual", "assertCountEqual"}


def unittests(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", "-m", "unittest", "discover", "tests"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_every_folder_belongs_to_one_split() -> None:
    assert sorted(path.name for path in FOLDER.iterdir() if path.is_dir()) == NAMES
    assert len(NAMES) >= 10 and not set(REPOSITORIES["train"]) & set(REPOSITORIES["held_out"])


@each_case("name", NAMES)
def test_a_repository_is_sound(name: str, tmp_path: Path) -> None:
    """As a user would run it, outside of any judge."""
    shutil.copytree(FOLDER / name, tmp_path / name)
    done = unittests(tmp_path / name)
    repository = load(name)
    assert done.returncode == 0, done.stderr
    assert f"Ran {len(repository.test_ids)} tests" in done.stderr
    assert 3 <= len(repository.sources) <= 8 and 20 <= len(repository.test_ids) <= 60


@each_case("name", NAMES)
def test_its_tests_can_be_judged_from_another_box(name: str) -> None:
    for file, text in load(name).tests.items():
        for node in ast.walk(ast.parse(text)):
            used = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert used not in FORBIDDEN, (file, used)
            if isinstance(node, ast.Import):
                assert not {"mock", "unittest.mock"} & {alias.name for alias in node.names}


def test_sources_are_standard_library_only() -> None:
    for name in NAMES:
        for source in load(name).sources.values():
            for node in ast.walk(ast.parse(source)):
                named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                assert {top.split(".")[0] for top in named} <= {name, *sys.stdlib_module_names}


def test_tests_can_be_left_out(tmp_path: Path) -> None:
    """What is left runs, and lacks exactly what was left out: single tests, a whole class, a whole file."""
    repository = load("lru")
    hidden = {test for test in repository.test_ids if ".StatsTest." in test or ".MemoizeTest.test_k" in test}
    hidden.add("test_cache.LRUCacheTest.test_peek_does_not_count_as_use")
    kept = without_tests(repository.tests, hidden)
    assert "StatsTest" not in kept["test_cache.py"] and "test_peek" not in kept["test_cache.py"]
    assert "test_keys_tell_calls_apart" not in kept["test_ttl_and_memo.py"]
    shutil.copytree(FOLDER / "lru" / "lru", tmp_path / "lru")
    (tmp_path / "tests").mkdir()
    for file, text in kept.items():
        (tmp_path / "tests" / file).write_text(text)
    done = unittests(tmp_path)
    assert done.returncode == 0 and f"Ran {len(repository.test_ids) - len(hidden)} tests" in done.stderr
    whole_file = {test for test in repository.test_ids if test.startswith("test_cache.")}
    assert list(without_tests(repository.tests, whole_file)) == ["test_ttl_and_memo.py"]


TWO_CLASSES = """import unittest


class A(unittest.TestCase):
    def test_1(self):
        pass

    @unittest.skip("x")
    def test_2(self):
        pass

    def test_3(self):
        pass


class B(unittest.TestCase):
    def test_4(self):
        pass
"""


@each_case(
    ("gone", "left"),
    [
        ("1", '    @unittest.skip("x")\n    def test_2(self):\n        pass\n\n    def test_3(self):\n        pass\n'),
        ("12", "    def test_3(self):\n        pass\n"),
        ("23", "    def test_1(self):\n        pass\n"),
        ("2", "    def test_1(self):\n        pass\n\n    def test_3(self):\n        pass\n"),
    ],
)
def test_what_is_left_looks_as_if_it_had_been_written_so(gone: str, left: str) -> None:
    head, tail = (
        "import unittest\n\n\nclass A(unittest.TestCase):\n",
        "\n\n" + TWO_CLASSES[TWO_CLASSES.index("class B") :],
    )
    found = without_tests({"test_x.py": TWO_CLASSES}, {f"test_x.A.test_{number}" for number in gone})
    assert found["test_x.py"] == head + left + tail


def test_a_class_without_tests_goes() -> None:
    found = without_tests({"test_x.py": TWO_CLASSES}, {"test_x.B.test_4"})["test_x.py"]
    assert found == TWO_CLASSES[: TWO_CLASSES.index("\n\nclass B")]
