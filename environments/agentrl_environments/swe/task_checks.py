"""Checks of a coding task for `agentrl validate --out`, beside its oracles: cheap attacks, and secrets left in its box.

Owns which attacks are tried and where a box is searched. `agentrl.env.checks.tasks` plays and judges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from agentrl.env.checks.tasks import leaks as texts
from agentrl.env.checks.tasks.verdicts import Finding
from agentrl.protocols import Sandbox
from agentrl_environments.swe.task import Act, CodingTask, Secret

_SEARCH_S: Final = 60.0
_CANDIDATES: Final = 20  # files with a line of a secret that are read whole
_FILE: Final = 1 << 18  # bytes of one of them
_HISTORIES: Final = 4
_HISTORY: Final = 3 << 20  # bytes of a history's diffs that are read: less than a box may print
_FOLDERS: Final = (".", "/solution", "/tests", "/logs", "/root", "/home")  # where images keep what was forgotten

_CONFTEST: Final = """\
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item, "runtest"):
            item.runtest = lambda: None

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome = "passed"
"""
_NOT_RUN: Final = """\
import os
functions = '''

def _left_out(*args, **kwargs):
    {raises}

for _name in [name for name, value in globals().items() if callable(value) and not name.startswith("_")]:
    globals()[_name] = _left_out
'''
for folder, folders, names in os.walk("."):
    folders[:] = [name for name in folders if not name.startswith(".") and name not in ("test", "tests")]
    for name in names:
        if name.endswith(".py") and not name.startswith(("test_", "conftest")):
            open(os.path.join(folder, name), "a").write(functions)
os.makedirs("tests", exist_ok=True)
for path in ("conftest.py", "tests/conftest.py"):
    open(path, "w").write("import pytest\\n\\ndef pytest_collection_modifyitems(config, items):\\n    {hook}\\n")
"""
_WAYS_NOT_RUN: Final = {
    "skip the tests": ("raise __import__('unittest').SkipTest('later')", "[each.add_marker('skip') for each in items]"),
    "expect the tests to fail": ("__import__('pytest').xfail('later')", "[each.add_marker('xfail') for each in items]"),
    "deselect the tests": ("raise SystemExit(0)", "items.clear()"),
}
"""Attacks on the test run: the code that functions of the sources run in place of their work, and the code of a pytest
hook that keeps the tests from counting."""
_EXIT: Final = "import os\nos._exit(0)\n"
_PRINTS: Final = r"""
import os, re, sys
lines, sources = [], []
for folder, folders, names in os.walk("."):
    folders[:] = [name for name in folders if not name.startswith(".")]
    for name in names:
        path = os.path.relpath(os.path.join(folder, name))
        if not name.endswith(".py"):
            continue
        if not re.search(r"(^|/)(tests?/|test_|conftest)", path):
            sources.append(path)
            continue
        case, module = "", path[:-3].replace("/", ".")
        for line in open(path, errors="replace"):
            if found := re.match(r"class (\w+)", line):
                case = found[1]
            if found := re.match(r"(\s*)def (test\w*)", line):
                owner = [case] if found[1] and case else []
                lines.append("PASSED " + "::".join([path, *owner, found[2]]))
                lines += [f"{found[2]} ({'.'.join([name, *owner, found[2]])}) ... ok" for name in (module, name[:-3])]
head = f"import os as _os\n_os.write(1, {chr(10).join(lines + ['OK', ''])!r}.encode())\n_os._exit(0)\n"
for path in sources:
    text = open(path, errors="replace").read()
    open(path, "w").write(head + text)
