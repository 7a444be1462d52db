"""SWE rows and Harbor folders as tasks: what is read, what is refused and how it says so, what is carried."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from each_case import each_case

import agentrl_environments.swe.environment as shipped
from agentrl import notices
from agentrl.env.datasets import read_rows
from agentrl.errors import ConfigError, SandboxUnavailable
from agentrl.protocols import ExecResult, SandboxSpec
from agentrl.testing.fake_sandbox import FakeBackend, FakeSandbox
from agentrl_environments.swe import SWE, Harbor, harbor, jsonl
from agentrl_environments.swe.dockerfile import recipe
from agentrl_environments.swe.harbor import moved
from agentrl_environments.swe.reward_files import rewards_of
from agentrl_environments.swe.submitted_files import is_artifact, is_source, matching, start_listing
from agentrl_environments.swe.trees import reversed_patch
from agentrl_tools.patching import apply_hunks, parse_patch

HERE = Path(shipped.__file__).parent
FIX = "--- a/m.py\n+++ b/m.py\n@@ -1,3 +1,3 @@\n a\n-b\n+c\n d\n"
TESTS = "--- /dev/null\n+++ b/tests/test_m.py\n@@ -0,0 +1 @@\n+x = 1\n"
ROW: dict[str, Any] = {
    "instance_id": "owner__name-1",
    "repo": "owner/name",
    "problem_statement": "It is broken.",
    "image_name": "swe:1",
    "patch": FIX,
    "test_patch": TESTS,
    "FAIL_TO_PASS": ["test_x (test_m.Case)"],
    "PASS_TO_PASS": '["test_m.Case.test_y"]',
}


SHARED = harbor.HarborDefaults(shared_verifier=True)


def of_row(**changed: Any) -> Any:
    return jsonl.task_of({**ROW, **changed}, jsonl.RowDefaults())


@contextmanager
def noted(match: str) -> Generator[None]:
    """The block makes one notice, whose line matches."""
    notices.OF_PROCESS.take_new()
    yield
    ((boundary, words, _, place),) = notices.OF_PROCESS.take_new()
    assert re.search(match, notices.line(boundary, words, 1, place))


def test_a_row_is_a_task() -> None:
    task = of_row()
    assert (task.id, task.image, task.tree.in_image) == ("owner__name-1", "swe:1", "/testbed")
    assert task.instruction.startswith("It is broken.\n") and "test_m" not in task.instruction
    assert task.grade.fails == ("test_m.Case.test_x",) and task.grade.passes == ("test_m.Case.test_y",)
    assert task.grade.command == "python3 -m pytest -rA -p no:cacheprovider tests/test_m.py"


@each_case(
    ("changed", "field", "hint"),
    [
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS", "at least one test"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS", "at least one test"),
        ({"FAIL_TO_PASS": None}, "FAIL_TO_PASS", "at least one test"),
        ({"PASS_TO_PASS": "test_y"}, "PASS_TO_PASS", "JSON"),
        ({"PASS_TO_PASS": [3]}, "PASS_TO_PASS", "a list of tests"),
        ({"patch": "nothing"}, "patch", "no hunk found"),
        ({"test_patch": "nothing"}, "test_patch", "no hunk found"),
        ({"problem_statement": None}, "problem_statement", "needs this text"),
        ({"image_name": None}, "image_name", "repositories="),
        ({"patch_is": "bug"}, "patch_is", "repositories="),
        ({"patch_is": "both"}, "patch_is", "choose fix"),
        ({"test_patch": 3}, "test_patch", "give a text"),
        ({"test_command": ["pytest"]}, "test_command", "give a text"),
        ({"image": 3}, "image", "give a text"),
        ({"sources": "src/*"}, "sources", "a list of patterns"),
        ({"sources": [3]}, "sources", "a list of patterns"),
        ({"apart": "no"}, "apart", "give true or false"),
    ],
)
def test_a_row_that_makes_no_task_is_refused(changed: dict[str, Any], field: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        of_row(**changed)
    assert raised.value.field.endswith(field) and hint in raised.value.hint


def test_a_broken_file_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n\n{broken\n")
    for data, bad in (
        (b"{broken", r"rows\.jsonl:3 = '\{broken': no JSON"),
        (json.dumps(ROW).encode(), r"rows\.jsonl:3 = 'owner__name-1': this id is that of rows\.jsonl:1"),
        (b"\xff", r"rows.jsonl:3 = b'\\xff': no UTF-8 at byte 0 of the line"),
        (b"3", "a row is a JSON object"),
        (
            json.dumps({**ROW, "instance_id": "x", "patch": "no"}).encode(),
            r"rows\.jsonl:3 \(x\)\.patch = 'no': no hunk",
        ),
    ):
        file.write_bytes(json.dumps(ROW).encode() + b"\n\n" + data)
        with noted("1 of 2 tasks cannot be played and are left out: rows.jsonl:3"):
            env = SWE(tasks=str(file))
        assert env.task_count == 1 and re.search(bad, env.bad_tasks[0].reason)
        file.write_bytes(data)
        if b"owner" not in data:
            with pytest.raises(ConfigError, match=r"none of its 1 tasks can be played: rows\.jsonl:1"):
                SWE(tasks=str(file))
    with pytest.raises(ConfigError, match="give a file of rows"):
        SWE(tasks=str(tmp_path / "nowhere"))


def test_a_text_may_hold_what_python_takes_for_the_end_of_a_line(tmp_path: Path) -> None:
    said = "one\u2028two\x85three"
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**ROW, "problem_statement": said}, ensure_ascii=False), "utf-8")
    (task,) = jsonl.load(str(file), jsonl.RowDefaults()).tasks
    assert task.instruction.startswith(said)
    assert read_rows(str(file)) == [{**ROW, "problem_statement": said}]


@each_case("repo", ["../secret", "/", "", ".", "a/../../secret"])
def test_a_row_reaches_no_folder_beside_the_repositories(tmp_path: Path, repo: str) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "repositories" / "a").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has no folder"):
        jsonl.task_of({**ROW, "repo": repo}, jsonl.RowDefaults(repositories=tmp_path / "repositories"))


def test_repositories_are_found_by_any_of_their_names(tmp_path: Path) -> None:
    for name in ("owner/name", "owner__name", "name"):
        (tmp_path / name).mkdir(parents=True)
        task = jsonl.task_of({**ROW, "patch_is": "bug"}, jsonl.RowDefaults(repositories=tmp_path))
        assert task.tree.folder == tmp_path / name and task.tree.patches == (FIX,)
        shutil.rmtree(tmp_path / name.split("/")[0])
    with pytest.raises(ConfigError, match="has no folder owner/name or owner__name or name"):
        jsonl.task_of(ROW, jsonl.RowDefaults(repositories=tmp_path))


def test_a_reversed_patch_takes_a_patch_back() -> None:
    before = "a\n-- b\nd\n"
    patch = "--- a/m\n+++ b/m\n@@ -1,3 +1,3 @@\n a\n--- b\n+C\n d\n"  # a line of the hunk starts as a header does
    (there,), (back,) = parse_patch(patch), parse_patch(reversed_patch(patch))
    after = apply_hunks(before, there.hunks, "m")
    assert after == "a\nC\nd\n" and apply_hunks(after, back.hunks, "m") == before
    (made,) = parse_patch(reversed_patch(TESTS))
    assert (made.old, made.new) == ("tests/test_m.py", None)


@each_case(
    ("path", "source"),
    [
        ("pkg/core.py", True),
        ("pkg/new/module.py", True),
        ("pkg/queue.py", True),
        ("README.md", True),
        ("old/unittest/x.py", True),
        ("tests/helper.py", False),
        ("pkg/tests/data.txt", False),
        ("pkg/test_core.py", False),
        ("pkg/core_test.py", False),
        ("conftest.py", False),
        ("pkg/conftest.py", False),
        ("pyproject.toml", False),
        ("setup.cfg", False),
        (".git/config", False),
        ("pkg/__pycache__/core.cpython-311.pyc", False),
        ("unittest.py", False),
        ("unittest/__init__.py", False),
        ("src/pytest.py", False),
        ("sitecustomize.py", False),
        ("x.pth", False),
    ],
)
def test_what_counts_as_a_source(path: str, source: bool) -> None:
    assert is_source(path, {"pkg/core.py"}) is source


def test_a_module_that_was_there_may_have_the_name_of_one_of_pythons() -> None:
    assert is_source("calendar/core.py", {"calendar/core.py"}) and not is_source("calendar/new.py", set())


def test_artifacts_and_patterns() -> None:
    assert is_artifact("out/answer.txt", set()) and is_artifact("tests/mine.py", set())
    for path in (".harbor/logs/verifier/reward.txt", "conftest.py", "json.py", "a/b.pyc"):
        assert not is_artifact(path, set())
    declared = matching(["pkg/*.py"], "sources")
    assert declared("pkg/a/b.py", set()) and not declared("setup.py", set())


# --- Harbor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of one task that needs no building."""
    shutil.copytree(HERE / "harbor_tasks" / "merge-logs", tmp_path / "merge-logs")
    return tmp_path


