"""`agentrl validate --out`: defects seeded at random places of healthy sets get their verdicts, and nothing else does.

The sets are copies of the shipped Harbor folders, rows of a small repository, and questions with a reward function.
Each defect is one that people have published about sets of theirs, in our own words."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import pytest

import agentrl_environments.swe
from agentrl.env.checks.tasks.check_set import SetPlan, SetVerdict, check_set
from agentrl.env.checks.tasks.texts import answer_in_prompt as given_away
from agentrl.env.checks.tasks.texts import in_held_out
from agentrl.env.checks.tasks.verdicts import ORDER, REASONS, Finding, TaskText, verdict_of
from agentrl.errors import UsageError
from agentrl.records import Task
from agentrl.task_ids import row_id
from agentrl_environments.swe import SWE

boxed = pytest.mark.bubblewrap
ROWS_ENV = "agentrl.env.dataset_env:RowsEnv"


def plan_of(tmp_path: Path, env: str, kwargs: Mapping[str, Any], **changes: Any) -> SetPlan:
    out, skip = tmp_path / "out", tmp_path / "tasks.skip"
    plan = SetPlan(env_id=env, kwargs=dict(kwargs), seeds=None, out=out, skip=skip, repeat=3, task_s=300.0)
    return replace(plan, **changes)


def reasons(found: SetVerdict) -> dict[str, set[str]]:
    """The reasons of each task that has any."""
    return {task.task: {finding.reason for finding in task.findings} for task in found.tasks if task.findings}


# --- questions with a reward function ----------------------------------------------------------------------------

REWARD = """
import time
from pathlib import Path

def correct(prompt, completion, row):
    right = completion.strip() == row["answer"]
    if row["grader"] == "late":
        time.sleep(30)
    if row["grader"] == "raises":
        raise OSError("the judge does not answer")
    if row["grader"] == "flaky" and right:
        calls = Path(__file__).with_name("calls")
        count = len(calls.read_text()) if calls.exists() else 0
        calls.write_text("x" * (count + 1))
        return float(count % 2)
    always = {"passes": 1.0, "fails": 0.0, "lenient": float(row["answer"] in completion)}
    return always.get(row["grader"], float(right))
