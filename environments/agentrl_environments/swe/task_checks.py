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
"""What functions of the sources do in place of their work, and what a hook of pytest does with the tests."""
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
    for name, (raises, hook) in _WAYS_NOT_RUN.items():
        script = _NOT_RUN.format(raises=raises, hook=hook)
        attacks[name] = (Act.shell(f"python3 - <<'END_OF_IT'\n{script}\nEND_OF_IT"),)
    if task.gold:
        emptied = "find . -newer .began -type f ! -path './.harbor/*' -exec sh -c ': > \"$1\"' _ {} \\;; rm .began"
        attacks["empty answer"] = (Act.shell("touch .began; sleep 0.02"), *task.gold, Act.shell(emptied))
    return attacks


async def leaks(box: Sandbox, task: CodingTask) -> list[Finding]:
    """Where the agent could read a secret of the task: in its prompt, its files or a git history. Raises
    SandboxError."""
    findings = [finding for secret in task.secrets for finding in _in_prompt(secret, task.instruction)]
    places = [*_FOLDERS, *([task.tree.in_image] if task.tree.in_image else [])]
    for secret in task.secrets:
        findings += await _in_files(box, secret, places)
    findings += await _in_histories(box, task.secrets, places)
    return list({finding.reason: finding for finding in reversed(findings)}.values())[::-1]


def _written(text: str, *paths: str) -> str:
    files = " ".join(paths)
    return f"mkdir -p tests; for at in {files}; do cat > $at <<'END_OF_IT'\n{text}\nEND_OF_IT\ndone"


def _in_prompt(secret: Secret, prompt: str) -> Iterator[Finding]:
    reason = "answer-in-prompt" if secret.kind == "solution" else "tests-readable"
    blocks = [[secret.in_prompt(line) for line in block] for block in _blocks(secret)]
    if texts.stands_in(prompt, blocks, in_prompt=True) or (secret.diff and texts.diff_stands_in(prompt, secret.diff)):
        yield Finding(reason, f"the prompt holds the {secret.kind}{_name(secret)}")


async def _in_files(box: Sandbox, secret: Secret, places: Sequence[str]) -> list[Finding]:
    """Files with the longest line of a secret are read whole: a file leaks only if it has all of it."""
    lines = [line for block in _blocks(secret) for line in block]
    names = texts.new_tests(secret.diff) if secret.kind == "tests" else []
    patterns = [pattern for pattern in (max(lines, key=len, default=""), max(names, key=len, default="")) if pattern]
    if not patterns:
        return []
    script = "command -v grep >/dev/null && command -v head >/dev/null || exit 1; "
    script += 'for at; do [ -d "$at" ] && grep -rlsF "$PATTERN" "$at"; done; true'
    why = f"{', '.join(places)} could not be searched: too many files, or a box without grep and head"
    unsearched = Finding("not-searched", why)
    files: dict[str, None] = {}
    for pattern in patterns:
        listed = await box.exec(["sh", "-c", script, "sh", *places], env={"PATTERN": pattern}, timeout_s=_SEARCH_S)
        if listed.timed_out or listed.truncated or listed.exit_code != 0:
            return [unsearched]
        files |= dict.fromkeys(listed.stdout.decode(errors="replace").splitlines())
    unread = [unsearched] if len(files) > _CANDIDATES else []
    changed_files = set(re.findall(r"^(?:---|\+\+\+) (?:[ab]/)?(\S+)", secret.diff, re.MULTILINE))
    for path in list(files)[:_CANDIDATES]:
        result = await box.exec(["head", "-c", str(_FILE), "--", path], timeout_s=_SEARCH_S)
        text = result.stdout.decode(errors="replace")
        if result.exit_code != 0 or len(result.stdout) >= _FILE:
            unread = unread or [Finding("not-searched", f"{path} could not be read whole in the box")]
        # The file that a solution changes may hold the lines elsewhere: a change that moves them adds nothing new.
        is_changed = path.removeprefix("./") in changed_files
        if not is_changed and (_stands(secret, text) or texts.names_stand_in(text, names)):
            return [Finding(f"{secret.kind}-readable", f"{path} holds the {secret.kind}{_name(secret)}")]
    return unread


async def _in_histories(box: Sandbox, secrets: Sequence[Secret], places: Sequence[str]) -> list[Finding]:
    """A repository is a folder with `objects` and `HEAD`, whatever its own name is."""
    script = 'command -v find >/dev/null || exit 1; find "$@" -type d -name objects -prune 2>/dev/null | '
    script += 'while read -r at; do d="${at%/*}"; '
    script += '[ -f "$d/HEAD" ] && echo "$d"; done; true'
    listed = await box.exec(["sh", "-c", script, "sh", *places], timeout_s=_SEARCH_S)
    folders = listed.stdout.decode(errors="replace").splitlines()
    is_whole = not listed.timed_out and not listed.truncated and listed.exit_code == 0 and len(folders) <= _HISTORIES
    why = f"{', '.join(places)} could not be searched for a history: too many files, or a box without find"
    unread = [] if is_whole else [Finding("not-searched", why)]
    for folder in folders[:_HISTORIES]:
        # Looked at first alone, as the exit code of a pipe is that of `head`.
        command = 'git --git-dir="$0" log --all -1 >/dev/null || exit 1; git --git-dir="$0" log --all -p --no-color '
        command += f"--no-ext-diff --no-textconv | head -c {_HISTORY}"
        git = await box.exec(["sh", "-c", command, folder], timeout_s=_SEARCH_S)
        if git.exit_code != 0 or git.timed_out or git.truncated or len(git.stdout) >= _HISTORY:
            unread.append(Finding("not-searched", f"the git history in {folder} could not be read whole in the box"))
        log = git.stdout.decode(errors="replace")
        plain = "\n".join(line[1:] for line in log.splitlines() if line.startswith("+"))
        for secret in secrets:
            if secret.kind == "solution" and (_stands(secret, log) or _stands(secret, plain)):
                return [Finding("solution-in-history", f"the git history in {folder} holds the solution")]
    return unread


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