def test_a_dockerfile_that_only_copies_needs_no_builder(folder: Path) -> None:
    plan = recipe(folder / "merge-logs/environment/Dockerfile")
    assert (plan.base, plan.workdir) == ("python:3.11-slim", "/app")
    assert sorted(plan.files) == ["logs/db.log", "logs/mail.log", "logs/web.log"]
    (task,) = harbor.load(folder, SHARED).tasks
    assert (task.id, task.image) == ("merge-logs", "python:3.11-slim")
    (task,) = harbor.load(folder, harbor.HarborDefaults(image="mine:1")).tasks
    assert task.image == "mine:1"
    (task,) = harbor.load(folder, harbor.HarborDefaults(use_base=False)).tasks
    assert task.image is None


def test_copies_go_where_docker_puts_them(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("a.txt", "data/b.txt"):
        (tmp_path / name).write_text(name)
    file = tmp_path / "Dockerfile"
    file.write_text(
        "# what\nFROM x\nWORKDIR /w\nCOPY a.txt \\\n  /w/in/\nCOPY a.txt c.txt\nCOPY data /w/deep\nCMD true\n"
    )
    assert {path: source.name for path, source in recipe(file).files.items()} == {
        "in/a.txt": "a.txt",
        "c.txt": "a.txt",
        "deep/b.txt": "b.txt",
    }
    for line in ("COPY a.txt /etc/", "COPY ../x .", "COPY nothing .", "COPY --from=y a.txt .", "RUN make", "ADD u ."):
        file.write_text(f"FROM x\nWORKDIR /w\n{line}\n")
        with pytest.raises(ConfigError):
            recipe(file)


def test_a_relative_workdir_goes_on_from_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    file = tmp_path / "Dockerfile"
    file.write_text("FROM x\nWORKDIR /app\nWORKDIR src\nCOPY a.txt .\nCOPY a.txt deep/\n")
    plan = recipe(file)
    assert (plan.workdir, sorted(plan.files)) == ("/app/src", ["a.txt", "deep/a.txt"])
    file.write_text("FROM x\nWORKDIR /app\nCOPY a.txt .\nWORKDIR src\n")
    with pytest.raises(ConfigError, match=r"COPY a\.txt /app/\.': copies into /app/src only"):
        recipe(file)
    file.write_text("FROM x\nWORKDIR $HOME\n")
    with pytest.raises(ConfigError, match="a path without variables"):
        recipe(file)


def test_what_dockerignore_leaves_out_is_not_laid(tmp_path: Path) -> None:
    """The examples of Docker's documentation of build contexts, and an exception."""
    names = [
        "secret.txt",
        "README.md",
        "notes.md",
        "a/temp1",
        "a/b/temp1",
        "tempa",
        "temp",
        "deep/x/key.pem",
        "keys/one",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    file = tmp_path / "Dockerfile"
    file.write_text("FROM x\nWORKDIR /app\nCOPY . /app/\n")
    rules = "# comment\nsecret.txt\n*/temp*\n*/*/temp*\ntemp?\n**/*.pem\n/keys/\n*.md\n!README.md\nDockerfile\n"
    (tmp_path / ".dockerignore").write_text(rules)
    assert sorted(recipe(file).files) == [".dockerignore", "README.md", "temp"]
    file.write_text("FROM x\nWORKDIR /app\nCOPY secret.txt .\n")
    with pytest.raises(ConfigError, match=r"\.dockerignore leaves this file out"):
        recipe(file)


@pytest.mark.parametrize("place", ["environment/docker-compose.yaml", "tests/compose.yml"])
def test_a_task_of_several_services_is_refused_by_name(folder: Path, place: str) -> None:
    (folder / "merge-logs" / place).write_text("services: {main: {build: .}, db: {image: postgres}}")
    (bad,) = harbor.load(folder, SHARED).bad
    assert f"{place}': a task has one box, main" in bad.reason


@each_case(
    ("in_json", "in_text", "parts", "fault"),
    [
        (
            b'{"reward": 1, "why": "fine", "log": [1], "x": null}',
            None,
            {"reward": 1.0},
            "'why' of reward.json is 'fine'",
        ),
        (b'{"reward": null, "correct": 1}', None, {}, "a part that decides is no number"),
        (b'{"correct": 1, "style": null}', None, {}, "a part that decides is no number"),
        (b'{"correct": 1, "style": [1]}', None, {}, "'style' of reward.json is '[1]' and no finite number"),
        (b'"85%"', None, {"reward": 0.85}, "is the text '85%': it counts as 0.85"),
        (b'{"reward": "0.5"}', None, {"reward": 0.5}, "is the text '0.5': it counts as 0.5"),
        (None, b" 85 %\n", {"reward": 0.85}, "it counts as 0.85"),
        (None, b"0.5\n", {"reward": 0.5}, None),
        (None, b"passed\n", {}, "reward.txt is 'passed' and no finite number"),
        (b'{"reward": 1}', b"0\n", {"reward": 1.0}, "reward.json says 1 and reward.txt 0: reward.json counts"),
        (b'{"reward": 1}', b"1.0\n", {"reward": 1.0}, None),
        (b'{"reward": 1}', b"failed\n", {"reward": 1.0}, "reward.txt is 'failed' and no finite number"),
        (b'{"a": 0, "b": 0}', b"1\n", {"a": 0.0, "b": 0.0}, "reward.json says 0 and reward.txt 1: reward.json counts"),
        (b'{"a": 0, "b": 1}', b"0.5\n", {"a": 0.0, "b": 1.0}, None),
        (b'{"reward": 0, "reward": 1}', b"0\n", {"reward": 0.0}, "reward.json is not JSON (a key stands twice"),
        (b'{"reward": 0, "reward": 1}', None, {}, "the verifier left no reward file"),
        (None, b"\xef\xbb\xbf0.5", {"reward": 0.5}, None),
        (b"{broken", b"1\n", {"reward": 1.0}, "reward.json is not JSON"),
        (b"[1]", b"1\n", {}, "reward.json is '[1]' and no finite number"),
        (None, None, {}, "the verifier left no reward file"),
        (b"1" * 5_000, None, {}, "reward.json is not JSON"),
    ],
)
def test_reward_files_that_hold_more_or_other_than_a_number(
    in_json: bytes | None, in_text: bytes | None, parts: dict[str, float], fault: str | None
) -> None:
    rewards = rewards_of(in_json, in_text)
    assert rewards.parts == parts
    assert fault is None if not rewards.faults else fault is not None and any(fault in each for each in rewards.faults)


async def test_what_a_reward_file_means_is_named(folder: Path) -> None:
    """A reward of 85 within [0, 1] counts as 1: the info says so, and what to do."""
    (task,) = harbor.load(folder, SHARED).tasks

    def leave(argv: Sequence[str], files: dict[str, bytes]) -> ExecResult:
        files[".harbor/logs/verifier/reward.txt"] = b"85"
        return ExecResult(exit_code=0, stdout=b"", stderr=b"")

    grade = await task.grade(FakeSandbox(SandboxSpec(), leave), FakeBackend())
    said = "reward = 85 is outside of [0, 1]: it counts as 1 ([agentrl] reward_range)"
    assert grade.outcome == 1.0 and grade.info["reward_faults"] == [said]


async def test_a_verifier_that_cannot_start_is_no_zero(folder: Path) -> None:
    (folder / "merge-logs/tests/test.sh").write_text("#!/bin/bash\ntrue\n")
    (task,) = harbor.load(folder, SHARED).tasks

    def no_bash(argv: Sequence[str], files: dict[str, bytes]) -> ExecResult:
        return ExecResult(exit_code=127 if "bash" in argv else 0, stdout=b"", stderr=b"")

    with pytest.raises(SandboxUnavailable, match=r"the box of the verifier has no bash, and its test\.sh needs it"):
        await task.grade(FakeSandbox(SandboxSpec(), no_bash), FakeBackend())


async def test_files_of_an_image_that_cannot_be_listed_are_the_hosts_failure() -> None:
    """Without a listing no work would be handed in, and each episode would get 0."""

    def lacks(argv: Sequence[str], files: dict[str, bytes]) -> ExecResult:
        return ExecResult(exit_code=1, stdout=b"", stderr=b"sha256sum: unrecognized option: z")

    with pytest.raises(SandboxUnavailable, match=r"cannot be listed \(sha256sum: unrecognized option: z\)"):
        await start_listing(FakeSandbox(SandboxSpec(), lacks))


def test_a_solution_of_bash_runs_in_bash(folder: Path, tmp_path: Path) -> None:
    script = "#!/usr/bin/env bash\nset -euo pipefail\nparts=(one 'two')\necho \"${parts[1]} $WORD\" > answer\n"
    (folder / "merge-logs/solution/solve.sh").write_text(script)
    toml_of(folder, '[solution.env]\nWORD = "it\'s"\n')
    (task,) = harbor.load(folder, SHARED).tasks
    ended = subprocess.run(["sh", "-c", task.gold[0].argument], cwd=tmp_path, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "answer").read_text() == "two it's\n"


def test_a_dockerfile_that_needs_a_builder_needs_an_image(folder: Path) -> None:
    dockerfile = folder / "merge-logs/environment/Dockerfile"
    dockerfile.write_text("FROM python:3.11\nWORKDIR /srv\nRUN pip install numpy\n")
    toml = folder / "merge-logs/task.toml"
    toml.write_text(toml.read_text().replace("/app/", "/srv/"))
    with pytest.raises(ConfigError, match=r"RUN pip install numpy.*docker build -t NAME .*docker_image or images="):
        Harbor(tasks=str(folder))
    (task,) = harbor.load(folder, harbor.HarborDefaults(images={"merge-logs": "built:1"})).tasks
    assert (task.image, task.tree.in_image) == ("built:1", "/srv")
    with (folder / "merge-logs/task.toml").open("a") as file:
        file.write('docker_image = "named:1"\n')
    (task,) = harbor.load(folder, SHARED).tasks
    assert task.image == "named:1"


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "tests/test.sh", "environment/Dockerfile"])
def test_a_folder_that_lacks_a_file_says_which(folder: Path, name: str) -> None:
    (folder / "merge-logs" / name).unlink()
    with pytest.raises(ConfigError, match=name):
        Harbor(tasks=str(folder))


