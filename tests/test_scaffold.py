"""`agentrl new env`: what it makes passes its own tests, and once installed is an environment like ours."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from each_case import each_case

from agentrl.config import load
from agentrl.errors import UsageError
from agentrl.scaffold import new_env

DEADLINE_S = 240


def run(folder: Path, *argv: object, path: Path | None = None) -> str:
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, as the command makes it."""
    folder = tmp_path_factory.mktemp("new")
    said = run(folder, "-c", "from agentrl.cli.main import main; main()", "new", "env", "my_env")
    assert said.splitlines()[-1].startswith("my_env/MyEnv-v0 is ready: cd my_env")
    return folder / "my_env"


@pytest.mark.medium
def test_its_own_tests_pass_as_they_are(package: Path) -> None:
    said = run(package, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert "14 passed" in said


@pytest.mark.medium
def test_installed_it_is_found_by_its_id(package: Path, tmp_path: Path) -> None:
    """The wheel that its pyproject builds, unpacked as an installer would."""
    run(package, "-c", f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})")
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = """
import agentrl, gymnasium
env = gymnasium.make("my_env/MyEnv-v0", words=3, tools=["calculator"], disable_env_checker=True)
messages, _ = env.reset(seed=0)
print(len(messages[-1]["content"].split("?")[1].split()), "words")
print([schema["function"]["name"] for schema in env.unwrapped.tool_schemas()])
print(agentrl.check_env("my_env/MyEnv-v0"))
"""
    said = run(tmp_path, "-c", code, path=site)
    assert "3 words" in said
    assert "['submit', 'count', 'calculator']" in said
    assert "my_env/MyEnv-v0: 12 checks, 0 findings" in said


def test_its_run_file_and_metadata_are_sound(package: Path) -> None:
    assert load(package / "run.toml").env.id == "my_env/MyEnv-v0"
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["agentrl.environments"] == {"my_env/MyEnv-v0": "my_env:MyEnv"}


def test_another_name_everywhere(tmp_path: Path) -> None:
    id, written = new_env("two_words2", tmp_path / "there")
    assert id == "two_words2/TwoWords2-v0"
    assert sorted(str(path.relative_to(tmp_path / "there")) for path in written) == [
        "README.md",
        "pyproject.toml",
        "run.toml",
        "tests/test_two_words2.py",
        "two_words2/__init__.py",
        "two_words2/environment.py",
        "two_words2/tools.py",
    ]
    assert not [path for path in written if "$" in path.read_text()]


@each_case("name", ["", "My_env", "my-env", "2envs", "class", "a/b", "..", "agentrl", "tests", "json"])
def test_names_that_cannot_be_imported_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is no name for a package"):
        new_env(name, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UsageError, match="is not empty: give another --out"):
        new_env("my_env", tmp_path)
    with pytest.raises(UsageError, match="is no folder: give another --out"):
        new_env("my_env", tmp_path / "README.md")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
