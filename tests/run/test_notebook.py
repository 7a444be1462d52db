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
from agentrl.run.dataset import reference_of
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


def script(monkeypatch: pytest.MonkeyPatch, file: Path, source: str) -> dict[str, Any]:
    """What a plain script defines, as `python FILE` leaves it in `__main__`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    main = types.ModuleType("__main__")
    main.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(source, str(file), "exec"), vars(main))
    return vars(main)


TRAINS = "done.append(1)\n"  # as a script that trains: who imports it would do so too


def test_what_a_script_without_a_guard_defines_is_imported_without_running_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "work" / "ten.py"
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "neighbour_of_ten.py").write_text("def half(x):\n    return x / 2\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "work"), *sys.path])
    source = "from neighbour_of_ten import half\ndone = []\n" + HELPERS + REWARD.replace("return float", "return half")
    made = script(monkeypatch, file, source + "class Mine(Base):\n    size = half(4)\n" + TRAINS)
    reference = reference_of(made["correct"], tmp_path / "runs" / "first")
    kind = reference_of(made["Mine"], tmp_path / "runs" / "first")
    monkeypatch.setattr(sys, "path", sys.path[1:])
    monkeypatch.delitem(sys.modules, "neighbour_of_ten")  # as in another process
    assert reference == f"{tmp_path / 'runs' / 'first.correct.py'}:correct"
    function = RewardFunction.of(reference)
    assert function(Answer(prompt=(), completion="it is 42", row={"answer": 42})) == 0.5
    mine: Any = registry.load_reference(kind)
    assert (mine.size, mine.at_least) == (2.0, 0)
    assert made["done"] == [1]


def test_a_script_with_a_guard_is_imported_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    guarded = f"done = []\nmodel = object()\n{REWARD}if __name__ == '__main__':\n    {TRAINS}"
    file = tmp_path / "ten.py"
    assert reference_of(script(monkeypatch, file, guarded)["correct"], tmp_path / "run") == f"{file}:correct"


def test_what_of_a_script_no_file_can_hold_is_named_with_both_ways_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = "model = object()\ndef judge(prompt, completion, row):\n    return model(completion)\n"
    names = script(monkeypatch, tmp_path / "ten.py", source)
    with pytest.raises(UsageError, match="'model' of the script is a object, which no source says: put it and") as told:
        reference_of(names["judge"], tmp_path / "run")
    assert str(told.value).endswith('; or put what trains under if __name__ == "__main__":')