@pytest.mark.parametrize(
    ("settings", "limits", "tool_seconds"),
    [
        ("", {}, None),
        ("[environment]\ncpus = 2\nmemory_mb = 512", {"cpus": 2.0, "memory_bytes": 512 << 20}, None),
        ("[environment]\nmemory = '2G'\n[agent]\ntimeout_sec = 90.5", {"memory_bytes": 2 << 30}, 90.5),
    ],
)
def test_a_task_bounds_its_boxes_and_its_agent(
    folder: Path, settings: str, limits: dict[str, float], tool_seconds: float | None
) -> None:
    (folder / "merge-logs/task.toml").write_text(settings)
    (task,) = harbor.load(folder, SHARED).tasks
    assert (task.limits, task.tool_seconds) == (limits, tool_seconds)


@pytest.mark.parametrize(
    "line", ["[environment]\ncpus = 0", "[agent]\ntimeout_sec = '5m'", "[environment]\nmemory_mb = nan"]
)
def test_a_bound_that_is_none_is_refused(folder: Path, line: str) -> None:
    (folder / "merge-logs/task.toml").write_text(line)
    (bad,) = harbor.load(folder, harbor.HarborDefaults()).bad
    assert bad.task == "merge-logs" and re.search(r"task\.toml.*give a number above 0", bad.reason)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("task.toml", b"environment = 3", "task.toml, environment = 3: give a table"),
        ("task.toml", b"[environment]\nmemory = '2 gigs'", "environment.memory = '2 gigs': give it as 512M or 2G"),
        ("task.toml", b"[environment]\ndocker_image = 3", "environment.docker_image = 3: give the name of an image"),
        ("task.toml", b"[agentrl]\ncarry = 'out/*'", "agentrl.carry = 'out/*': give a list of patterns"),
        ("instruction.md", b"\xff", "instruction.md = b'\\xff': no UTF-8 at byte 0"),
        ("solution/solve.sh", b"\xff", "solve.sh = b'\\xff': no UTF-8 at byte 0"),
        ("environment/Dockerfile", b"\xff", "Dockerfile = b'\\xff': no UTF-8 at byte 0"),
        ("environment/Dockerfile", b"FROM", "Dockerfile = '': a Dockerfile starts with FROM"),
        ("environment/Dockerfile", b"FROM a\nCOPY b", "'COPY b': write it as COPY SOURCE"),
        ("environment/Dockerfile", b"FROM a\nCOPY 'b .", '"COPY \'b .": write it as COPY SOURCE'),
    ],
)
def test_a_file_that_is_wrong_is_named(folder: Path, name: str, text: bytes, says: str) -> None:
    (folder / "merge-logs" / name).write_bytes(text)
    with pytest.raises(ConfigError) as raised:
        Harbor(tasks=str(folder))
    assert says in str(raised.value)


