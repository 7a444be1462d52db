"""What a notebook's cell defines is written beside the run, and other processes can import it."""

from __future__ import annotations

import linecache
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl import registry
from agentrl.env.reward_functions import Answer, RewardFunction
from agentrl.errors import UsageError
from agentrl.run.dataset.notebook import reference_of
from agentrl.run.trainer import Trainer

Cell = Callable[[str], dict[str, Any]]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cell]:
    """Runs a source as IPython does: in a `__main__` without a file, its lines known to `linecache`."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    numbers = iter(range(100))

    def run(source: str) -> dict[str, Any]:
        name = f"<ipython-input-{next(numbers)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), vars(main))
        return vars(main)

    yield run
    for name in [name for name in linecache.cache if name.startswith("<ipython-input-")]:
        del linecache.cache[name]


HELPERS = """
import json
import math as maths
import re
from fractions import Fraction
BONUS = {"yes": (0.5, [1])}
NUMBER = re.compile(r"-?\\d+", re.I)

def number(text):
    found = NUMBER.search(text)
    return None if found is None else Fraction(found[0])

class Base:
    at_least: "Fraction" = Fraction(0)
"""
REWARD = """
def correct(prompt, completion, row) -> float:
    '''Judge.'''
    def inside(x):
        return maths.floor(x)
    said = number(completion)
    return float(said is not None and inside(said) == row["answer"]) + BONUS.get(completion, (0.0,))[0]
"""


def test_a_function_of_a_cell_is_imported_with_what_its_source_names(cell: Cell, tmp_path: Path) -> None:
    cell(HELPERS)
    reference = reference_of(cell(REWARD)["correct"], tmp_path / "runs" / "first")
    assert reference == f"{tmp_path / 'runs' / 'first.correct.py'}:correct"
    written = (tmp_path / "runs" / "first.correct.py").read_text()
    assert "import json" not in written and "class Base" not in written, "only what it needs"
    function = RewardFunction.of(reference)
    for completion, expected in (("it is 42", 1.0), ("41", 0.0), ("none", 0.0), ("yes", 0.5)):
        assert function(Answer(prompt=(), completion=completion, row={"answer": 42})) == expected


def test_a_class_of_a_cell_and_its_bases_are_imported(cell: Cell, tmp_path: Path) -> None:
    cell(HELPERS)
    made = cell("class Mine(Base):\n    def both(self):\n        return number('3') + self.at_least\n")
    reference = reference_of(made["Mine"], tmp_path / "run")
    assert registry.load_reference(reference)().both() == 3


def test_what_no_file_can_hold_is_named_with_the_reason(cell: Cell, tmp_path: Path) -> None:
    names = cell("model = object()\ndef judge(prompt, completion, row):\n    return model(completion)\n")
    with pytest.raises(UsageError, match=r"'model' of the notebook is a object, which no source says: put it and"):
        reference_of(names["judge"], tmp_path / "run")
    names = cell("other = judge\ndef by(prompt, completion, row):\n    return other(prompt)\n")
    with pytest.raises(UsageError, match=r"'other' of the notebook is 'judge' by another name"):
        reference_of(names["by"], tmp_path / "run")
    names = cell("short = lambda prompt, completion, row: 1.0\n")
    with pytest.raises(UsageError, match="must be a function at module level"):
        reference_of(names["short"], tmp_path / "run")
    exec(compile("def typed(prompt, completion, row): return 1.0", "<stdin>", "exec"), names)
    with pytest.raises(UsageError, match=r"'typed' is defined interactively, and its source is not known"):
        reference_of(names["typed"], tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_takes_functions_of_a_cell_and_one_alone(cell: Cell, tmp_path: Path) -> None:
    cell(HELPERS)
    judge = cell(REWARD)["correct"]
    rows = [{"prompt": "2 + 2?", "answer": 4}]
    one = Trainer(model="agentrl/tiny-coder", dataset=rows, reward_funcs=judge, out=tmp_path / "run")
    assert one.config.env.kwargs["rewards"] == [f"{tmp_path / 'run.correct.py'}:correct"]
    named = Trainer(model="agentrl/tiny-coder", dataset=rows, reward_funcs="mine.py:f", out=tmp_path / "run")
    assert named.config.env.kwargs["rewards"] == ["mine.py:f"]
    assert re.search(r"^rewards|\"rewards\" = \[\"mine\.py:f\"\]", (tmp_path / "run.toml").read_text(), re.M)
