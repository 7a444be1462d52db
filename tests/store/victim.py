"""A worker or a learner in miniature, to be killed at any instant: `python -m store.victim ROLE STORE`.

After every call to the store has returned, and only then, a line saying so goes to standard output. What a line says
must be true of the store for ever after."""

from __future__ import annotations

import os
import sys
import time

import trio

from agentrl.records import StopReason
from agentrl.store import Claim, Ending, LeaseLost, Quorum, RunStore
from agentrl.store.journal_writer import JournalWriter
from store.play import START, admit, answer, part, turn

STEPS, GROUPS_PER_STEP, GROUP_SIZE, MAX_LAG = 12, 2, 3, 2
BOUNDS = {
    "group_size": GROUP_SIZE,
    "groups_per_step": GROUPS_PER_STEP,
    "max_lag": MAX_LAG,
    "max_running": 9,
    "steps_total": STEPS,
}


def turns_of(episode_id: int) -> int:
    return 1 + episode_id % 4


def ack(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # one write: whole, or not at all


def work(store: RunStore) -> None:
    name = f"worker-{os.getpid()}"
    while store.meta("phase") != "stop":
        admit(store, **BOUNDS)
        claims = store.leases.claim(name, 4, lease_s=0.2)
        if not claims:
            time.sleep(0.002)
        for claim in claims:
            id, fence = claim.episode_id, claim.fence
            try:
                if claim.start is None:
                    store.journal.begin(id, fence, START)
                    ack("begun", id)
                if claim.turns and claim.turns[-1].step is None:
                    store.journal.journal_step(id, fence, len(claim.turns) - 1, answer(len(claim.turns) - 1))
                for index in range(len(claim.turns), turns_of(id)):
                    whole, partial = turn(index, store.versions.current_version().version), claim.partial
                    have = len(partial.token_ids) if partial is not None and partial.index == index else 0
                    for at in range(have, len(whole.token_ids)):
                        store.journal.journal_partial(id, fence, part(whole, at))
                        ack("part", id, index, at + 1)
                    store.journal.journal_turn(id, fence, whole)
                    ack("turn", id, index)
                    store.journal.journal_step(id, fence, index, answer(index))
                    ack("step", id, index)
                store.journal.finish(
                    id, fence, Ending(stop_reason=StopReason.TURN_LIMIT, outcome=float(id % 2), success=None)
                )
                ack("finish", id)
            except LeaseLost:
                ack("lost", id)


def share(store: RunStore) -> None:
    """A worker whose episodes share transactions."""
    trio.run(_share, store)


async def _share(opened: RunStore) -> None:
    name = f"worker-{os.getpid()}"
    with RunStore.read(opened.path) as reader:
        async with JournalWriter(opened, reader) as store, trio.open_nursery() as nursery:
            while await store.meta("phase") != "stop":
                admit(opened, **BOUNDS)
                for claim in await store.claim(name, 4, lease_s=0.2):
                    nursery.start_soon(_play, store, reader, claim)
                await trio.sleep(0.002)
            nursery.cancel_scope.cancel()


async def _play(store: JournalWriter, reader: RunStore, claim: Claim) -> None:
    id, fence = claim.episode_id, claim.fence
    try:
        if claim.start is None:
            await store.begin(id, fence, START)
            ack("begun", id)
        if claim.turns and claim.turns[-1].step is None:
            await store.journal_step(id, fence, len(claim.turns) - 1, answer(len(claim.turns) - 1))
        for index in range(len(claim.turns), turns_of(id)):
            whole, partial = turn(index, reader.versions.current_version().version), claim.partial
            have = len(partial.token_ids) if partial is not None and partial.index == index else 0
            for at in range(have, len(whole.token_ids)):
                store.post_partial(id, fence, part(whole, at))
            await store.journal_turn(id, fence, whole)
            ack("turn", id, index)
            await store.journal_step(id, fence, index, answer(index))
            ack("step", id, index)
        await store.finish(id, fence, Ending(stop_reason=StopReason.TURN_LIMIT, outcome=float(id % 2), success=None))
        ack("finish", id)
    except LeaseLost:
        ack("lost", id)


def learn(store: RunStore) -> None:
    checkpoint = store.lineage.latest_checkpoint()
    step = 0 if checkpoint is None else checkpoint.step
    attempt = store.lineage.rollback(step)
    ack("rollback", attempt, step)
    store.versions.confirm_version(store.versions.mint_version(step))
    while step < STEPS:
        store.buffer.expire(time.time(), 3600.0, close_policy=Quorum(2, 0.0))
        groups = store.buffer.take(step + 1, GROUPS_PER_STEP, max_lag=MAX_LAG)
        if groups is None:
            time.sleep(0.002)
            continue
        step += 1
        ack("take", attempt, step, *(one.episode_id for group in groups for one in group.trajectories))
        version = store.versions.mint_version(step)
        store.versions.confirm_version(version)
        if step % 3 == 0 or step == STEPS:
            store.lineage.checkpoint(step, version, f"/checkpoints/{step}")
            ack("checkpoint", step)
    store.set_meta("phase", "stop")
    ack("stop", STEPS)


if __name__ == "__main__":
    role, path = sys.argv[1:]
    with RunStore.open(path) as store:
        {"work": work, "share": share, "learn": learn}[role](store)
