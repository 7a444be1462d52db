"""Makes the rows beside this file, in the format of GSM8K: `python examples/recipes/gsm8k/problems.py`.

Two thirds of the problems take one step with small numbers, for a model of 135 million parameters. The others take two
steps. No held-out question is among those to train on.

`python examples/recipes/gsm8k/problems.py runs/gsm8k.jsonl` writes 240 other problems with their answers instead, which
show such a model how to end: demonstrations for `warm.toml`.
"""

from __future__ import annotations

import json
import random
import sys
import tomllib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("Ana", "Bo", "Chen", "Dara", "Emil", "Fay", "Goran", "Hina")
THINGS = ("coins", "books", "stamps", "apples", "pens", "shells")
FILES = {"train.jsonl": 480, "held_out.jsonl": 64}


def easy(dice: random.Random, name: str, things: str) -> tuple[str, str, int]:
    a, b = dice.randint(2, 20), dice.randint(2, 10)
    if dice.random() < 0.5:
        return (
            f"{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
            f"{a} + {b}",
            a + b,
        )
    return f"{name} has {a + b} {things} and gives {b} away. How many are left?", f"{a + b} - {b}", a


def two_steps(dice: random.Random, name: str, things: str) -> tuple[str, str, int]:
    rows, each, other = dice.randint(2, 9), dice.randint(2, 9), dice.randint(1, 30)
    match dice.randrange(3):
        case 0:
            question = f"{name} has {other} {things} and buys {rows} boxes of {each} {things} each."
            question += f" How many {things} does {name} have now?"
            return question, f"{rows} * {each} = {rows * each}. {other} + {rows * each}", other + rows * each
        case 1:
            other = min(other, rows * each - 1)
            question = f"A shelf has {rows} rows of {each} {things}. {name} takes {other} away. How many are left?"
            return question, f"{rows} * {each} = {rows * each}. {rows * each} - {other}", rows * each - other
        case _:
            question = f"{name} shares {rows * each} {things} equally among {rows} friends, then finds {other} more."
            question += " How many do one friend's share and the new ones make together?"
            return question, f"{rows * each} / {rows} = {each}. {each} + {other}", each + other


def problems(seed: int = 0) -> Iterator[dict[str, str]]:
    """Endlessly many, each question once."""
    dice, seen = random.Random(seed), set[str]()
    while True:
        kind = easy if dice.random() < 2 / 3 else two_steps
        question, steps, answer = kind(dice, dice.choice(NAMES), dice.choice(THINGS))
        if question not in seen:
            seen.add(question)
            yield {"question": question, "answer": f"{steps} = {answer}.\n#### {answer}"}


def files() -> dict[str, str]:
    """The text of each file."""
    made = problems()
    return {name: "".join(json.dumps(next(made)) + "\n" for _ in range(count)) for name, count in FILES.items()}


def demonstrations(count: int = 240) -> str:
    """Problems that no file has, each as the run asks it and with its answer."""
    asked = tomllib.loads((HERE / "run.toml").read_text())["env"]["kwargs"]["prompt"]
    known = {json.loads(line)["question"] for text in files().values() for line in text.splitlines()}
    others = (row for row in problems(seed=1) if row["question"] not in known)
    rows = list(islice(others, count))
    return "".join(json.dumps({"prompt": asked.format_map(row), "completion": row["answer"]}) + "\n" for row in rows)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(demonstrations())
    else:
        for name, text in files().items():
            (HERE / name).write_text(text)
