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
        header_text = f"{self.template.name}:def {self.name}({self.argument})"
        hash_share = int.from_bytes(blake2b(header_text.encode(), digest_size=8).digest(), "big") / 2**64
        return "held_out" if hash_share < _HELD_OUT_SHARE else "train"


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
    generator = random.Random(f"code-repair/{split}/{level}/{seed}")
    templates, functions = LEVELS[level]
    task_headers = _headers(generator, split, UNSEEN if split == "held_out_templates" else templates, functions)
    broken_index = generator.randrange(functions)
    drawn_functions = [
        _function(generator, task_header, bug=function_index == broken_index)
        for function_index, task_header in enumerate(task_headers)
    ]
    broken_source = "\n".join(
        function.buggy.source if function.buggy else function.source for function in drawn_functions
    )
    repaired_source = "\n".join(function.source for function in drawn_functions)
    mutation = drawn_functions[broken_index].buggy
    assert mutation is not None
    fix_line = sum(function.source.count("\n") + 1 for function in drawn_functions[:broken_index]) + mutation.line
    shown_functions = drawn_functions
    if shuffle_tests:
        shown_functions = [
            _other(generator, task_headers[function_index], right_function, bug=function_index == broken_index)
            for function_index, right_function in enumerate(drawn_functions)
        ]
    return RepairTask(
        seed=seed,
        split=split,
        templates=tuple(task_header.template.name for task_header in task_headers),
        source=broken_source,
        repaired=repaired_source,
        fix_line=fix_line,
        fix_text=repaired_source.split("\n")[fix_line - 1],
        visible=tuple(call_check for function in shown_functions for call_check in function.visible),
        hidden=tuple(call_check for function in drawn_functions for call_check in function.hidden),
        shuffled=shuffle_tests,
    )


def wrong_text(task: RepairTask) -> str | None:
    """A repair of the line by mistake: another edit of one node, with which a hidden test fails. Always the same one
    of a task; None if there is none."""
    hidden_calls = [hidden_check.call for hidden_check in task.hidden]
    right_values = tuple(hidden_check.expected for hidden_check in task.hidden)
    wrong_edits = [
        mutation
        for mutation in mutations(task.source)
        if mutation.line == task.fix_line and evaluate(mutation.source, hidden_calls) != right_values
    ]
    if not wrong_edits:
        return None
    return random.Random(f"wrong/{task.split}/{task.seed}").choice(wrong_edits).text


def _headers(rng: random.Random, split: Split, templates: Sequence[Template], n: int) -> list[_Header]:
    """`n` headers of one split with different templates and names."""
    drawn_headers: list[_Header] = []
    while len(drawn_headers) < n:
        template = rng.choice(templates)
        new_header = _Header(template, rng.choice(FUNCTION_NAMES), rng.choice(ARGUMENT_NAMES[template.signature]))
        is_taken = any(
            new_header.template is earlier_header.template or new_header.name == earlier_header.name
            for earlier_header in drawn_headers
        )
        if new_header.split == split and not is_taken:
            drawn_headers.append(new_header)
    return drawn_headers


def _other(rng: random.Random, header: _Header, function: _Function, *, bug: bool) -> _Function:
    """Another function under the same header."""
    while True:
        other_function = _function(rng, header, bug=bug)
        if other_function.source != function.source:
            return other_function


def _function(rng: random.Random, header: _Header, *, bug: bool) -> _Function:
    """Draw until the tests that fit into the prompt pin the bug down."""
    while True:
        function_draft = header.template.draft(rng, header.argument)
        indented_body = function_draft.body.replace("\n", "\n    ")
        function_source = normal(f"def {header.name}({header.argument}):\n    {indented_body}")
        call_inputs = list(dict.fromkeys(function_draft.inputs))
        function_calls = [f"{header.name}({arguments})" for arguments in call_inputs]
        if not bug:
            call_checks = _checks(function_calls, evaluate(function_source, function_calls))
            visible_count = _VISIBLE_OF_OTHERS
            return _Function(function_source, None, call_checks[:visible_count], call_checks[: visible_count + _HIDDEN])
        function = _with_bug(rng, function_source, function_draft.bugs, function_calls)
        if function is not None:
            return function


def _with_bug(rng: random.Random, source: str, kinds: Sequence[str], calls: list[str]) -> _Function | None:
    """Put one bug into `source` and choose the visible tests that, together, only the repaired function passes;
    None where `calls` cannot tell."""
    bug_sites = sorted({mutation.site for mutation in mutations(source) if mutation.kind in kinds})
    bug_site = rng.choice(bug_sites)
    drawn_bug = rng.choice([mutation for mutation in mutations(source) if mutation.site == bug_site])
    right_values = evaluate(source, calls)
    rival_values = {evaluate(mutation.source, calls) for mutation in mutations(drawn_bug.source)} | {
        evaluate(drawn_bug.source, calls)
    }
    rival_values.discard(right_values)
    if evaluate(drawn_bug.source, calls) == right_values:
        return None
    visible_calls: list[int] = []
    while rival_values:
        if len(visible_calls) == _VISIBLE_OF_BUGGY:
            return None
        rejection_counts = [
            sum(one_rival[call_index] != right_values[call_index] for one_rival in rival_values)
            for call_index in range(len(calls))
        ]
        best_call = max(range(len(calls)), key=lambda at: (at not in visible_calls, rejection_counts[at]))
        if not rejection_counts[best_call]:
            return None
        visible_calls.append(best_call)
        rival_values = {one_rival for one_rival in rival_values if one_rival[best_call] == right_values[best_call]}
    spare_calls = [call_index for call_index in range(len(calls)) if call_index not in visible_calls]
    while len(visible_calls) < _VISIBLE_OF_BUGGY and len(spare_calls) > 1:
        visible_calls.append(spare_calls.pop())
    call_checks = _checks(calls, right_values)
    # the visible calls are among the hidden tests: the others alone might not tell the bug from the repair
    hidden_calls = [*spare_calls[:_HIDDEN], *visible_calls]
    return _Function(
        source,
        drawn_bug,
        tuple(call_checks[call_index] for call_index in sorted(visible_calls)),
        tuple(call_checks[call_index] for call_index in hidden_calls),
    )


def _checks(calls: Sequence[str], values: Sequence[str]) -> tuple[Check, ...]:
    return tuple(Check(test_call, call_value) for test_call, call_value in zip(calls, values, strict=True))


@lru_cache(maxsize=4096)
def _load(source: str) -> dict[str, object]:
    namespace: dict[str, object] = {}
    exec(compile(source, "<task>", "exec"), namespace)  # only ever source made by templates and mutations
    return namespace


def evaluate(source: str, calls: Sequence[str]) -> tuple[str, ...]:
    """Each call's value as `repr`, or the name of its exception. Not for code of a model."""
    namespace = _load(source)
    call_values: list[str] = []
    for test_call in calls:
        try:
            call_values.append(repr(eval(test_call, namespace)))
        except Exception as error:
            call_values.append(type(error).__name__)
    return tuple(call_values)
