"""Keeps what an environment gives between its answers: snapshots of its state, and artifacts of the policy's work.

Notes why a snapshot could not be taken. Knows no engine, and never restores.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from agentrl.config import Rollout
from agentrl.errors import DiskFull, InfrastructureError, PolicyFault
from agentrl.protocols import ArtifactEnv, AsyncEnv, BoundedObservations, BoundedSnapshots, SnapshotEnv
from agentrl.rollout.env_calls import EnvCalls, TimeUp, one_line
from agentrl.rollout.journal import EpisodeJournal

MAX_SNAPSHOT_BYTES: Final = 4 << 20
"""From an environment that gives more, its episode takes no further one: each turn would write so much to the store."""

_ARTIFACT_BYTES: Final = 1 << 20  # of all files of a turn and their paths: more is no source that anyone wrote
_ARTIFACT_FILES: Final = 1000  # of a turn: each costs its test a file of a box


def prepare(env: AsyncEnv, settings: Rollout) -> None:
    """Tell an environment before its reset how large a snapshot and an answer may be, if it wants to know."""
    if isinstance(env, BoundedSnapshots):
        env.snapshot_bytes = MAX_SNAPSHOT_BYTES if settings.snapshot_every_turns else 0
    if isinstance(env, BoundedObservations):
        env.observation_bytes = settings.observation_bytes


class Snapshots:
    """Keeps snapshots of an episode's environment as they fall due. After the first one that could not be kept, no more
    are taken: its turns can still be replayed, and the policy may have caused the failure."""

    __slots__ = ("_every_turns", "_is_disabled")

    def __init__(self, settings: Rollout) -> None:
        self._every_turns = settings.snapshot_every_turns
        self._is_disabled = not self._every_turns

    async def keep(self, env: AsyncEnv, calls: EnvCalls, journal: EpisodeJournal) -> None:
        """Keep a snapshot after the last answer, if one is due and the environment offers them; note why if not."""
        if self._is_disabled:
            return
        if not (isinstance(env, SnapshotEnv) and env.has_snapshots):
            self._is_disabled = True
        elif len(journal.turns) % self._every_turns == 0:
            # Given up for good after the first failure: each try is a call under a deadline, and an environment that
            # cannot be saved once, because it grew too large for example, most often cannot be saved later.
            self._is_disabled = not await _keep_snapshot(env, calls, journal)


async def _keep_snapshot(env: SnapshotEnv, calls: EnvCalls, journal: EpisodeJournal) -> bool:
    """Returns whether the snapshot was kept; a full disk counts as kept, since the next write raises DiskFull."""
    snapshot_bytes, failure_reason = None, ""
    try:
        snapshot_bytes = await calls("snapshot", env.snapshot)
    except InfrastructureError as error:
        failure_reason = one_line(error)
    if isinstance(snapshot_bytes, bytes) and len(snapshot_bytes) > MAX_SNAPSHOT_BYTES:
        failure_reason = f"it has {len(snapshot_bytes)} bytes, more than {MAX_SNAPSHOT_BYTES}"
    with suppress(DiskFull):
        if isinstance(snapshot_bytes, bytes) and not failure_reason:
            await journal.keep_snapshot(snapshot_bytes, calls.seconds)
            return True
        failure_reason = failure_reason or f"it is a {type(snapshot_bytes).__name__}, not bytes"
        await journal.note_no_snapshot(failure_reason)
    return not failure_reason


async def keep_artifacts(env: AsyncEnv, calls: EnvCalls, journal: EpisodeJournal, policy_s: float) -> None:
    """Keep the files that a reward source tests, as they stand after the last turn; does nothing if the environment
    declares none. If the policy made them unreadable or too large, they are empty: such work passes no test. Raises
    InfrastructureError."""
    if not isinstance(env, ArtifactEnv):
        return
    artifact_files: Mapping[str, bytes] = {}
    with suppress(TimeUp, PolicyFault):
        artifact_files = await calls("artifacts", lambda: _bytes_of(env), policy_s=policy_s)
    total_bytes = sum(len(file_path) + len(file_bytes) for file_path, file_bytes in artifact_files.items())
    # Empty files, not a failure: the policy wrote them, and an episode that could leave the loss by writing too much
    # would be a way out of a bad reward (law 3).
    if total_bytes > _ARTIFACT_BYTES or len(artifact_files) > _ARTIFACT_FILES:
        artifact_files = {}
    await journal.keep_artifacts(artifact_files)


async def _bytes_of(env: ArtifactEnv) -> dict[str, bytes]:
    """The environment's artifacts. Raises TypeError for anything but bytes by path."""
    return {str(file_path): bytes(memoryview(file_bytes)) for file_path, file_bytes in (await env.artifacts()).items()}