"""
NOUNS = ("apples", "pears", "nuts", "coins", "books", "stones", "cups", "birds", "ships", "lamps")


def question(rng: random.Random, number: int) -> dict[str, Any]:
    a, b = rng.randint(100, 999), rng.randint(10, 99)
    noun, place = rng.choice(NOUNS), rng.choice(("a chest", "the hall", "a small boat", "her garden"))
    text = f"In {place} there are {a} {noun}, and somebody brings {b} more of them. How many {noun} are there now?"
    return {"prompt": text, "answer": str(a + b), "grader": "right", "number": number}


def near(text: str) -> str:
    return text.replace("somebody brings", "then somebody brings").upper()


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


Spoil = Callable[[dict[str, Any], list[dict[str, Any]]], None]
QUESTIONS: list[tuple[str, str, Spoil]] = [
    ("lies", "no-work-wins", lambda row, held_out: row.update(grader="passes")),
    ("impossible", "gold-loses", lambda row, held_out: row.update(grader="fails")),
    ("flaky", "outcome-changes", lambda row, held_out: row.update(grader="flaky")),
    ("unknown", "grader-late", lambda row, held_out: row.update(grader="late")),
    ("unknown", "raised", lambda row, held_out: row.update(grader="raises")),
    ("lies", "cheat-wins", lambda row, held_out: row.update(grader="lenient")),
    ("lies", "answer-in-prompt", lambda row, held_out: row.update(prompt=f"{row['prompt']} (Answer: {row['answer']})")),
    ("lies", "in-held-out", lambda row, held_out: row.update(held_out[3])),
    ("lies", "near-held-out", lambda row, held_out: row.update(held_out[7], prompt=near(held_out[7]["prompt"]))),
]


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(2))
def test_defects_of_questions_are_found_where_they_are(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    rows = [question(rng, number) for number in range(30)]
    held_out = [question(rng, number) for number in range(100, 110)]
    (tmp_path / "judge.py").write_text(REWARD)
    kwargs = {
        "rows": written(tmp_path / "train.jsonl", rows),
        "rewards": [f"{tmp_path / 'judge.py'}:correct"],
        "reward_s": 0.5,
    }
    held = {"rows": written(tmp_path / "held_out.jsonl", held_out)}
    healthy = check_set(plan_of(tmp_path, ROWS_ENV, kwargs, held_out=held))
    assert reasons(healthy) == {} and healthy.right and healthy.by_verdict == {"ok": 30}

    places = rng.sample(range(30), len(QUESTIONS))
    expected: dict[str, tuple[str, set[str]]] = {}
    for place, (verdict, reason, spoil) in zip(places, QUESTIONS, strict=True):
        spoil(rows[place], held_out)
        expected[f"row {place}"] = verdict, {reason}
    written(tmp_path / "train.jsonl", rows)
    found = check_set(plan_of(tmp_path, ROWS_ENV, kwargs, held_out=held, out=tmp_path / "spoiled"))
    assert {task.task: (task.verdict, reasons(found)[task.task]) for task in found.tasks if task.findings} == expected
    assert found.flakes is not None and found.flakes.count == 1
    assert found.flakes.low < found.flakes.share < found.flakes.high


@pytest.mark.medium
def test_an_answer_that_wins_too_often_is_named(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [{**question(rng, number), "answer": "yes" if rng.random() < 0.9 else "no"} for number in range(40)]
    (tmp_path / "judge.py").write_text(REWARD)
    kwargs = {"rows": written(tmp_path / "rows.jsonl", rows), "rewards": [f"{tmp_path / 'judge.py'}:correct"]}
    found = check_set(plan_of(tmp_path, ROWS_ENV, kwargs))
    assert reasons(found) == {} and found.suspicious and not found.right
    assert found.majority is not None and found.majority_answer == "yes" and found.chance == 0.5
    assert found.majority.count == sum(row["answer"] == "yes" for row in rows)

    even = [{**row, "answer": ("yes", "no")[number % 2]} for number, row in enumerate(rows)]
    written(tmp_path / "rows.jsonl", even)
    assert check_set(plan_of(tmp_path, ROWS_ENV, kwargs, out=tmp_path / "even")).right


def test_tasks_of_one_template_are_no_duplicates() -> None:
    """They differ in a number, or in the answer alone; the words of each are nearly those of the other."""
    text = "A train leaves at {} and needs three hours to the sea, where it waits an hour for the ferry. When is that?"
    training = [TaskText("row 0", text.format(number), "12") for number in (7, 8)]
    other = TaskText("row 2", "Which of the four colours does the painter of the bridge never use in winter?", "red")
    held_out = [TaskText("row 0", text.format(9), "12"), TaskText("row 1", text.format(8), "13"), other]
    assert in_held_out(training, held_out) == {}
    findings = in_held_out(training, [TaskText("row 0", text.format(8) + " Say it.", "12"), other])
    assert {index: [finding.reason for finding in each] for index, each in findings.items()} == {1: ["near-held-out"]}


def test_a_prompt_that_lists_what_may_be_answered_gives_nothing_away() -> None:
    """As the syllogisms of reasoning-gym do, beside questions of other kinds."""
    texts = [
        TaskText("row 0", "Do fish swim? (Answer Yes or No)", "Yes"),
        TaskText("row 1", "Do birds read? Answer: No/Yes", "No"),
        TaskText("row 2", "Is ice cold? The answer is yes.", "Yes"),
        TaskText("row 3", "How many are two?", "2"),
    ]
    assert list(given_away(texts)) == [2]


def test_the_file_of_wrong_tasks_is_what_a_run_leaves_out(tmp_path: Path) -> None:
    rows = [question(random.Random(number), number) for number in range(4)]
    rows[2]["grader"], rows[3]["grader"] = "fails", "raises"
    (tmp_path / "judge.py").write_text(REWARD)
    kwargs = {"rewards": [f"{tmp_path / 'judge.py'}:correct"]}
    of_set = {**kwargs, "rows": written(tmp_path / "rows.jsonl", rows)}
    found = check_set(plan_of(tmp_path, ROWS_ENV, of_set))
    assert found.skip is not None
    (line,) = [json.loads(line) for line in found.skip.read_text().splitlines()]
    assert (line["task"], line["reason"].partition(":")[0]) == ("row 2", "impossible")
    # In a run the rows are reset options, under any seed, and no argument of the environment.
    task = Task(index=17, env=ROWS_ENV, seed=12345, kwargs=kwargs, options=rows[2])
    assert line["id"] == row_id(task)


# --- Harbor folders ------------------------------------------------------------------------------------------------

SHIPPED = Path(agentrl_environments.swe.__path__[0]) / "harbor_tasks"
WRITE = "mkdir -p /logs/verifier; echo {} > /logs/verifier/reward.txt\n"


def add(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text((file.read_text() if file.is_file() else "") + text)


def passes_everything(folder: Path) -> None:
    (folder / "tests" / "test.sh").write_text(WRITE.format(1))


def skipped_counts_as_passed(folder: Path) -> None:
    """The test skips itself where there is no work, and the runner's exit code is 0 for that."""
    (folder / "tests" / "test_it.py").write_text(
        "import os, unittest\n\nclass T(unittest.TestCase):\n    def test_it(self):\n"
        "        if not os.path.exists('/app/counts.json'):\n            self.skipTest('nothing to see')\n"
        "        exec(open('/tests/check.py').read())\n"
    )
    test = "if python3 -I -S /tests/test_it_main.py; then\n" + WRITE.format(1) + "else\n" + WRITE.format(0) + "fi\n"
    (folder / "tests" / "test.sh").write_text(test)
    main = "import sys; sys.path.insert(0, '/tests'); import unittest; unittest.main('test_it')\n"
    (folder / "tests" / "test_it_main.py").write_text(main)


