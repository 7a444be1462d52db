"""Reward sources at work: turns that wait for a score are fetched, scored and written down, while episodes go on.

A source is anything that scores a turn, from the episode up to that turn. Owns what its calls may cost (calls at once,
a deadline and retries for each, a cache by content) and decides nothing about episodes: the store knows which turns
wait, and what holds when a source is late. Knows no environment and no run.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, cast

import httpx
import trio

from agentrl.config.sections import RewardSource
from agentrl.engine.scoring_client import ScoringClient
from agentrl.env.sync_async import LoopThread
from agentrl.errors import AgentRLError, DiskFull, ScoreError, StoreAway, Tracebacks, place_of
from agentrl.records import LARGEST, StopReason, Task, Trajectory
from agentrl.registry import load_reference
from agentrl.rewards.agent_judge import AgentJudge
from agentrl.rewards.hidden_tests import ArtifactsOf, BoxTests, no_artifacts, read_tests
from agentrl.rewards.judge import Judge
from agentrl.rewards.reward_model import RewardModel
from agentrl.rewards.score_cache import ScoreCache
from agentrl.rewards.score_failures import KIND, FailureCount
from agentrl.rewards.shaping import Overlong, Shaping
from agentrl.rewards.transcripts import messages_of
from agentrl.rewards.verdict import Verdict
from agentrl.store.interfaces import RewardStore
from agentrl.tokens.columns import NONE

TurnRewarder = Callable[[Trajectory], "float | Verdict | Awaitable[float | Verdict]"]
"""Scores the last turn of an episode as far as it went. A plain one runs in a thread, an async one in trio."""

_LOOK_S: Final = 1.0  # a source looks so often for turns that may be tried again
_PAUSE_S: Final = 0.5  # before a second attempt; twice as long before each further one
_OWN_SHARE: Final = 0.9  # of a call's deadline, after which a client ends it itself: it can say what a server answered

log = logging.getLogger(__name__)


def rewarder_of(
    settings: RewardSource,
    *,
    turn_tokens: int = 0,
    artifacts_of: ArtifactsOf | None = None,
    teacher_of: Callable[[RewardSource], TurnRewarder] | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> TurnRewarder:
    """Make the rewarder of a source. A model reads up to the turn's action; a callable also gets the environment's
    answer; tests get the turn's artifacts. A turn is cut at `turn_tokens`. `teacher_of` makes a teacher. `transport`
    takes the place of the network.

    Raises UsageError for a reference that cannot be imported and for tests that cannot be read."""
    if settings.kind == "teacher":
        assert teacher_of is not None, "a run makes its teachers"
        return teacher_of(settings)
    if settings.measure == "overlong":
        return Overlong(turn_tokens, settings.margin_tokens or 0)
    if settings.measure in ("callable", "tests"):
        if settings.measure == "tests":
            rewarder: TurnRewarder = BoxTests(settings, artifacts_of or _none)
        else:
            rewarder = _own_callable(settings)
        if settings.kind != "shaping":
            return rewarder
        # A limiter of its own, as in `Scorer`: trio's common one is shared with the environments, and a source that
        # hangs would fill it.
        thread_limiter = trio.CapacityLimiter(settings.concurrency)
        score_cache = ScoreCache[float](apart=settings.measure == "tests")

        async def potential(state: Trajectory) -> float:
            return (await _called(rewarder, state, thread_limiter)).value

        return Shaping(potential, settings.gamma, score_cache)
    scoring_client = ScoringClient(
        settings.url or "",
        model=settings.model,
        api_key=settings.api_key(),
        concurrency=settings.concurrency,
        deadline_s=_OWN_SHARE * settings.call_deadline_s,
        transport=transport,
    )
    if settings.kind == "agent_judge":
        return _judge_of_work(settings, scoring_client, artifacts_of or _none)
    if settings.kind == "prm":
        reward_model = RewardModel(scoring_client, label=settings.label, activation=settings.activation)

        async def of_action(seen: Trajectory) -> float:
            return await reward_model(_without_answer(seen))

        return of_action
    judge = Judge(scoring_client, rubric=settings.rubric or "", attempts=1)

    async def judged(seen: Trajectory) -> Verdict:
        judgement = await judge.score(messages_of(_without_answer(seen)))
        return Verdict(judgement.score, reason=judgement.reason)

    return judged


def _without_answer(seen: Trajectory) -> Trajectory:
    """The episode up to its last action. A model sees the action and not what came of it: the tools' answer may hold
    text that the policy had put there, and a process reward is one of the action."""
    return replace(seen, turns=(*seen.turns[:-1], replace(seen.turns[-1], step=None)))


def _judge_of_work(settings: RewardSource, client: ScoringClient, artifacts_of: ArtifactsOf) -> TurnRewarder:
    """A judge with tools, which scores a role's episode once: the work after its last turn."""
    judge = AgentJudge(
        client,
        rubric=settings.rubric or "",
        sandbox=settings.sandbox,
        image=settings.image,
        tests=read_tests(Path(settings.files)) if settings.files else {},
        command=settings.command,
    )
    files_of: Callable[[Task], Mapping[str, bytes]] | None = load_reference(settings.call) if settings.call else None

    async def judged(seen: Trajectory) -> Verdict:
        # Some minutes of a judge for each turn would cost more than the episode, and a work in the making is not what
        # the rubric is about.
        if seen.stop_reason is None:
            return Verdict(0.0)
        work_files = await artifacts_of(seen.turns[-1].id)
        if work_files is None:
            raise no_artifacts(seen)
        task_files = files_of(seen.task) if files_of else None
        transcript = messages_of(_without_answer(seen))
        judgement = await judge.score(transcript, work_files, tests=task_files, seed=seen.task.seed)
        return Verdict(judgement.score, reason=judgement.reason)

    return judged


