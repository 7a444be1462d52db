"""Code-repair tasks: a seed and a split make one small module with one bug, its visible and its hidden tests.

Owns: how tasks are drawn, and which split a function belongs to. Knows nothing of prompts, sandboxes or rewards; it
runs only code that it made itself. The same seed gives the same task in every process.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Literal, get_args

from agentrl_environments.code_repair.mutation import Mutation, mutations, normal
from agentrl_environments.code_repair.templates import (
    ARGUMENT_NAMES,
    FUNCTION_NAMES,
    LEVELS,
    UNSEEN,
    Level,
    Template,
)

Split = Literal["train", "held_out", "held_out_templates"]
SPLITS: tuple[Split, ...] = get_args(Split)
_HELD_OUT_SHARE = 0.25
_VISIBLE_OF_BUGGY, _VISIBLE_OF_OTHERS, _HIDDEN = 3, 1, 3


@dataclass(frozen=True, slots=True)
class Check:
    """One test: `call` is an expression, `expected` the `repr` of its right value."""

    call: str
    expected: str


@dataclass(frozen=True, slots=True)
class RepairTask:
    """The policy gets `source`, which one mutation made from `repaired`: line `fix_line` (from 1)
    should read `fix_text`. `shuffled` tasks show the visible tests of another task of the same templates."""

    seed: int
    split: Split
    templates: tuple[str, ...]
    source: str
    repaired: str
    fix_line: int
    fix_text: str
    visible: tuple[Check, ...]
    hidden: tuple[Check, ...]
    shuffled: bool = False


@dataclass(frozen=True, slots=True)
class _Header:
    """The identity of a function, which belongs to one split as a whole."""

    template: Template
    name: str
    argument: str

    @property
    def split(self) -> Split:
        """Decided by a hash of the content, so that no function is in two splits, whatever its constants are."""
        if self.template in UNSEEN:
            return "held_out_templates"
        text = f"{self.template.name}:def {self.name}({self.argument})"
        share = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
        return "held_out" if share < _HELD_OUT_SHARE else "train"


@dataclass(frozen=True, slots=True)
class _Function:
    """A function with its tests; `buggy` is None for one that is right as it stands."""

    source: str
    buggy: Mutation | None
    visible: tuple[Check, ...]
    hidden: tuple[Check, ...]


def make_task(seed: int, split: Split, *, level: Level = "easy", shuffle_tests: bool = False) -> RepairTask:
    """Draw the task of a seed: some functions, one of them with one bug that the visible tests pin down.

    With `shuffle_tests` the visible tests belong to another task with the same headers: they still call these
    functions but say nothing of this bug. That measures how far a policy reads them."""
    rng = random.Random(f"code-repair/{split}/{level}/{seed}")
    templates, functions = LEVELS[level]
    headers = _headers(rng, split, UNSEEN if split == "held_out_templates" else templates, functions)
    broken = rng.randrange(functions)
    drawn = [_function(rng, header, bug=at == broken) for at, header in enumerate(headers)]
    source = "\n".join(function.buggy.source if function.buggy else function.source for function in drawn)
    repaired = "\n".join(function.source for function in drawn)
    mutation = drawn[broken].buggy
    assert mutation is not None
    fix_line = sum(function.source.count("\n") + 1 for function in drawn[:broken]) + mutation.line
    shown = drawn
    if shuffle_tests:
        shown = [_other(rng, headers[at], right, bug=at == broken) for at, right in enumerate(drawn)]
    return RepairTask(
        seed=seed,
        split=split,
        templates=tuple(header.template.name for header in headers),
        source=source,
        repaired=repaired,
        fix_line=fix_line,
        fix_text=repaired.split("\n")[fix_line - 1],
        visible=tuple(check for function in shown for check in function.visible),
        hidden=tuple(check for function in drawn for check in function.hidden),
        shuffled=shuffle_tests,
    )


def wrong_text(task: RepairTask) -> str | None:
    """A repair of the line by mistake: another edit of one node, with which a hidden test fails. Always the same one
    of a task; None if there is none."""
    calls = [check.call for check in task.hidden]
    right = tuple(check.expected for check in task.hidden)
    edits = [m for m in mutations(task.source) if m.line == task.fix_line and evaluate(m.source, calls) != right]
    if not edits:
        return None
    return random.Random(f"wrong/{task.split}/{task.seed}").choice(edits).text


def _headers(rng: random.Random, split: Split, templates: Sequence[Template], n: int) -> list[_Header]:
    """`n` headers of one split with different templates and names."""
    headers: list[_Header] = []
    while len(headers) < n:
        template = rng.choice(templates)
        header = _Header(template, rng.choice(FUNCTION_NAMES), rng.choice(ARGUMENT_NAMES[template.signature]))
        taken = any(header.template is other.template or header.name == other.name for other in headers)
        if header.split == split and not taken:
            headers.append(header)
    return headers


def _other(rng: random.Random, header: _Header, function: _Function, *, bug: bool) -> _Function:
    """Another function under the same header."""
    while True:
        other = _function(rng, header, bug=bug)
        if other.source != function.source:
            return other


def _function(rng: random.Random, header: _Header, *, bug: bool) -> _Function:
    """Draw until the tests that fit into the prompt pin the bug down."""
    while True:
        draft = header.template.draft(rng, header.argument)
        body = draft.body.replace("\n", "\n    ")
        source = normal(f"def {header.name}({header.argument}):\n    {body}")
        inputs = list(dict.fromkeys(draft.inputs))
        calls = [f"{header.name}({arguments})" for arguments in inputs]
        if not bug:
            checks = _checks(calls, evaluate(source, calls))
            n = _VISIBLE_OF_OTHERS
            return _Function(source, None, checks[:n], checks[: n + _HIDDEN])
        function = _with_bug(rng, source, draft.bugs, calls)
        if function is not None:
            return function


def _with_bug(rng: random.Random, source: str, kinds: Sequence[str], calls: list[str]) -> _Function | None:
    """Put one bug into `source` and choose the visible tests that, together, only the repaired function passes;
    None where `calls` cannot tell."""
    sites = sorted({m.site for m in mutations(source) if m.kind in kinds})
    site = rng.choice(sites)
    bug = rng.choice([m for m in mutations(source) if m.site == site])
    right = evaluate(source, calls)
    rivals = {evaluate(m.source, calls) for m in mutations(bug.source)} | {evaluate(bug.source, calls)}
    rivals.discard(right)
    if evaluate(bug.source, calls) == right:
        return None
    visible: list[int] = []
    while rivals:
        if len(visible) == _VISIBLE_OF_BUGGY:
            return None
        rejected = [sum(rival[at] != right[at] for rival in rivals) for at in range(len(calls))]
        best = max(range(len(calls)), key=lambda at: (at not in visible, rejected[at]))
        if not rejected[best]:
            return None
        visible.append(best)
        rivals = {rival for rival in rivals if rival[best] == right[best]}
    spare = [at for at in range(len(calls)) if at not in visible]
    while len(visible) < _VISIBLE_OF_BUGGY and len(spare) > 1:
        visible.append(spare.pop())
    checks = _checks(calls, right)
    # the visible calls are among the hidden tests: the others alone might not tell the bug from the repair
    hidden = [*spare[:_HIDDEN], *visible]
    return _Function(source, bug, tuple(checks[at] for at in sorted(visible)), tuple(checks[at] for at in hidden))


def _checks(calls: Sequence[str], values: Sequence[str]) -> tuple[Check, ...]:
    return tuple(Check(call, value) for call, value in zip(calls, values, strict=True))


@lru_cache(maxsize=4096)
def _load(source: str) -> dict[str, object]:
    namespace: dict[str, object] = {}
    exec(compile(source, "<task>", "exec"), namespace)  # only ever source made by templates and mutations
    return namespace


def evaluate(source: str, calls: Sequence[str]) -> tuple[str, ...]:
    """Each call's value as `repr`, or the name of its exception. Not for code of a model."""
    namespace = _load(source)
    values: list[str] = []
    for call in calls:
        try:
            values.append(repr(eval(call, namespace)))
        except Exception as error:
            values.append(type(error).__name__)
    return tuple(values)
