"""Every run file of the repository is one that can be started: a key that goes takes its line there with it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from each_case import each_case

from agentrl.config import load

ROOT = Path(__file__).parents[2]
RUN_FILES = [
    path
    for folder in ("benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.toml"))
    if {"model", "env"} <= tomllib.loads(path.read_text()).keys()  # the others are of `agentrl sft`
]


@each_case("path", RUN_FILES)
def test_a_run_file_is_one_that_loads(path: Path) -> None:
    load(path)