def test_a_task_brings_nothing_of_the_host_into_a_box(folder: Path) -> None:
    (folder / "secret").write_text("hidden")
    (folder / "merge-logs/environment/files/near").symlink_to("logs/mail.log")
    assert len(harbor.load(folder, harbor.HarborDefaults()).tasks) == 1
    (folder / "merge-logs/environment/files/far").symlink_to(folder / "secret")
    with pytest.raises(ConfigError, match=r"far = '.*secret': a link out of the task's folder"):
        Harbor(tasks=str(folder))


def test_images_are_of_tasks_that_are_there(folder: Path) -> None:
    for images in ("built:1", {"merge-log": "built:1"}):
        with pytest.raises(ConfigError, match="give the image of a task by its folder"):
            Harbor(tasks=str(folder), images=images)


def test_an_empty_folder_has_no_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no task"):
        Harbor(tasks=str(tmp_path))


def test_harbors_folders_move() -> None:
    text = "cat /app/tests/x /tests/check.py > /logs/verifier/reward.txt; ls /application $D/tests ${D}/logs in /app."
    assert moved(text, "/app") == (
        "cat /workspace/tests/x /workspace/.harbor/tests/check.py > /workspace/.harbor/logs/verifier/reward.txt; "
        "ls /application $D/tests ${D}/logs in /workspace."
    )


