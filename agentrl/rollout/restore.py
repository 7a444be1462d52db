"""Brings a fresh environment to where an unfinished episode stands in the journal.

The newest snapshot is tried first, with a replay of the turns after it; then a replay of all turns from a reset. A
replay repeats the recorded actions and compares the answers with the recorded ones: an environment that answers
differently is not where the episode was. If neither works, the episode starts anew as another trial, and the journal
says why.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from agentrl.errors import EnvError, InfrastructureError, PolicyFault
from agentrl.records import POLICY, Step, Turn
from agentrl.rollout.env_calls import TimeUp, one_line
from agentrl.rollout.journal import EpisodeJournal
from agentrl.rollout.live_env import LiveEnv

Answer = Callable[[Turn], Awaitable[Step]]

_COMPARED = ("observation", "history", "role", "terminated", "truncated")
"""The fields of an answer on which the next turn rests. The others are the record's, whatever a replay says."""


# Why an environment is restored before it is replayed, and why it has to answer as it did before.
#
# The turns of an unfinished episode are in the journal, and none of them is sampled again (law 1). Its environment died
# with its worker. A fresh one has to stand where the last turn left it: otherwise the next turn acts on a state that
# the policy has never seen, and is scored for it (law 3).
#
# To start every such episode anew would be simpler. It costs all its turns, and it prefers short episodes, because a
# long one meets a death more often. To replay its actions alone is not enough either. A replay takes the time of all
# steps again and repeats their effects outside of the environment, and an environment that reads a clock or draws
# numbers cannot promise the same answers (`replayable`). So the newest snapshot comes first, and only the turns after
# it are repeated.
#
# In both ways the environment has to prove where it stands: each repeated action must get the messages, the end and the
# next role that the journal has (law 2). A reward is not compared, since the recorded one counts. A snapshot that
# cannot be restored spoils nothing: the environment may stand anywhere by then, so it is closed, and a fresh one is
# replayed.
#
# If neither way works, the episode starts anew as another trial. The turns so far stay in the store with the reason and
# are never trained. A fork cannot start anew, because its siblings share its first turns: it fails and leaves the loss.
# The price is a write of the snapshot after every `rollout.snapshot_every_turns` turns.
#
# `tests/rollout/test_snapshots.py` ends a worker before each turn; `tests/rollout/test_killed_in_a_box.py` kills one
# whose environment has a real box.
async def open_at(env: LiveEnv, journal: EpisodeJournal, answer: Answer) -> bool:
    """Open the environment. Returns True if it stands where the journal does; False if it was only reset, and the
    episode begins with its first messages. `answer` has it answer a turn again. Raises EnvError for a fork whose first
    turns cannot be repeated: its siblings begin where they end."""
    await env.open()
    no_snapshot = await _by_snapshot(env, journal, answer)
    if no_snapshot == "":
        return True
    # Steps that were repeated after the snapshot are repeated once more, and their time counts then.
    if no_snapshot is not None:  # where this environment stands now, nobody knows
        await env.close()
        await env.open()
        env.calls.seconds = 0.0
    await env.reset()
    if journal.claim.start is None:
        return False
    no_replay = await _by_replay(env, journal, answer)
    if not no_replay:
        return True
    of_snapshot = f"and of its snapshot: {no_snapshot}" if no_snapshot else ""
    restart_reason = "; ".join(filter(None, (no_replay, of_snapshot, await journal.why_no_snapshot())))
    if journal.claim.fork_turn is not None:
        raise EnvError(f"a fork cannot be brought to turn {len(journal.claim.turns)}: {restart_reason}")
    await journal.restart(restart_reason)
    env.calls.seconds = 0.0
    await env.reset()
    return False


async def _by_snapshot(env: LiveEnv, journal: EpisodeJournal, answer: Answer) -> str | None:
    """Restore the newest snapshot, and repeat the turns after it. Returns "" if that worked, the reason if it did not,
    None without a snapshot."""
    snapshot_env = env.with_snapshots if journal.turns else None
    newest_snapshot = None if snapshot_env is None else await journal.snapshot()
    if snapshot_env is None or newest_snapshot is None:
        return None
    try:
        await env.calls("restore", partial(snapshot_env.restore, newest_snapshot.data))
        snapshot_answer = journal.turns[newest_snapshot.turn].step
        assert snapshot_answer is not None, "a snapshot is taken of a turn that is answered"
        # `restore` returns no answer, so the recorded one is the latest. The policy's time goes on from the snapshot's.
        env.latest, env.calls.seconds = snapshot_answer, newest_snapshot.seconds
        later_turns = [turn for turn in journal.turns[newest_snapshot.turn + 1 :] if turn.step is not None]
        return await _repeat(env, later_turns, answer)
    except (TimeUp, PolicyFault, InfrastructureError) as error:
        # An InfrastructureError does not end the episode yet, since a replay is still to come. `_by_replay` lets it
        # pass: nothing is left to try then, and the episode fails without a score (law 3).
        return one_line(error)


async def _by_replay(env: LiveEnv, journal: EpisodeJournal, answer: Answer) -> str:
    """Repeat all turns after a reset. Returns "", or the reason why that did not work."""
    # With turns, an environment without the promise gets the clearer reason of `_repeat`.
    if not journal.turns or env.env.replayable:
        first_turn = journal.turns[0] if journal.turns else journal.partial
        if env.latest.observation != journal.start:
            return "reset gave another first observation"
        if first_turn is not None and first_turn.role != (env.latest.role or POLICY):
            return "reset gave another role the first turn"
    try:
        return await _repeat(env, journal.turns, answer)
    except (TimeUp, PolicyFault) as error:
        return f"an action that was answered before was not: {one_line(error)}"


async def _repeat(env: LiveEnv, turns: Sequence[Turn], answer: Answer) -> str:
    """Repeat actions where the environment stands. Returns "", or the reason why the answers are not the recorded ones.
    The last turn may have no answer yet; it is not repeated."""
    if turns and not env.env.replayable:
        return f"{env.task.env} does not promise to be replayable"
    for turn in turns:
        if turn.step is None:
            break
        repeated_answer, recorded_answer = await answer(turn), turn.step
        if differing := [
            field_name
            for field_name in _COMPARED
            if getattr(repeated_answer, field_name) != getattr(recorded_answer, field_name)
        ]:
            return f"turn {turn.index} was answered differently: {' and '.join(differing)}"
    return ""
