"""Tasks: deterministic, disjoint between splits, and solvable from what the policy sees, and only from that."""

from __future__ import annotations

import ast
import functools
import random
import subprocess
import sys

import pytest
from each_case import each_case

from agentrl_environments.code_repair.demonstrations import demonstrate
from agentrl_environments.code_repair.mutation import mutations, normal
from agentrl_environments.code_repair.tasks import SPLITS, RepairTask, Split, evaluate, make_task
from agentrl_environments.code_repair.templates import LEVELS, TRAINED, UNSEEN

N = 150
cached_task = functools.cache(make_task)


def tasks(split: Split, n: int = N, **kwargs: bool) -> list[RepairTask]:
    return [cached_task(seed, split, **kwargs) for seed in range(n)]


def with_line(source: str, line: int, text: str) -> str:
    lines = source.split("\n")
    lines[line - 1] = text
    return "\n".join(lines)


def passes(source: str, checks: object) -> bool:
    return evaluate(source, [c.call for c in checks]) == tuple(c.expected for c in checks)  # type: ignore[attr-defined]


def functions(source: str) -> set[str]:
    return {ast.unparse(node) for node in ast.parse(source).body}


def headers(source: str) -> set[str]:
    return {line for line in source.split("\n") if line.startswith("def ")}


@pytest.mark.medium
def test_a_seed_is_the_same_task_in_another_process() -> None:
    program = "from agentrl_environments.code_repair import make_task\nfor s in range(5): print(make_task(s, 'train'))"
    for hash_seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)}
        printed = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=300
        ).stdout
        assert printed.splitlines() == [str(make_task(seed, "train")) for seed in range(5)]


@pytest.mark.medium
@each_case("split", SPLITS)
def test_one_line_repairs_the_module_and_the_hidden_tests_know(split: Split) -> None:
    for task in tasks(split):
        assert with_line(task.source, task.fix_line, task.fix_text) == task.repaired
        assert passes(task.repaired, task.visible) and passes(task.repaired, task.hidden)
        assert not passes(task.source, task.visible) and not passes(task.source, task.hidden)


def test_the_visible_tests_pin_the_repair_down() -> None:
    """Of all single-node edits, those that pass the visible tests pass the hidden ones too."""
    for task in tasks("train", 60):
        for edit in mutations(task.source):
            if passes(edit.source, task.visible):
                assert passes(edit.source, task.hidden), (task, edit)


@pytest.mark.medium
def test_no_function_is_in_two_splits() -> None:
    """Neither as it should be, nor with its bug, nor as the one that is right; not even its header with other code."""
    train, held_out = tasks("train", 600), tasks("held_out", 300)
    in_train = set[str]().union(*(functions(t.source) | functions(t.repaired) for t in train))
    in_held_out = set[str]().union(*(functions(t.source) | functions(t.repaired) for t in held_out))
    assert not in_train & in_held_out
    assert {t.source for t in train}.isdisjoint(t.source for t in held_out)
    kinds_train = {(k, h) for t in train for k, h in zip(t.templates, headers_in_order(t), strict=True)}
    kinds_held_out = {(k, h) for t in held_out for k, h in zip(t.templates, headers_in_order(t), strict=True)}
    assert not kinds_train & kinds_held_out


def headers_in_order(task: RepairTask) -> list[str]:
    return [line for line in task.repaired.split("\n") if line.startswith("def ")]


def test_templates_of_the_second_held_out_set_are_in_no_other() -> None:
    unseen = {template.name for template in UNSEEN}
    trained = {template.name for template in TRAINED}
    easy = {template.name for template in LEVELS["easy"][0]}
    assert not unseen & trained
    for split in SPLITS:
        used = {name for task in tasks(split) for name in task.templates}
        assert used == (unseen if split == "held_out_templates" else easy)


def test_shuffled_tests_keep_module_and_hidden_tests_and_call_its_functions() -> None:
    misled = 0
    for task, shuffled in zip(tasks("held_out"), tasks("held_out", shuffle_tests=True), strict=True):
        assert (shuffled.source, shuffled.hidden, shuffled.repaired) == (task.source, task.hidden, task.repaired)
        names = {header[4:].split("(")[0] for header in headers(task.source)}
        assert {check.call.split("(")[0] for check in shuffled.visible} == names
        misled += not passes(task.repaired, shuffled.visible)
    assert misled == N  # the visible tests never accept the repair


@each_case(
    "source, edits",
    [
        (
            "def f(x):\n    return x + 2",
            {f"    return x {op} 2" for op in "-*"} | {f"    return x + {n}" for n in (0, 1, *range(3, 10))},
        ),
        ("def f(x):\n    return x < x", {f"    return x {op} x" for op in ("<=", ">", ">=")}),
        ("def f(x):\n    return max(x)", {f"    return {name}(x)" for name in ("min", "sum", "len")}),
        ("def f(x):\n    return max(x, x)", {"    return min(x, x)"}),
        ("def f(x):\n    x += x\n    return x", {"    x -= x", "    x *= x"}),
    ],
)
def test_mutations_of_small_modules(source: str, edits: set[str]) -> None:
    assert normal(source) == source
    found = mutations(source)
    assert {mutation.text for mutation in found} == edits and len(found) == len(edits)
    assert all(with_line(source, mutation.line, mutation.text) == mutation.source for mutation in found)


@pytest.mark.medium
def test_the_expert_is_right_as_often_as_it_is_told_and_never_repeats_itself() -> None:
    rng = random.Random(0)
    first = [demonstrate(task, rng, skill=0.3) for task in tasks("train", 600)]
    share = sum(d.right[0] for d in first) / len(first)
    assert abs(share - 0.3) < 4 * (0.3 * 0.7 / 600) ** 0.5
    edits = [d.turns[0][0] == d.turns[1][0] for d in first]
    assert not any(edits)