@pytest.mark.parametrize(
    ("left", "earned"),
    [
        ({"reward.txt": b"0.5"}, 0.5),
        ({"reward.txt": b"1e308"}, 1.0),
        ({"reward.txt": b"-1e308"}, 0.0),
        ({"reward.txt": b"nan"}, 0.0),
        ({"reward.txt": b"9" * 100_000}, 0.0),
        ({"reward.json": b"[" * 200_000}, 0.0),
        ({"reward.json": b"[" * 60_000}, 0.0),
        ({"reward.json": b'{"reward": 1' + b"0" * 400 + b"}"}, 0.0),
        ({"reward.json": b'{"reward": 1' + b"0" * 5_000 + b"}"}, 0.0),
        ({"reward.json": b'{"reward": 0.25}'}, 0.25),
        ({"reward.json": b"\xff"}, 0.0),
        ({}, 0.0),
    ],
)
async def test_whatever_a_verifier_leaves_is_a_reward_within_the_declared_range(
    folder: Path, left: dict[str, bytes], earned: float
) -> None:
    def leave(argv: Sequence[str], files: dict[str, bytes]) -> ExecResult:
        if "test.sh" in argv[-1]:
            files.update({f".harbor/logs/verifier/{name}": data for name, data in left.items()})
        return ExecResult(exit_code=0, stdout=b"", stderr=b"")

    (task,) = harbor.load(folder, SHARED).tasks
    box = FakeSandbox(SandboxSpec(), leave)
    assert (await task.grade(box, FakeBackend())).outcome == earned