async def _none(_: str) -> None:
    return None


def until(trajectory: Trajectory, turn: str, *, settled: bool = False) -> Trajectory:
    """The episode as it was after a turn. If it is `settled` whether the turn's role acts again, and it does not, the
    episode has a stop reason. Raises LookupError for a turn that is not in it."""
    for turn_index, each_turn in enumerate(trajectory.turns):
        if each_turn.id == turn:
            # Later turns of other roles do not count: for a role, the episode is over when it acts no more.
            is_over = settled and all(
                later_turn.role != each_turn.role for later_turn in trajectory.turns[turn_index + 1 :]
            )
            # Always DONE and never the real reason: it may not be known yet, and a score that depended on when it was
            # asked for would differ between a run and its replay.
            stop_reason = StopReason.DONE if is_over else None
            return replace(
                trajectory,
                turns=trajectory.turns[: turn_index + 1],
                stop_reason=stop_reason,
                outcome=None,
                success=None,
            )
    raise LookupError(f"episode {trajectory.episode_id} has no turn {turn} any more")


# Why turns are scored beside their episode, and why a source that fails ends nothing.
#
# A judge may take longer than the turn that it scores. To call it in the task of the episode would be simple: the
# worker would then hold the episode and its environment until the last score is there, and would sample nothing in its
# place. So a turn is scored by tasks of its source, once the environment has answered it. Whoever plays the episode
# waits for none of them, and the store holds an episode that has ended until its scores are complete.
#
# Then there is the source that fails. A reward of 0 would be a verdict: the work would look bad because a server was
# away (law 3). To fail the episode at once would give up all its tokens for an outage of a minute, and to try for ever
# would leave its group open (law 4). So each call has a deadline and some retries. After these the turn is left alone
# for `deadline_s`, so that its place goes to turns that can be scored.
#
# What happens if the score never comes is not decided here. The store has the deadline, which counts from the end of
# the episode, and the rule for late scores (`late`). It outlives the process that scores, and the last score of an
# episode has to end it in the same transaction.
#
# The price: with the default rule an episode whose source is away for longer than that leaves loss and baseline, and
# its tokens were sampled for nothing. A source that blocks leaves its thread behind at the deadline. Threads are
# counted for each source, so that a source whose calls all hang takes none from the environments.
#
# `tests/rewards/test_sources.py` has sources that hang, fail and recover; `tests/store/test_rewards.py` has the rules
# for late scores, and a run that is restarted while episodes wait.
@dataclass(slots=True)
class Scorer:
    """One source of a run. `serve` scores what waits, for ever; `score` one turn.

    A turn whose attempts have all failed is left to the source's deadline, and named once in the log."""

    settings: RewardSource
    store: RewardStore
    ask: TurnRewarder
    _under_way: set[str] = field(default_factory=set[str])
    _failed: dict[str, float] = field(default_factory=dict[str, float])  # and until when it is left alone
    _known: ScoreCache[Verdict] = field(init=False)
    _tracebacks: Tracebacks = field(default_factory=Tracebacks)
    _count: FailureCount = field(init=False)
    _idle: trio.CancelScope = field(default_factory=trio.CancelScope)  # of the wait for turns
    _threads: trio.CapacityLimiter = field(init=False)  # its own: one that hangs takes none from the environments

    def __post_init__(self) -> None:
        self._threads = trio.CapacityLimiter(self.settings.concurrency)
        self._known = ScoreCache(apart=self.settings.reads_work)
        self._count = FailureCount(self.settings.source, life=secrets.token_hex(4))

    @property
    def _settled(self) -> bool:
        """Whether a turn is scored only once it is known whether its role acts again."""
        return self.settings.kind in ("shaping", "agent_judge")

    async def serve(self) -> None:
        """Score turns until cancelled. Each turn is fetched once, however long its score takes."""
        async with trio.open_nursery() as nursery:
            while True:
                free_places = self.settings.concurrency - len(self._under_way)
                looked_s = trio.current_time()
                self._failed = {turn_name: until_s for turn_name, until_s in self._failed.items() if until_s > looked_s}
                skipped_turns = self._under_way | self._failed.keys()
                source_name, is_settled = self.settings.source, self._settled
                # Turns that are under way or have failed are left out, or they would fill the limit again and again.
                waiting_turns = (
                    await self.store.awaiting(source_name, free_places, skip=skipped_turns, settled=is_settled)
                    if free_places
                    else []
                )
                for turn_name in waiting_turns:
                    self._under_way.add(turn_name)
                    nursery.start_soon(self._serve_one, turn_name)
                if (failure_row := self._count.row()) is not None:
                    with suppress(DiskFull, StoreAway):  # its counts are in the next one
                        await self.store.record(KIND, 0, failure_row)
                with trio.CancelScope() as self._idle:
                    # Woken by the store when a turn begins to wait. The time limit is for turns whose pause after a
                    # failure ends, for which nobody signals.
                    await self.store.wait_for_work("reward", _LOOK_S)

    async def _serve_one(self, turn: str) -> None:
        try:
            await self.score(turn)
        # None of these is a defect of this source's code: the server is away, the episode began anew, the disk is
        # full. The turn is still waiting in the store, so nothing is lost by leaving it; anything else ends the
        # worker and is seen.
        except (ScoreError, LookupError, DiskFull, StoreAway) as error:
            self._failed[turn] = trio.current_time() + self.settings.deadline_s
            log.warning("reward source %r: turn %s: %s", self.settings.source, turn, error)
        finally:
            self._under_way.discard(turn)
            # A place is free, and the next turn need not wait for the store's signal.
            self._idle.cancel()

    async def score(self, turn: str, *, version: int | None = None) -> float:
        """Ask what a turn is worth, and write it down. Raises ScoreError where every attempt failed, LookupError if the
        turn's episode began anew meanwhile."""
        seen_episode = until(await self.store.trajectory(int(turn.split(".")[0])), turn, settled=self._settled)
        started_s = time.monotonic()
        verdict, call_count = self._known.get(seen_episode), 0.0
        if verdict is None:
            verdict, call_count = await self._ask_repeatedly(seen_episode)
            if self.settings.kind != "teacher":  # what it says is of tokens, and texts may be alike
                self._known.keep(seen_episode, replace(verdict, columns=NONE))
        await self.store.score(
            turn,
            self.settings.source,
            verdict.value,
            version=version,
            took_s=time.monotonic() - started_s,
            cost=call_count,
            columns=verdict.columns,
            reason=verdict.reason,
        )
        return verdict.value

    async def _ask_repeatedly(self, seen: Trajectory) -> tuple[Verdict, float]:
        """The verdict, and how many calls it took."""
        failure_line, turn_text = "", seen.turns[-1].text
        for attempt in range(self.settings.retries + 1):
            # Doubling pauses: a server that refuses because it is overloaded is not helped by requests that come at
            # once.
            if attempt:
                await trio.sleep(_PAUSE_S * 2 ** (attempt - 1))
            with trio.move_on_after(self.settings.call_deadline_s) as call_scope:
                try:
                    verdict = await _called(self.ask, seen, self._threads)
                    if abs(verdict.value) <= LARGEST:
                        self._count.scored(turn_text, attempt + 1, failure_line)
                        return verdict, attempt + 1.0
                    failure_line = f"{verdict.value} is no reward"
                # SystemExit too, since `sys.exit` in a user's function would otherwise end the worker with all its
                # episodes, and asyncio's CancelledError, which is no Exception and is not trio's own. trio's passes
                # through.
                # `tests/rewards/test_sources.py::test_a_source_that_exits_or_is_cancelled_by_asyncio_ends_no_worker`.
                except (Exception, SystemExit, asyncio.CancelledError) as error:  # of a source's own code: named
                    failure_line = " ".join(f"{type(error).__name__}: {error}".split())
                    if not isinstance(error, AgentRLError):
                        failure_line = f"{failure_line} ({place_of(error)})"
                        self._tracebacks.log(error, self._where(seen))
            if call_scope.cancelled_caught:
                failure_line = f"no answer within {self.settings.call_deadline_s:g} s"
        self._count.failed(turn_text, self.settings.retries + 1, failure_line)
        raise ScoreError(f"{self.settings.retries + 1} attempts failed, the last one: {failure_line}")

    def _where(self, seen: Trajectory) -> str:
        seen_task, turn_name = seen.task, seen.turns[-1].id
        turn_label = f"{seen_task.env}, seed {seen_task.seed} (task {seen_task.index}, turn {turn_name})"
        return f"reward source {self.settings.source!r} failed, {turn_label}"


