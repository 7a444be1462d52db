"""Takes snapshots of environments that offer them, and notes why one could not be taken; keeps artifacts.

Knows neither turns nor engines, and never restores.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from agentrl.config import Rollout
from agentrl.errors import DiskFull, InfrastructureError, PolicyFault
from agentrl.protocols import ArtifactEnv, AsyncEnv, BoundedObservations, BoundedSnapshots, SnapshotEnv
from agentrl.rollout.env_calls import EnvCalls, TimeUp, one_line
from agentrl.store import Claim, EnvSnapshot
from agentrl.store.interfaces import EpisodeStore

MAX_SNAPSHOT_BYTES: Final = 4 << 20
"""An environment that gives more is not asked again in its episode: each turn would write so much to the store."""

_ARTIFACT_BYTES: Final = 1 << 20  # of all files of a turn and their paths: more is no source that anyone wrote
_ARTIFACT_FILES: Final = 1000  # of a turn: each costs its test a file of a box


def prepare(env: AsyncEnv, settings: Rollout) -> None:
    """Tell an environment before its reset how large a snapshot and an answer may be, if it wants to know."""
    if isinstance(env, BoundedSnapshots):
        env.snapshot_bytes = MAX_SNAPSHOT_BYTES if settings.snapshot_every_turns else 0
    if isinstance(env, BoundedObservations):
        env.observation_bytes = settings.observation_bytes


async def keep_snapshot(
    env: AsyncEnv, guard: EnvCalls, store: EpisodeStore, settings: Rollout, claim: Claim, turn: int
) -> bool:
    """Keep a snapshot after the answer to `turn`, if the environment offers them and one is due. If that fails, the
    reason is noted and the result is False: it should not be asked again. The turns can still be replayed, and the
    policy may have caused the failure."""
    every = settings.snapshot_every_turns
    if not (every and isinstance(env, SnapshotEnv) and env.has_snapshots):
        return False
    if (turn + 1) % every:
        return True
    data, failed = None, ""
    try:
        data = await guard("snapshot", env.snapshot)
    except InfrastructureError as error:
        failed = one_line(error)
    if isinstance(data, bytes) and len(data) > MAX_SNAPSHOT_BYTES:
        failed = f"it has {len(data)} bytes, more than {MAX_SNAPSHOT_BYTES}"
    with suppress(DiskFull):  # the next journal call raises it
        if isinstance(data, bytes) and not failed:
            snapshot = EnvSnapshot(turn=turn, data=data, seconds=guard.seconds)
            await store.keep_snapshot(claim.episode_id, claim.fence, snapshot)
            return True
        failed = failed or f"it is a {type(data).__name__}, not bytes"
        await store.note_unsaved(claim.episode_id, claim.fence, turn, failed)
    return not failed


async def keep_artifacts(
    env: AsyncEnv, guard: EnvCalls, store: EpisodeStore, claim: Claim, turn: str, policy_s: float
) -> None:
    """Keep the files that a reward source tests, as they stand after a turn; does nothing if the environment declares
    none. If the policy made them unreadable or too large, they are empty: such work passes no test. Raises
    InfrastructureError."""
    if not isinstance(env, ArtifactEnv):
        return
    files: Mapping[str, bytes] = {}
    with suppress(TimeUp, PolicyFault):
        files = await guard("artifacts", lambda: _bytes_of(env), policy_s=policy_s)
    size = sum(len(path) + len(data) for path, data in files.items())
    if size > _ARTIFACT_BYTES or len(files) > _ARTIFACT_FILES:
        files = {}
    await store.keep_artifacts(claim.episode_id, claim.fence, turn, files)


async def _bytes_of(env: ArtifactEnv) -> dict[str, bytes]:
    """The environment's artifacts. Raises TypeError for anything but bytes by path."""
    return {str(path): bytes(memoryview(data)) for path, data in (await env.artifacts()).items()}