def gold_fails(folder: Path) -> None:
    (folder / "solution" / "solve.sh").write_text("#!/bin/sh\necho '{}' > /app/counts.json\n")


def impossible(folder: Path) -> None:
    (folder / "tests" / "test.sh").write_text(WRITE.format(0))


def late(folder: Path) -> None:
    toml = folder / "task.toml"
    toml.write_text(toml.read_text().replace("timeout_sec = 60.0", "timeout_sec = 0.5", 1))
    test = folder / "tests" / "test.sh"
    test.write_text(test.read_text().replace("mkdir", "sleep 60\nmkdir", 1))


def killed(folder: Path) -> None:
    (folder / "tests" / "test.sh").write_text("#!/bin/sh\nkill -9 $$\n")


def has_its_tests(folder: Path) -> None:
    shutil.copy(folder / "tests" / "check.py", folder / "environment" / "files" / "old_check.txt")


def answer_in_prompt(folder: Path) -> None:
    add(folder / "instruction.md", "\n```\n" + (folder / "solution" / "solve.sh").read_text() + "```\n")


def history(folder: Path) -> None:
    """A mirror of the repository was copied along, under another name than .git."""
    work = folder / "work"
    shutil.copytree(folder / "solution", work)
    git = ["git", "-C", str(work), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "fix"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    shutil.move(str(work / ".git"), folder / "environment" / "files" / "mirror")
    shutil.rmtree(work)


def broken_history(folder: Path) -> None:
    """Nobody can say what a history holds that cannot be read."""
    add(folder / "environment" / "files" / "mirror" / "HEAD", "no such thing")
    add(folder / "environment" / "files" / "mirror" / "objects" / "pack", "nor this")


def longest_line(folder: Path) -> str:
    return max((folder / "tests" / "check.py").read_text().splitlines(), key=len)


def many_files_with_a_line(folder: Path) -> None:
    """More files than are read may hold the rest of the hidden tests, too."""
    for number in range(21):
        add(folder / "environment" / "files" / f"note-{number}.txt", longest_line(folder) + "\n")


def a_large_file_with_its_tests(folder: Path) -> None:
    """The hidden tests stand behind the part of a file that is read."""
    tests = (folder / "tests" / "check.py").read_text()
    add(folder / "environment" / "files" / "log.txt", "nothing to see here\n" * 15_000 + tests)


def runs_what_was_left(folder: Path) -> None:
    """All that the agent writes is carried over, and the tests' Python looks for modules there."""
    toml = folder / "task.toml"
    toml.write_text(f'{toml.read_text()}\n[agentrl]\ncarry = ["*"]\n')
    test = folder / "tests" / "test.sh"
    test.write_text(test.read_text().replace("python3 -I -S", "python3"))


HARBOR: dict[Callable[[Path], None], tuple[str, str]] = {
    passes_everything: ("lies", "no-work-wins"),
    skipped_counts_as_passed: ("lies", "no-work-wins"),
    gold_fails: ("impossible", "gold-loses"),
    impossible: ("impossible", "gold-loses"),
    late: ("unknown", "grader-late"),
    killed: ("unknown", "grader-killed"),
    has_its_tests: ("lies", "tests-readable"),
    answer_in_prompt: ("lies", "answer-in-prompt"),
    history: ("lies", "solution-in-history"),
    broken_history: ("unknown", "not-searched"),
    many_files_with_a_line: ("unknown", "not-searched"),
    a_large_file_with_its_tests: ("unknown", "not-searched"),
    runs_what_was_left: ("lies", "cheat-wins"),
}


@boxed
@pytest.mark.long
def test_defects_of_harbor_folders_are_found_where_they_are(tmp_path: Path) -> None:
    rng = random.Random(5)
    tasks = tmp_path / "tasks"
    shutil.copytree(SHIPPED, tasks)
    names = [f"task-{number:02}" for number in range(len(HARBOR) + 1)]
    for name in names:
        shutil.copytree(SHIPPED / "count-words", tasks / name)
    places = rng.sample(names, len(HARBOR))
    for place, spoil in zip(places, HARBOR, strict=True):
        spoil(tasks / place)
    found = check_set(plan_of(tmp_path, "agentrl/Harbor-v0", {"tasks": str(tasks)}, repeat=2))
    verdicts = {task.task: task for task in found.tasks}
    for place, (spoil, (verdict, reason)) in zip(places, HARBOR.items(), strict=True):
        seen = verdicts[place].verdict, reason in reasons(found).get(place, ())
        assert seen == (verdict, True), (spoil, verdicts[place])
    assert {verdicts[name].verdict for name in verdicts.keys() - set(places)} == {"ok"}


# --- rows of a repository ------------------------------------------------------------------------------------------

SOURCE = "def total(numbers):\n    result = 0\n    for number in numbers:\n        result = number\n    return result\n"
FIX = """--- a/sums.py
+++ b/sums.py
@@ -1,5 +1,5 @@
 def total(numbers):
     result = 0
     for number in numbers:
-        result = number
+        result = result + number  # every number counts
     return result
"""
TESTS = """--- /dev/null
+++ b/tests/test_hidden.py
@@ -0,0 +1,10 @@
+import unittest
+from sums import total
+
+
+class HiddenTest(unittest.TestCase):
+    def test_that_all_numbers_are_added(self):
+        self.assertEqual(total([1, 2, 3]), 6)
+
+    def test_that_nothing_is_zero(self):
+        self.assertEqual(total([]), 0)
"""
ADDED = "test_hidden.HiddenTest.test_that_all_numbers_are_added"
ZERO = "test_hidden.HiddenTest.test_that_nothing_is_zero"
RUN = "python3 -m unittest discover -v -s tests"
ROW: dict[str, Any] = {
    "repo": "sums",
    "problem_statement": "The total of a list is its last number.",
    "patch": FIX,
    "test_patch": TESTS,
    "FAIL_TO_PASS": [ADDED],
    "PASS_TO_PASS": [ZERO],
    "test_command": RUN,
}
SKIPS = TESTS.replace("    def test_that_all", "    @unittest.skipIf({}, 'later')\n+    def test_that_all").replace(
    "1,10", "1,11"
)
XFAILS = SKIPS.replace("@unittest.skipIf({}, 'later')", "@unittest.expectedFailure").replace("3]), 6", "3]), 7")
SAYS_OK = f"echo '{ADDED.rpartition('.')[2]} (test_hidden.HiddenTest) ... ok'"
ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "needs-no-change": ({"FAIL_TO_PASS": [ZERO], "PASS_TO_PASS": []}, "lies", "no-work-wins"),
    "one-is-vacuous": ({"FAIL_TO_PASS": [ADDED, ZERO], "PASS_TO_PASS": []}, "ok", "some-tests-vacuous"),
    "wrong-gold": ({"patch": FIX.replace("result + number", "result - number")}, "impossible", "gold-loses"),
    "misfit": ({"patch": FIX.replace("result = 0", "result = 1")}, "impossible", "gold-loses"),
    "tests-do-not-fit": ({"test_patch": FIX.replace("result = 0", "result = 1")}, "impossible", "cannot-be-played"),
    "skips-count": (
        {"test_patch": SKIPS.format("total([1, 2]) == 2"), "test_command": f"{RUN} 2>&1 | sed 's/skipped .*/ok/'"},
        "lies",
        "no-work-wins",
    ),
    "only-skips": ({"test_patch": SKIPS.format("True")}, "impossible", "tests-not-run"),
    "only-xfails": ({"test_patch": XFAILS}, "impossible", "tests-not-run"),
    "collects-nothing": ({"test_command": f"{RUN} -p 'none*.py'"}, "impossible", "tests-not-run"),
    "killed": ({"test_command": "kill -9 $$"}, "unknown", "grader-killed"),
    "late": ({"test_command": "sleep 60"}, "unknown", "grader-late"),
    "forgotten-tests": ({"repo": "forgotten"}, "lies", "tests-readable"),
    "diff-in-report": ({"problem_statement": f"Please apply this:\n{FIX}"}, "lies", "answer-in-prompt"),
    "believes-exit-codes": (
        {"sources": ["*"], "PASS_TO_PASS": [], "test_command": f"{RUN} && {SAYS_OK}"},
        "lies",
        "cheat-wins",
    ),
}