def _own_callable(settings: RewardSource) -> TurnRewarder:
    """The callable of a run file. An async one has a trio loop of its own, in a thread: if it blocks, or never ends,
    its own source is late, and the worker goes on."""
    own_function: TurnRewarder = load_reference(settings.call or "")
    if not _is_async(own_function):
        return own_function
    # An async function of a user may block the loop that it runs on with one careless call. On the worker's loop that
    # stops every episode.
    # `tests/rewards/test_sources.py::test_an_async_source_of_ones_own_that_never_answers_holds_up_itself_alone`.
    loop_thread = LoopThread()

    async def within_deadline(seen: Trajectory) -> float | Verdict:
        with trio.fail_after(settings.call_deadline_s):
            return await cast("Awaitable[float | Verdict]", own_function(seen))

    return partial(loop_thread.run, within_deadline)


def _is_async(ask: TurnRewarder) -> bool:
    return inspect.iscoroutinefunction(ask) or inspect.iscoroutinefunction(type(ask).__call__)


async def _called(ask: TurnRewarder, seen: Trajectory, threads: trio.CapacityLimiter) -> Verdict:
    """A source's answer. A blocking one is left behind at the deadline, in its thread, and holds its place there."""
    if _is_async(ask):
        source_answer = ask(seen)
    else:
        # A thread cannot be stopped. Abandoned, it goes on until it ends by itself and holds its place of the limiter
        # until then, so a source that always hangs runs out of its own places and not of the process's threads.
        # `tests/rewards/test_sources.py::test_blocking_sources_that_hang_take_no_thread_from_the_environments`.
        source_answer = await trio.to_thread.run_sync(ask, seen, abandon_on_cancel=True, limiter=threads)
    source_value = await source_answer if inspect.isawaitable(source_answer) else source_answer
    return source_value if isinstance(source_value, Verdict) else Verdict(float(source_value))
