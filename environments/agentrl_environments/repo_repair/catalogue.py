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
    known_breakages: list[KnownBreakage] = []
    repository: Repository | None = None
    for line in FILE.read_text("utf-8").splitlines():
        catalogue_row = json.loads(line)
        if "digest" in catalogue_row:
            repository = load(catalogue_row["repository"])
            if repository.digest != catalogue_row["digest"]:
                raise UsageError(f"{repository.name} has changed: run python -m {__spec__.name}")
            continue
        assert repository is not None
        breakage_edits = tuple(
            Edit(edit_path, line, line_count, tuple(new_lines))
            for edit_path, line, line_count, new_lines in catalogue_row["edits"]
        )
        breakage = Breakage(
            catalogue_row["kind"], catalogue_row["subject"], breakage_edits, catalogue_row.get("wanted", "")
        )
        known_breakages.append(
            KnownBreakage(
                repository.name,
                breakage,
                tuple(repository.test_ids[test_index] for test_index in catalogue_row["fails"]),
            )
        )
    return tuple(known_breakages)


async def build(names: list[str], *, slots: int) -> list[str]:
    """The catalogue's lines for these repositories."""
    box_backend = backend("bubblewrap")
    source_judge = SourceJudge(box_backend, limits=dataclasses.replace(LIMITS, cpu_s=1.0), slots=slots)
    catalogue_lines: list[str] = []
    try:
        for repository_name in names:
            repository = load(repository_name)
            verdicts = await source_judge.run(encoded(repository.sources), encoded(repository.tests))
            if verdicts.passed != frozenset(repository.test_ids):
                raise UsageError(f"{repository_name} fails its own tests: {dict(verdicts.reasons)}")
            single_breakages = await _tried(repository, source_judge, list(_candidates(repository)))
            combined_breakages = await _tried(repository, source_judge, _combined(repository, single_breakages))
            catalogue_lines.append(json.dumps({"repository": repository_name, "digest": repository.digest}))
            catalogue_lines.extend(
                _written(repository, known_breakage) for known_breakage in [*single_breakages, *combined_breakages]
            )
            print(f"{repository_name}: {len(single_breakages)} + {len(combined_breakages)}", file=sys.stderr)
    finally:
        await box_backend.aclose()
    return catalogue_lines


def _candidates(repository: Repository) -> Iterator[Breakage]:
    """The breakages to try: some of each kind, drawn evenly."""
    generator = random.Random(repository.name)
    all_mutations = list(mutations(repository.sources))
    for mutation_kind in MUTATIONS:
        mutations_of_kind = [mutation for mutation in all_mutations if mutation.kind == mutation_kind]
        yield from generator.sample(mutations_of_kind, min(_SINGLE, len(mutations_of_kind)))
    for whole_removals in (list(stubs(repository.sources)), list(features(repository.sources))):
        yield from generator.sample(whole_removals, min(_WHOLE, len(whole_removals)))


def _combined(repository: Repository, singles: list[KnownBreakage]) -> list[Breakage]:
    """Two or three mutations of different functions at once, none of which hides another's failures by lines."""
    generator = random.Random(f"{repository.name} several")
    single_mutants = [
        known_breakage.breakage for known_breakage in singles if known_breakage.breakage.kind in MUTATIONS
    ]
    combined: list[Breakage] = []
    for attempt in range(_SEVERAL):
        drawn = generator.sample(single_mutants, 2 + attempt % 2)
        edit_places = [(mutant_edit.path, mutant_edit.line) for mutant in drawn for mutant_edit in mutant.edits]
        if len({mutant.subject for mutant in drawn}) < len(drawn) or len(set(edit_places)) < len(edit_places):
            continue
        all_edits = tuple(itertools.chain.from_iterable(mutant.edits for mutant in drawn))
        combined.append(Breakage("several", ", ".join(mutant.subject for mutant in drawn), all_edits))
    return combined


async def _tried(repository: Repository, judge: SourceJudge, candidates: list[Breakage]) -> list[KnownBreakage]:
    """Return the candidates that make a task, in their order, each with the tests that it fails."""
    tried_by_index: dict[int, KnownBreakage] = {}

    async def run(index: int, breakage: Breakage) -> None:
        broken_sources = applied(repository.sources, breakage.edits)
        verdicts = await judge.run(encoded(broken_sources), encoded(repository.tests))
        failing_tests = tuple(test_id for test_id in repository.test_ids if test_id not in verdicts.passed)
        if verdicts.whole and 0 < len(failing_tests) <= _MOST_FAILING * len(repository.test_ids):
            tried_by_index[index] = KnownBreakage(repository.name, breakage, failing_tests)

    async with trio.open_nursery() as nursery:
        for candidate_index, breakage in enumerate(candidates):
            nursery.start_soon(run, candidate_index, breakage)
    return [tried_by_index[candidate_index] for candidate_index in sorted(tried_by_index)]


def _written(repository: Repository, entry: KnownBreakage) -> str:
    breakage = entry.breakage
    catalogue_row = {
        "kind": breakage.kind,
        "subject": breakage.subject,
        "edits": [dataclasses.astuple(breakage_edit) for breakage_edit in breakage.edits],
        "fails": [repository.test_ids.index(test_id) for test_id in entry.fails],
    }
    return json.dumps({**catalogue_row, "wanted": breakage.signature} if breakage.signature else catalogue_row)


if __name__ == "__main__":
    everything = sorted(itertools.chain.from_iterable(REPOSITORIES.values()))
    FILE.write_text("\n".join(trio.run(lambda: build(everything, slots=os.cpu_count() or 1))) + "\n", "utf-8")