@pytest.fixture
def repositories(tmp_path: Path) -> Path:
    """A repository, and a copy of it in which somebody forgot the tests of the fix."""
    folder = tmp_path / "repositories"
    for name in ("sums", "forgotten"):
        add(folder / name / "sums.py", SOURCE)
        add(folder / name / "tests" / "test_old.py", "import unittest\n")
    plain = [line[1:] for line in TESTS.splitlines() if line.startswith("+") and not line.startswith("+++")]
    add(folder / "forgotten" / "build" / "tests.txt", "\n".join(plain))
    return folder


@boxed
@pytest.mark.slow
def test_defects_of_rows_are_found_where_they_are(repositories: Path, tmp_path: Path) -> None:
    rng = random.Random(7)
    names = [f"row-{number:02}" for number in range(len(ROWS) + 2)]
    places = dict(zip(rng.sample(names, len(ROWS)), ROWS, strict=True))
    rows = [{**ROW, "instance_id": name, **(ROWS[places[name]][0] if name in places else {})} for name in names]
    kwargs: dict[str, Any] = {
        "tasks": written(tmp_path / "rows.jsonl", rows),
        "repositories": str(repositories),
        "tests_s": 5.0,
    }
    found = check_set(plan_of(tmp_path, "agentrl/SWE-v0", kwargs, repeat=2))
    verdicts = {task.task: task for task in found.tasks}
    for name, defect in places.items():
        _, verdict, reason = ROWS[defect]
        seen = verdicts[name].verdict, reason in reasons(found).get(name, ())
        assert seen == (verdict, True), (defect, verdicts[name])
    assert {verdicts[name].verdict for name in set(names) - set(places)} == {"ok"}
    wrong = {name for name, defect in places.items() if ROWS[defect][1] in ("lies", "impossible")}
    left = SWE(skip=str(found.skip), **kwargs)
    assert {text.task for text in left.task_texts()} == set(names) - wrong


