"""Takes snapshots of environments that offer them, and notes why one could not be taken.

Knows neither turns nor engines, and never restores.
"""

from __future__ import annotations

from contextlib import suppress

from agentrl.config import Rollout
from agentrl.errors import DiskFull, InfrastructureError
from agentrl.protocols import AsyncEnv, BoundedSnapshots, SnapshotEnv
from agentrl.rollout.guard import Guard, one_line
from agentrl.store import Claim, RunStore, Snapshot


def prepare(env: AsyncEnv, settings: Rollout) -> None:
    """Tell an environment before its reset how large a snapshot may be, if it wants to know."""
    if isinstance(env, BoundedSnapshots):
        env.snapshot_bytes = settings.max_snapshot_bytes if settings.snapshot_every_turns else 0


async def keep_snapshot(
    env: AsyncEnv, guard: Guard, store: RunStore, settings: Rollout, claim: Claim, turn: int
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
    if isinstance(data, bytes) and len(data) > settings.max_snapshot_bytes:
        failed = f"it has {len(data)} bytes, more than rollout.max_snapshot_bytes"
    with suppress(DiskFull):  # the next journal call raises it
        if isinstance(data, bytes) and not failed:
            store.keep_snapshot(claim.episode_id, claim.fence, Snapshot(turn=turn, data=data, seconds=guard.seconds))
            return True
        failed = failed or f"it is a {type(data).__name__}, not bytes"
        store.note_unsaved(claim.episode_id, claim.fence, turn, failed)
    return not failed
