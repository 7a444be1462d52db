"""Weight versions of engines that this store did not mint."""

from __future__ import annotations

from agentrl.store import RunStore


def test_a_version_of_somebody_elses_engine_is_taken_in_once(store: RunStore) -> None:
    versions = store.versions
    for version in (0, 7, 7):
        versions.note_version(version)
    assert [versions.step_of(version) for version in (0, 7)] == [0, 7] and not versions.knows_version(3)
    assert versions.current_version().version == 7
    assert versions.mint_version(8).version == 8, "no number is used twice"