async def test_a_task_may_declare_another_range(folder: Path) -> None:
    toml = folder / "merge-logs/task.toml"
    toml.write_text("[agentrl]\nreward_range = [-1, 2]\n")
    (task,) = harbor.load(folder, SHARED).tasks

    def leave(argv: Sequence[str], files: dict[str, bytes]) -> ExecResult:
        files[".harbor/logs/verifier/reward.txt"] = b"-1e308"
        return ExecResult(exit_code=0, stdout=b"", stderr=b"")

    assert (await task.grade(FakeSandbox(SandboxSpec(), leave), FakeBackend())).outcome == -1.0
    for wrong in ("[1, 0]", "3", "[0, inf]", "['a', 'b']"):
        toml.write_text(f"[agentrl]\nreward_range = {wrong}\n")
        assert "reward_range" in harbor.load(folder, harbor.HarborDefaults()).bad[0].reason


@each_case("name", ["conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"])
def test_settings_of_pytest_are_no_artifacts(name: str) -> None:
    for path in (name, f"deep/{name}", "tox.ini", "setup.cfg", "pyproject.toml"):
        assert not is_artifact(path, {path})


# --- sets as people have them


def test_a_set_is_read_from_parquet_and_by_the_name_of_a_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist([ROW, {**ROW, "instance_id": "two", "patch": "none"}])
    parquet.write_table(table, tmp_path / "rows.parquet")
    with noted(r"1 of 2 tasks cannot be played .*rows\.parquet, row 2"):
        env = SWE(tasks=str(tmp_path / "rows.parquet"))
    assert env.task_count == 1 and "(two).patch" in env.bad_tasks[0].reason
    asked: list[str] = []

    def read(where: str) -> list[dict[str, Any]]:
        asked.append(where)
        return [ROW]

    monkeypatch.setattr(jsonl, "read_rows", read)
    assert SWE(tasks="hf:owner/set:main:test").task_count == 1 and asked == ["hf:owner/set:main:test"]


def test_a_row_of_swe_bench_without_an_image_has_the_official_one() -> None:
    """The name as the harness of SWE-bench makes it for instance `django__django-11099`."""
    columns = {"base_commit": "d26b2424437d", "version": "3.0", "environment_setup_commit": "419a78300f7c"}
    row = {**ROW, "image_name": None, "instance_id": "Django__django-11099", **columns}
    task = jsonl.task_of(row, jsonl.RowDefaults())
    assert task.image == "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    assert task.tree.covered == ("/testbed/.git",)
    assert jsonl.task_of(row, jsonl.RowDefaults(image="mine:1")).image == "mine:1"
    with pytest.raises(ConfigError, match="name an image"):
        jsonl.task_of({**row, "version": None}, jsonl.RowDefaults())


def test_ids_that_are_no_names_are_counted_at_load(tmp_path: Path) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text(json.dumps({**ROW, "FAIL_TO_PASS": ["It says so.", "a.py::t[1"], "PASS_TO_PASS": ["a.py::u[1 2]"]}))
    with noted(r"2 of 3 test ids are no names .*odd\.jsonl, as 'owner__name-1: It says so\.'"):
        SWE(tasks=str(file))


def test_tasks_of_a_list_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, skip = tmp_path / "rows.jsonl", tmp_path / "skip.jsonl"
    file.write_text("".join(json.dumps({**ROW, "instance_id": id}) + "\n" for id in ("one", "two", "three")))
    skip.write_text('{"task": "two", "reason": "gold", "absent": 3, "tests": 5}\nthree\nelsewhere\n')
    lacks = r"2 of 3 tasks are left out by .*skip\.jsonl: logs of their gold patches lack 3 of 5 test ids"
    env = SWE(tasks=str(file), skip=str(skip))
    assert re.search(lacks, caplog.text)
    assert env.task_count == 1 and env.make_task({"task": "one"}) == {"task": "one"}
    skip.write_text("one\ntwo\nthree\n")
    with pytest.raises(ConfigError, match="leaves out all 3 tasks"):
        SWE(tasks=str(file), skip=str(skip))
    skip.write_text("{3\n")
    with pytest.raises(ConfigError, match=r"skip, .*skip\.jsonl:1 = '\{3': give an id"):
        SWE(tasks=str(file), skip=str(skip))