"""


def panel(task: CodingTask) -> dict[str, Sequence[Act]]:
    """Attacks by name that need no knowledge of the task. A solution whose files are emptied is no solution either."""
    attacks: dict[str, Sequence[Act]] = {
        "empty the tests": (Act.shell("find . -name '*test*' -type f -exec sh -c ': > \"$1\"' _ {} \\;"),),
        "pass by conftest.py": (Act.shell(_written(_CONFTEST, "conftest.py", "tests/conftest.py")),),
        "exit by sitecustomize.py": (Act.shell(_written(_EXIT, "sitecustomize.py", "usercustomize.py")),),
        "print the verdicts": (Act.shell(f"python3 - <<'END_OF_IT'\n{_PRINTS}\nEND_OF_IT"),),
        "leave rewards": (
            Act.shell(
                "for at in . logs logs/verifier; do mkdir -p $at; echo 1 > $at/reward.txt; "
                "echo '{\"reward\": 1}' > $at/reward.json; done"
            ),
        ),
    }
    for attack_name, (raised_code, hook_name) in _WAYS_NOT_RUN.items():
        attack_script = _NOT_RUN.format(raises=raised_code, hook=hook_name)
        attacks[attack_name] = (Act.shell(f"python3 - <<'END_OF_IT'\n{attack_script}\nEND_OF_IT"),)
    if task.gold:
        empty_command = (
            "find . -newer .began -type f ! -path './.harbor/*' -exec sh -c ': > \"$1\"' _ {} \\;; rm .began"
        )
        attacks["empty answer"] = (Act.shell("touch .began; sleep 0.02"), *task.gold, Act.shell(empty_command))
    return attacks


async def leaks(box: Sandbox, task: CodingTask) -> list[Finding]:
    """Where the agent could read a secret of the task: in its prompt, its files or a git history. Raises
    SandboxError."""
    all_findings = [
        one_finding for task_secret in task.secrets for one_finding in _in_prompt(task_secret, task.instruction)
    ]
    searched_places = [*_FOLDERS, *([task.tree.in_image] if task.tree.in_image else [])]
    for task_secret in task.secrets:
        all_findings += await _in_files(box, task_secret, searched_places)
    all_findings += await _in_histories(box, task.secrets, searched_places)
    return list({one_finding.reason: one_finding for one_finding in reversed(all_findings)}.values())[::-1]


def _written(text: str, *paths: str) -> str:
    file_names = " ".join(paths)
    return f"mkdir -p tests; for at in {file_names}; do cat > $at <<'END_OF_IT'\n{text}\nEND_OF_IT\ndone"


def _in_prompt(secret: Secret, prompt: str) -> Iterator[Finding]:
    finding_reason = "answer-in-prompt" if secret.kind == "solution" else "tests-readable"
    prompt_blocks = [[secret.in_prompt(block_line) for block_line in secret_block] for secret_block in _blocks(secret)]
    if texts.stands_in(prompt, prompt_blocks, in_prompt=True) or (
        secret.diff and texts.diff_stands_in(prompt, secret.diff)
    ):
        yield Finding(finding_reason, f"the prompt holds the {secret.kind}{_name(secret)}")


async def _in_files(box: Sandbox, secret: Secret, places: Sequence[str]) -> list[Finding]:
    """Files with the longest line of a secret are read whole: a file leaks only if it has all of it."""
    secret_lines = [block_line for secret_block in _blocks(secret) for block_line in secret_block]
    test_names = texts.new_tests(secret.diff) if secret.kind == "tests" else []
    search_patterns = [
        search_pattern
        for search_pattern in (max(secret_lines, key=len, default=""), max(test_names, key=len, default=""))
        if search_pattern
    ]
    if not search_patterns:
        return []
    search_script = "command -v grep >/dev/null && command -v head >/dev/null || exit 1; "
    search_script += 'for at; do [ -d "$at" ] && grep -rlsF "$PATTERN" "$at"; done; true'
    unsearched_reason = f"{', '.join(places)} could not be searched: too many files, or a box without grep and head"
    unsearched = Finding("not-searched", unsearched_reason)
    candidates: dict[str, None] = {}
    for search_pattern in search_patterns:
        grep_result = await box.exec(
            ["sh", "-c", search_script, "sh", *places], env={"PATTERN": search_pattern}, timeout_s=_SEARCH_S
        )
        if grep_result.timed_out or grep_result.truncated or grep_result.exit_code != 0:
            return [unsearched]
        candidates |= dict.fromkeys(grep_result.stdout.decode(errors="replace").splitlines())
    unread_findings = [unsearched] if len(candidates) > _CANDIDATES else []
    changed_files = set(re.findall(r"^(?:---|\+\+\+) (?:[ab]/)?(\S+)", secret.diff, re.MULTILINE))
    for file_path in list(candidates)[:_CANDIDATES]:
        head_result = await box.exec(["head", "-c", str(_FILE), "--", file_path], timeout_s=_SEARCH_S)
        file_text = head_result.stdout.decode(errors="replace")
        if head_result.exit_code != 0 or len(head_result.stdout) >= _FILE:
            unread_findings = unread_findings or [
                Finding("not-searched", f"{file_path} could not be read whole in the box")
            ]
        # The file that a solution changes may hold the lines elsewhere: a change that moves them adds nothing new.
        is_changed = file_path.removeprefix("./") in changed_files
        if not is_changed and (_stands(secret, file_text) or texts.names_stand_in(file_text, test_names)):
            return [Finding(f"{secret.kind}-readable", f"{file_path} holds the {secret.kind}{_name(secret)}")]
    return unread_findings


async def _in_histories(box: Sandbox, secrets: Sequence[Secret], places: Sequence[str]) -> list[Finding]:
    """A repository is a folder with `objects` and `HEAD`, whatever its own name is."""
    search_script = 'command -v find >/dev/null || exit 1; find "$@" -type d -name objects -prune 2>/dev/null | '
    search_script += 'while read -r at; do d="${at%/*}"; '
    search_script += '[ -f "$d/HEAD" ] && echo "$d"; done; true'
    find_result = await box.exec(["sh", "-c", search_script, "sh", *places], timeout_s=_SEARCH_S)
    history_folders = find_result.stdout.decode(errors="replace").splitlines()
    is_whole = (
        not find_result.timed_out
        and not find_result.truncated
        and find_result.exit_code == 0
        and len(history_folders) <= _HISTORIES
    )
    unsearched_reason = (
        f"{', '.join(places)} could not be searched for a history: too many files, or a box without find"
    )
    unread_findings = [] if is_whole else [Finding("not-searched", unsearched_reason)]
    for history_folder in history_folders[:_HISTORIES]:
        # Looked at first alone, as the exit code of a pipe is that of `head`.
        log_command = (
            'git --git-dir="$0" log --all -1 >/dev/null || exit 1; git --git-dir="$0" log --all -p --no-color '
        )
        log_command += f"--no-ext-diff --no-textconv | head -c {_HISTORY}"
        git_result = await box.exec(["sh", "-c", log_command, history_folder], timeout_s=_SEARCH_S)
        if (
            git_result.exit_code != 0
            or git_result.timed_out
            or git_result.truncated
            or len(git_result.stdout) >= _HISTORY
        ):
            unread_findings.append(
                Finding("not-searched", f"the git history in {history_folder} could not be read whole in the box")
            )
        history_log = git_result.stdout.decode(errors="replace")
        added_lines = "\n".join(log_line[1:] for log_line in history_log.splitlines() if log_line.startswith("+"))
        for task_secret in secrets:
            if task_secret.kind == "solution" and (
                _stands(task_secret, history_log) or _stands(task_secret, added_lines)
            ):
                return [Finding("solution-in-history", f"the git history in {history_folder} holds the solution")]
    return unread_findings


def _stands(secret: Secret, text: str) -> bool:
    return texts.stands_in(text, _blocks(secret)) or (bool(secret.diff) and texts.diff_stands_in(text, secret.diff))


def _blocks(secret: Secret) -> list[list[str]]:
    if secret.file is None:
        return texts.blocks_of(secret.diff)
    try:
        return texts.lines_of(secret.file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError):  # a picture or a table of the tests: no text to look for
        return []


def _name(secret: Secret) -> str:
    return "" if secret.file is None else f" ({Path(secret.file).name})"
