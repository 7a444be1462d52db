"""The catalogue: which breakages make which tests fail, from a run of all tests of a repository on each.

`python -m agentrl_environments.repo_repair.catalogue` writes `catalogue.jsonl` (some minutes); tasks only read it, so
that a reset runs nothing and a seed means the same task on every machine. A breakage is kept if the run came to its
end (nothing hangs, nothing exits), at least one test failed and more than a quarter still passed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import trio

from agentrl.errors import UsageError
from agentrl.sandbox import backend
from agentrl_environments.judging import LIMITS, SourceJudge
from agentrl_environments.repo_repair.breaking import MUTATIONS, Breakage, Edit, applied, features, mutations, stubs
from agentrl_environments.repo_repair.repository import REPOSITORIES, Repository, encoded, load

FILE: Final = Path(__file__).parent / "catalogue.jsonl"
_SINGLE: Final = 12  # breakages tried of each kind of mutation
_WHOLE: Final = 12  # stubs, and features
_SEVERAL: Final = 16
_MOST_FAILING: Final = 0.75


@dataclass(frozen=True, slots=True)
class KnownBreakage:
    """A breakage of a repository, and the tests that it makes fail. All other tests pass before and after."""

    repository: str
    breakage: Breakage
    fails: tuple[str, ...]


@lru_cache(maxsize=1)
def entries() -> tuple[KnownBreakage, ...]:
    """The whole catalogue, in its order. Raises UsageError where it does not belong to the repositories as they are."""
    breakages: list[KnownBreakage] = []
    repository: Repository | None = None
    for line in FILE.read_text("utf-8").splitlines():
        row = json.loads(line)
        if "digest" in row:
            repository = load(row["repository"])
            if repository.digest != row["digest"]:
                raise UsageError(f"{repository.name} has changed: run python -m {__spec__.name}")
            continue
        assert repository is not None
        edits = tuple(Edit(path, line, count, tuple(new)) for path, line, count, new in row["edits"])
        breakage = Breakage(row["kind"], row["subject"], edits, row.get("wanted", ""))
        breakages.append(
            KnownBreakage(repository.name, breakage, tuple(repository.test_ids[at] for at in row["fails"]))
        )
    return tuple(breakages)


async def build(names: list[str], *, slots: int) -> list[str]:
    """The catalogue's lines for these repositories."""
    boxes = backend("bubblewrap")
    judge = SourceJudge(boxes, limits=dataclasses.replace(LIMITS, cpu_s=1.0), slots=slots)
    lines: list[str] = []
    try:
        for name in names:
            repository = load(name)
            verdicts = await judge.run(encoded(repository.sources), encoded(repository.tests))
            if verdicts.passed != frozenset(repository.test_ids):
                raise UsageError(f"{name} fails its own tests: {dict(verdicts.reasons)}")
            singles = await _tried(repository, judge, list(_candidates(repository)))
            several = await _tried(repository, judge, _combined(repository, singles))
            lines.append(json.dumps({"repository": name, "digest": repository.digest}))
            lines.extend(_written(repository, entry) for entry in [*singles, *several])
            print(f"{name}: {len(singles)} + {len(several)}", file=sys.stderr)
    finally:
        await boxes.aclose()
    return lines


def _candidates(repository: Repository) -> Iterator[Breakage]:
    """The breakages to try: some of each kind, drawn evenly."""
    rng = random.Random(repository.name)
    changes = list(mutations(repository.sources))
    for kind in MUTATIONS:
        of_kind = [change for change in changes if change.kind == kind]
        yield from rng.sample(of_kind, min(_SINGLE, len(of_kind)))
    for whole in (list(stubs(repository.sources)), list(features(repository.sources))):
        yield from rng.sample(whole, min(_WHOLE, len(whole)))


def _combined(repository: Repository, singles: list[KnownBreakage]) -> list[Breakage]:
    """Two or three mutations of different functions at once, none of which hides another's failures by lines."""
    rng = random.Random(f"{repository.name} several")
    mutants = [entry.breakage for entry in singles if entry.breakage.kind in MUTATIONS]
    combined: list[Breakage] = []
    for number in range(_SEVERAL):
        parts = rng.sample(mutants, 2 + number % 2)
        places = [(edit.path, edit.line) for part in parts for edit in part.edits]
        if len({part.subject for part in parts}) < len(parts) or len(set(places)) < len(places):
            continue
        edits = tuple(itertools.chain.from_iterable(part.edits for part in parts))
        combined.append(Breakage("several", ", ".join(part.subject for part in parts), edits))
    return combined


async def _tried(repository: Repository, judge: SourceJudge, candidates: list[Breakage]) -> list[KnownBreakage]:
    """Return the candidates that make a task, in their order, each with the tests that it fails."""
    results: dict[int, KnownBreakage] = {}

    async def run(index: int, breakage: Breakage) -> None:
        sources = applied(repository.sources, breakage.edits)
        verdicts = await judge.run(encoded(sources), encoded(repository.tests))
        fails = tuple(test for test in repository.test_ids if test not in verdicts.passed)
        if verdicts.whole and 0 < len(fails) <= _MOST_FAILING * len(repository.test_ids):
            results[index] = KnownBreakage(repository.name, breakage, fails)

    async with trio.open_nursery() as nursery:
        for index, breakage in enumerate(candidates):
            nursery.start_soon(run, index, breakage)
    return [results[index] for index in sorted(results)]


def _written(repository: Repository, entry: KnownBreakage) -> str:
    breakage = entry.breakage
    row = {
        "kind": breakage.kind,
        "subject": breakage.subject,
        "edits": [dataclasses.astuple(edit) for edit in breakage.edits],
        "fails": [repository.test_ids.index(test) for test in entry.fails],
    }
    return json.dumps({**row, "wanted": breakage.signature} if breakage.signature else row)


if __name__ == "__main__":
    everything = sorted(itertools.chain.from_iterable(REPOSITORIES.values()))
    FILE.write_text("\n".join(trio.run(lambda: build(everything, slots=os.cpu_count() or 1))) + "\n", "utf-8")