async def test_a_set_whose_ids_match_nothing_says_so_once() -> None:
    def prints(log: bytes) -> FakeSandbox:
        return FakeSandbox(SandboxSpec(), lambda argv, files: ExecResult(exit_code=0, stdout=log, stderr=b""))

    notices.OF_PROCESS.take_new()
    matches = jsonl.Matches("set.jsonl")
    task = jsonl.task_of(ROW, jsonl.RowDefaults(), "row", matches)
    for _ in range(7):
        await task.grade(prints(b"PASSED b.py::other\n"), FakeBackend())
    assert not notices.OF_PROCESS.take_new()
    with noted(r"set\.jsonl: none of .* first 8 test runs.*test_x' is listed.*'b\.py::other'"):
        await task.grade(prints(b"PASSED b.py::other\n"), FakeBackend())
    await task.grade(prints(b"PASSED b.py::other\n"), FakeBackend())
    assert not notices.OF_PROCESS.take_new()
    fine = jsonl.Matches("fine.jsonl")
    task = jsonl.task_of(ROW, jsonl.RowDefaults(), "row", fine)
    for log in (b"test_x (test_m.Case) ... FAIL\n", *[b""] * 20):
        assert not (await task.grade(prints(log), FakeBackend())).success


def toml_of(folder: Path, text: str) -> None:
    (folder / "merge-logs/task.toml").write_text(text)


def test_a_tasks_variables_reach_its_boxes_its_verifier_and_its_solution(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_MODEL", "m-1")
    toml_of(
        folder,
        "[environment.env]\nWHERE = '/app/data'\nMODE = '${MODE:-quiet}'\n"
        "[verifier.env]\nMODEL = 'x/${JUDGE_MODEL}'\n[solution.env]\nHINT = \"it's\"\n",
    )
    defaults = harbor.HarborDefaults(shared_verifier=True, host_env=["JUDGE_MODEL"])
    (task,) = harbor.load(folder, defaults).tasks
    assert task.env == {"WHERE": "/workspace/data", "MODE": "quiet"}
    assert isinstance(task.grade, harbor.Verifier) and task.grade.env == {"MODEL": "x/m-1"}
    assert task.gold[0].argument.startswith("export HINT='it'\"'\"'s'\n")
    (bad,) = harbor.load(folder, SHARED).bad
    assert "verifier.env.MODEL = '${JUDGE_MODEL}': JUDGE_MODEL is a variable of this machine: allow it" in bad.reason
    monkeypatch.delenv("JUDGE_MODEL")
    (bad,) = harbor.load(folder, defaults).bad
    assert bad.reason.endswith("JUDGE_MODEL is not set here")
    for text, why in (
        ("environment.env = 3", "give a table of variables"),
        ("[verifier.env]\nX = 3", "a name and a text"),
    ):
        toml_of(folder, text)
        assert why in harbor.load(folder, SHARED).bad[0].reason


async def test_a_verifier_runs_with_its_variables(folder: Path) -> None:
    toml_of(folder, "[verifier.env]\nA = 'b'\n")
    seen: list[Any] = []

    class Noting(FakeSandbox):
        async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
            seen.append((argv[-1], options.get("env")))
            return await super().exec(argv, **options)

    (task,) = harbor.load(folder, SHARED).tasks
    await task.grade(Noting(SandboxSpec()), FakeBackend())
    assert [env for word, env in seen if "test.sh" in word] == [{"A": "b"}]


@pytest.mark.parametrize(
    ("text", "weights", "outcome", "scores"),
    [
        (b'{"correct": 1, "style": 0.5}', "", 0.75, {"correct": 1.0, "style": 0.5}),
        (b'{"reward": 0.25, "style": 1}', "", 0.25, {"reward": 0.25, "style": 1.0}),
        (b'{"correct": true}', "", 1.0, {"correct": 1.0}),
        (b'{"correct": 1, "style": 0.5}', "{ correct = 0.8, style = 0.2 }", 0.9, {"correct": 1.0, "style": 0.5}),
        (b'{"style": 0.5}', "{ correct = 0.8, style = 0.2 }", 0.1, {"style": 0.5}),
        (b'{"correct": 9e9, "style": -3}', "", 0.5, {"correct": 1.0, "style": 0.0}),
        (b'{"correct": 1, "style": "fine"}', "", 0.0, None),
        (b'{"correct": 1, "style": NaN}', "", 0.0, None),
        (b'{"reward": 1}', "", 1.0, None),
        (b"{}", "", 0.0, None),
        (b"0.5", "", 0.5, None),
    ],
)
async def test_several_rewards_are_one_outcome_and_each_is_kept(
    folder: Path, text: bytes, weights: str, outcome: float, scores: dict[str, float] | None
) -> None:
    def leave(argv: Sequence[str], files: dict[str, bytes]) -> ExecResult:
        if "test.sh" in argv[-1]:
            files[".harbor/logs/verifier/reward.json"] = text
            files[".harbor/logs/verifier/reward.txt"] = b"0.125"  # as in Harbor, the other one counts
        return ExecResult(exit_code=0, stdout=b"", stderr=b"")

    toml_of(folder, f"[agentrl]\nreward_weights = {weights}\n" if weights else "")
    (task,) = harbor.load(folder, SHARED).tasks
    grade = await task.grade(FakeSandbox(SandboxSpec(), leave), FakeBackend())
    assert grade.outcome == pytest.approx(outcome) and grade.info.get("scores") == scores


def test_what_a_task_asks_for_and_does_not_get_is_said(folder: Path) -> None:
    shutil.copytree(folder / "merge-logs", folder / "other")
    toml_of(
        folder,
        "artifacts = ['/app/merged.log']\n[metadata]\nauthor = 'x'\n[agent]\nuser = 'root'\n[verifier]\n"
        "environment_mode = 'separate'\n[verifier.environment]\nstorage_mb = 5\n[environment]\nstorage_mb = 5\n"
        "allow_internet = true\ngpus = 0\nhealthcheck = { command = 'true' }\nshine = 1\n",
    )
    toml = folder / "other/task.toml"
    toml.write_text(toml.read_text() + "storage_mb = 5\nallow_internet = false\n")
    notices.OF_PROCESS.take_new()
    harbor.load(folder, harbor.HarborDefaults())
    ((_, words, _, place),) = notices.OF_PROCESS.take_new()
    assert place == str(folder)
    assert words == (
        "not honoured in task.toml: agent.user (merge-logs); verifier.environment.storage_mb (merge-logs); "
        "environment.storage_mb (merge-logs and 1 more); environment.allow_internet (merge-logs); "
        "environment.healthcheck (merge-logs); environment.shine (merge-logs)"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "verifier = 'shared': its verifier runs beside the agent's work"),
        ("artifacts = ['/app/merged.log']", "verifier = 'shared'"),
        ("artifacts = ['/app/a.py']\n[verifier]\nenvironment_mode = 'separate'", "verifier = 'separate': its verifier"),
        ("[agentrl]\ncarry = ['src/*.py']", "verifier = 'shared'"),
        ("artifacts = ['/etc/x']\n[verifier]\nenvironment_mode = 'separate'", "boxes can write to /app and"),
        ("artifacts = [3]\n[verifier]\nenvironment_mode = 'separate'", "give a list of paths"),
        ("[verifier]\nenvironment_mode = 'both'", "choose shared or separate"),
        ("[[steps]]\nname = 'one'", "a task of several steps cannot be played"),
        ("[environment]\nos = 'windows'", "boxes run Linux"),
        ("[environment]\nworkdir = 'app'", "give the path of a folder"),
        ("[verifier]\ncollect = ['ls']", "give a command"),
        ("[[verifier.collect]]\ncommand = 'ls'\nservice = 'db'", "a task has one box: main"),
        ("[agentrl]\nreward_weights = {}", "give numbers by part"),
    ],
)
def test_a_task_that_cannot_be_played_is_bad_for_itself_alone(folder: Path, text: str, why: str) -> None:
    shutil.copytree(folder / "merge-logs", folder / "good")
    toml_of(folder, text)
    found = harbor.load(folder, harbor.HarborDefaults())
    assert [task.id for task in found.tasks] == ["good"]
    assert found.bad[0].task == "merge-logs" and why in found.bad[0].reason


