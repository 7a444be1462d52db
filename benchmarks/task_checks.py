"""The questions of reasoning-gym as rows for `agentrl validate --out`: which of them reward the wrong thing?

    export PYTHONHASHSEED=0
    python benchmarks/task_checks.py rows.jsonl
    agentrl validate agentrl.env.dataset_env:RowsEnv --all --set rows=rows.jsonl --set prompt='{question}' \\
        --set 'rewards=["benchmarks/task_checks.py:reasoning_gym_score"]' --out checked --page findings.html

Its questions are scored by its own verifiers. benchmarks/task_checks.md has what was seen.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    arguments = parser.parse_args()
    lines = [json.dumps(row) for row in reasoning_gym_rows()]
    arguments.rows.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} rows in {arguments.rows}")


if __name__ == "__main__":
    main()