# --- bounded, resumable, and fair to tasks -----------------------------------------------------------------------

FOUR = """
import trio
import agentrl
from agentrl.env.checks.oracles import Oracle, say
from agentrl.errors import HostBusy, SandboxLost
from pathlib import Path

class Four(agentrl.ToolEnv):
    '''Four tasks. What hinders the grader of one stands in the file `hindrance`: nothing where there is none.'''
    limits = agentrl.env.EpisodeLimits(turns=1)
    blocking = False
    task_count = 4
    bad_tasks = ()

    def make_task(self, options):
        return {"task": f"task {self.task_seed() % 4}"}

    async def aclose(self):
        await trio.lowlevel.checkpoint()
        await super().aclose()
        with Path(__file__).with_name("closed").open("a") as file:
            file.write(getattr(self, 'task', {}).get('task', '') + "\\n")

    def prompt(self, task):
        self.note(**task)
        with Path(__file__).with_name("played").open("a") as file:
            file.write(task["task"] + "\\n")
        return ""

    def on_text(self, text):
        self.said = text
        return ""

    async def grade(self):
        file = Path(__file__).with_name("hindrance")
        hindrance = file.read_text() if file.exists() and self.task["task"] == "task 2" else ""
        if hindrance == "hangs":
            await trio.sleep_forever()
        if hindrance:
            raise {"busy": HostBusy, "lost": SandboxLost}[hindrance]("no processor for 60 s")
        return getattr(self, "said", "") == "gold"

    def oracles(self):
        return [Oracle("gold", 1.0, say("gold")), Oracle("no-op", 0.0, say(""))]
"""