def test_a_separate_verifier_gets_the_declared_artifacts_alone(folder: Path) -> None:
    toml_of(
        folder,
        "artifacts = ['/app/out', { source = '/logs/artifacts/a.txt' }]\n[verifier.environment]\nmemory_mb = 64\n"
        "docker_image = 'judge:1'\nworkdir = '/judge'\n[[verifier.collect]]\ncommand = 'cp /app/x /logs/artifacts'\n",
    )
    (task,) = harbor.load(folder, harbor.HarborDefaults()).tasks
    for path, carried in {
        "out": True,
        "out/deep/a.bin": True,
        "outer": False,
        "merged.log": False,
        ".harbor/logs/artifacts/a.txt": True,
        ".harbor/logs/artifacts/b.txt": True,
        ".harbor/logs/verifier/reward.txt": False,
        ".harbor/tests/test.sh": False,
    }.items():
        assert task.declared(path, set()) is carried, path
    assert task.grading is not None and task.grading.tree is not None
    assert (task.grading.image, task.grading.tree.in_image) == ("judge:1", "/judge")
    assert task.grading.limits == {"memory_bytes": 64 << 20}
    assert task.collect[0].command == "cp /workspace/x /workspace/.harbor/logs/artifacts"


def test_tasks_of_a_shared_verifier_are_played_when_told_and_marked(folder: Path) -> None:
    toml_of(folder, "")
    with pytest.raises(ConfigError, match=r"none of its 1 tasks can be played: .*give shared_verifier=true"):
        Harbor(tasks=str(folder))
    env = Harbor(tasks=str(folder), shared_verifier=True)
    assert env.task_count == 1 and not env.bad_tasks