@pytest.fixture
def four(tmp_path: Path) -> str:
    (tmp_path / "four.py").write_text(FOUR)
    return f"{tmp_path / 'four.py'}:Four"


@pytest.mark.parametrize("hindrance", ["busy", "lost"])
def test_law3_a_grader_that_this_machine_hindered_makes_no_task_a_liar(
    four: str, tmp_path: Path, hindrance: str
) -> None:
    (tmp_path / "hindrance").write_text(hindrance)
    found = check_set(plan_of(tmp_path, four, {}))
    assert reasons(found) == {"task 2": {"infrastructure"}} and found.by_verdict == {"ok": 3, "unknown": 1}
    assert found.skip is None and "no processor for 60 s" in found.tasks[2].findings[0].evidence


def test_law4_a_task_that_hangs_is_left_at_its_deadline(four: str, tmp_path: Path) -> None:
    (tmp_path / "hindrance").write_text("hangs")
    found = check_set(plan_of(tmp_path, four, {}, task_s=1.0))
    assert reasons(found) == {"task 2": {"deadline"}} and found.by_verdict == {"ok": 3, "unknown": 1}
    played, closed = ((tmp_path / name).read_text().splitlines() for name in ("played", "closed"))
    assert sorted(filter(None, closed)) == sorted(played), "closed behind the deadline, too: it may have a box"


def test_a_second_call_plays_only_what_is_not_known(four: str, tmp_path: Path) -> None:
    (tmp_path / "hindrance").write_text("busy")
    check_set(plan_of(tmp_path, four, {}, seeds=range(3)))
    (tmp_path / "hindrance").unlink()
    (tmp_path / "played").unlink()
    results = tmp_path / "out" / "results.jsonl"
    results.write_text(results.read_text() + '{"seed": 3, "task": "ta')  # killed while it wrote
    found = check_set(plan_of(tmp_path, four, {}))
    assert found.right and len(found.tasks) == 4
    assert set((tmp_path / "played").read_text().splitlines()) == {"task 2", "task 3"}
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert sorted(row["seed"] for row in rows[1:]) == [0, 1, 2, 3]


def test_results_of_other_settings_are_not_mixed(four: str, tmp_path: Path) -> None:
    check_set(plan_of(tmp_path, four, {}))
    with pytest.raises(UsageError, match=r"are of other settings: \{.repeat.: 3\}"):
        check_set(plan_of(tmp_path, four, {}, repeat=5))
    (tmp_path / "four.py").write_text(FOUR + "\n# its grader was corrected\n")
    with pytest.raises(UsageError, match="older than the files of its tasks"):
        check_set(plan_of(tmp_path, four, {}))


def test_results_are_refused_once_the_content_of_a_packaged_set_changed(four: str, tmp_path: Path) -> None:
    """No setting names it: the environment does, or its words show it."""
    names = "    bad_tasks = ()\n    task_files = (Path(__file__).with_name('content'),)\n"
    texts = "\n    def task_texts(self):\n        import words\n        return words.texts()\n"
    (tmp_path / "four.py").write_text(FOUR.replace("    bad_tasks = ()\n", names) + texts)
    words, content = tmp_path / "words.py", tmp_path / "content" / "tasks.jsonl"
    add(content, "one task")
    add(words, "from agentrl.env.checks.tasks.verdicts import TaskText\ntexts = lambda: [TaskText('a', 'b')] * 4\n")
    plan = plan_of(tmp_path, four, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        assert check_set(plan).right and check_set(plan).right, "nothing changed: it goes on"
        add(content, "and one more")
        with pytest.raises(UsageError, match="older than the files of its tasks"):
            check_set(plan)
        content.write_text("one task")
        assert check_set(plan).right
        import words as loaded

        patch.setattr(loaded, "texts", lambda: [TaskText("a", "c")] * 4)
        with pytest.raises(UsageError, match="older than the files of its tasks"):
            check_set(plan)
    assert {path.name for path in SWE().task_files} == {"tasks.jsonl", "repositories"}


def test_a_row_that_cannot_be_asked_hinders_no_other(tmp_path: Path) -> None:
    rows = [{"prompt": "Say yes.", "answer": "yes", "grader": ""}, {"prompt": None, "answer": "no", "grader": ""}]
    (tmp_path / "judge.py").write_text(REWARD)
    kwargs = {"rows": written(tmp_path / "rows.jsonl", rows), "rewards": [f"{tmp_path / 'judge.py'}:correct"]}
    found = check_set(plan_of(tmp_path, ROWS_ENV, kwargs))
    assert reasons(found)["row 1"] == {"raised"} and "there is nothing to ask" in found.tasks[1].findings[0].evidence
    assert found.tasks[0].verdict == "ok"


def test_an_environment_with_nothing_to_play_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="offers no oracles"):
        check_set(plan_of(tmp_path, "agentrl/FrozenLake-v0", {}, seeds=range(1)))
    with pytest.raises(UsageError, match="says not how many tasks it has"):
        check_set(plan_of(tmp_path, "agentrl/Calculator-v0", {}))
    with pytest.raises(UsageError, match="offers no words of its tasks"):
        check_set(plan_of(tmp_path, "agentrl/Calculator-v0", {}, seeds=range(1), held_out={}))


# --- the command -------------------------------------------------------------------------------------------------


def agentrl(*arguments: object) -> commands.Finished:
    return commands.agentrl(*map(str, arguments), env={"COLUMNS": "160"})


def test_the_command(tmp_path: Path) -> None:
    rows = [question(random.Random(number), number) for number in range(4)]
    rows[1]["grader"] = "passes"
    (tmp_path / "judge.py").write_text(REWARD)
    line = ["validate", ROWS_ENV, "--all", "--set", f"rows={written(tmp_path / 'rows.jsonl', rows)}"]
    line += ["--set", f'rewards=["{tmp_path / "judge.py"}:correct"]']
    done = agentrl(*line, "--out", tmp_path / "out", "--drop", tmp_path / "tasks.skip", "--jobs", 1)
    assert done.code == 1, done.err
    said = " ".join(done.out.split())
    for words in (
        "lies: row 1: no-work-wins: wins: empty answer",
        "repeated plays with another outcome: 0 of",
        f"by the environment's argument skip = {tmp_path / 'tasks.skip'}",
        f'rollout.skip_tasks = ["{json.loads((tmp_path / "tasks.skip").read_text())["id"]}"]',
    ):
        assert words in said, (words, said)
    refused = agentrl(*line, "--repeat", 2, "--held-out", "rows=x")
    assert refused.code == 2 and "--repeat, --held-out: only with --out FOLDER" in refused.err


def test_the_page_has_every_reason() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "check-tasks.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    listed = {reason: row[0] for row in rows if row[0] in ORDER for reason in re.findall(r"`([\w-]+)`", row[2])}
    assert listed == {reason: verdict for reason, (verdict, _) in REASONS.items()}


def test_each_kind_of_defect_on_the_page_is_seeded() -> None:
    page = (Path(__file__).parents[2] / "benchmarks" / "task_checks.md").read_text()
    kinds = re.findall(r"^\| [a-z' ,-]+ \| `([\w-]+)` \|$", page, re.MULTILINE)
    of_questions = [reason for _, reason, _ in QUESTIONS]
    seeded = {reason for _, reason in HARBOR.values()} | {reason for _, _, reason in ROWS.values()} | {*of_questions}
    assert len(kinds) == 14 and set(kinds) <= seeded


def test_a_verdict_is_the_first_that_any_finding_has() -> None:
    names = ["grader-slow", "no-gold", "gold-loses", "no-work-wins", "outcome-changes"]
    findings = [Finding(name, "") for name in names]
    ranks = [verdict_of(findings[: count + 1]) for count in range(5)]
    assert (verdict_of([]), ranks) == ("ok", ["ok", "unknown", "impossible", "lies", "flaky"])
