"""One episode, as a state machine over the journal:

    begin ─► render ─► generate ─► journal the action ─► env.step ─► journal the answer ─► … ─► finish

Every arrow that costs something has a deadline. The policy pays for the work that it asks of the environment: its
tools, its code and their judging may take `step_deadline_s` in a step and `episode_deadline_s` in all steps together.
If either runs out, the episode ends with a time limit, and is scored. Neither counts the model's generation or waiting
for the host's shared resources (see `agentrl.host.clocks`). The environment's own code has `step_deadline_s` of its own
per call; past it the environment has failed.

The action is journaled before the environment sees it, so that a crash in between repeats the step and never the
sampling (law 1). An episode owns its environment and ends it; it never decides which episode comes next.

With several roles, the environment decides which one acts next: `Step.role` of the reset and of every answer. Each role
is a conversation of its own: its turns extend the role's last one, and are sampled by the learning policy or by the one
that the role is bound to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import trio

from agentrl.config import Rollout
from agentrl.env import step_results
from agentrl.errors import ContextFull, EnvError, InfrastructureError, PolicyFault, StoreError, Tracebacks, boundary
from agentrl.host import json_log
from agentrl.protocols import AsyncEnv, Engine, GenerateRequest, KeyedEnv, MessageRenderer, Rewarder, SnapshotEnv
from agentrl.records import (
    NO_TOOLS,
    POLICY,
    Json,
    Messages,
    SamplingParams,
    ShownTools,
    Step,
    StopReason,
    Task,
    Trajectory,
    Turn,
    context_ids,
    turn_id,
)
from agentrl.rollout import compaction
from agentrl.rollout.drain import TurnGate, TurnPaused
from agentrl.rollout.env_calls import EnvCalls, TimeUp, one_line, reason_of, rewarded
from agentrl.rollout.generate_turn import sample, untold
from agentrl.rollout.opponents import Opponents
from agentrl.rollout.render_messages import rendered
from agentrl.rollout.restore import replay, replay_after
from agentrl.rollout.resume_modes import resumed
from agentrl.rollout.take_snapshots import keep_artifacts, keep_snapshot, prepare
from agentrl.store import TRAIN, Claim, Ending, Partial
from agentrl.store.episodes.groups import DURING
from agentrl.store.interfaces import EpisodeStore
from agentrl.tokens import images

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """The context that all episodes of a worker share. `frozen` binds roles to engines whose policy does not learn."""

    engine: Engine
    renderer: MessageRenderer
    store: EpisodeStore
    settings: Rollout
    make_env: Callable[[Task], AsyncEnv]
    rewarder: Rewarder | None = None
    frozen: Mapping[str, Engine] = field(default_factory=dict[str, Engine])
    pinned: Engine | None = None  # of evaluations during training, whatever the others sample from by then
    adapted: Collection[str] = ()  # roles whose tokens an adapter of their own samples
    opponents: Opponents = field(default_factory=Opponents)  # past selves that play roles
    experts: bool = False  # journal those that a mixture of experts chose for sampled tokens
    eval_sampling: SamplingParams | None = None  # of turns that only measure the policy; None: as in training
    artifacts: bool = False  # keep the files that a reward source tests
    gate: TurnGate = field(default_factory=TurnGate)
    tracebacks: Tracebacks = field(default_factory=Tracebacks)


@dataclass(frozen=True, slots=True)
class StopCause:
    """How an episode ended; `detail` is the one-line cause of a failure, `error` one that the policy could not have
    caused."""

    stop_reason: StopReason
    detail: str = ""
    error: InfrastructureError | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Where the next turn begins: `prompt_ids` extend the turn `parent` (None: they start anew); `context` is all that
    `role` has read and said, from the start of its conversation."""

    role: str
    parent: int | None
    prompt_ids: tuple[int, ...]
    context: tuple[int, ...]


async def play(claim: Claim, context: RolloutContext) -> StopCause:
    """Play a claimed episode to its end and finish it in the store.

    Failures of engine, sandbox, environment and rewarder end the episode with a reason that keeps it out of the loss
    (law 3); a PolicyFault that the environment does not answer ends it, and it is scored.
    Raises LeaseLost when another worker has the episode by now, or its group starts anew; StoreError when the journal
    cannot be written; HandedBack once the worker is leaving."""
    with json_log.about(episode=claim.episode_id, group=claim.group_id, task=claim.task.index):
        return await resumed(claim, context.store, context.settings, partial(_play, context))


async def _play(context: RolloutContext, claim: Claim, unbroken: bool) -> StopCause:
    episode = _Episode(claim, context, unbroken)
    try:
        try:
            ending = await episode.run()
        finally:
            await episode.close()
    except StoreError:
        raise
    except InfrastructureError as error:
        ending = episode.failed(error)
    ending = await episode.score(ending)
    await episode.finish(ending)
    log.info("the episode ended: %s%s", ending.stop_reason.value, f" ({ending.detail})" if ending.detail else "")
    return ending


class _Episode:
    """The turns so far, as the journal holds them, and the live environment."""

    def __init__(self, claim: Claim, context: RolloutContext, unbroken: bool) -> None:
        self._claim, self._context, self._unbroken = claim, context, unbroken
        self._turns: list[Turn] = list(claim.turns)
        self._trial = claim.trial
        self._start: Messages = claim.start or ()
        self._tools = NO_TOOLS  # that the first conversation of the episode offers
        self._env: AsyncEnv | None = None
        self._keyed: KeyedEnv | None = None
        self._first_role: str | None = None
        self._said = Step(observation=())  # what the environment said last
        self._next: _Prompt | None = None  # the next turn's, if it is rendered already
        self._begun = claim.partial  # tokens of the next turn that are sampled already
        self._has_images = any(_has_images(turn.prompt_ids) for turn in claim.turns)
        self._pauses = 0  # that broke a turn off
        self._guard = EnvCalls(claim.task.env, context.settings.step_deadline_s)
        self._schemas: Sequence[Mapping[str, Json]] | None = None  # the tools of the conversation
        self._snapshots = True  # whether its environment may be asked for snapshots
        self._detail = ""
        self._rewarded: float | None = None
        own = context.pinned if DURING in claim.purpose else None
        self._engine = context.engine if own is None else own
        self._given = {*context.frozen, *context.opponents.roles(claim)}  # roles of policies that do not learn

    async def run(self) -> StopCause:
        ending = self._ended()  # not None: it was over, and only its end was not written
        if ending is None:
            ending = await self._begin()
        while ending is None:
            await self._context.gate.passed()
            with json_log.about(**self._ids(len(self._turns))):
                ending = await self._turn()
        return ending

    def _ids(self, index: int) -> dict[str, Any]:
        """What the log's lines of a turn have: engines know it by its request alone."""
        return {"turn": index, "request": f"{self._claim.episode_id}-{self._claim.fence}-{index}"}

    async def close(self) -> None:
        """End the environment, within a deadline of its own, also when the episode was cancelled."""
        env, self._env = self._env, None
        if env is None:
            return
        with trio.move_on_after(self._context.settings.step_deadline_s, shield=True):
            where = f"{self._claim.task.env}: close raised"
            with boundary(EnvError, where, passes=(InfrastructureError,), place=True):
                await env.aclose()

    async def score(self, ending: StopCause) -> StopCause:
        """Ask the rewarder, if there is one, for the reward of an episode that did not fail. If the rewarder fails, the
        episode ends as failed; if the policy's work cannot be judged in time, the reward is 0."""
        rewarder = self._context.rewarder
        if rewarder is None or not ending.stop_reason.by_policy:
            return ending

        try:
            self._rewarded = await rewarded(rewarder, self._trajectory(ending), self._guard)
        except TimeUp as up:
            self._rewarded = 0.0
            return StopCause(StopReason.TIME_LIMIT, str(up))
        except InfrastructureError as error:
            fault = error.__cause__
            return self.failed(error, fault if isinstance(fault, PolicyFault) else None)
        return ending

    def failed(self, error: InfrastructureError, cause: Exception | None = None) -> StopCause:
        """The ending by a failure that the policy could not have caused; the first of each kind is logged whole."""
        ending = StopCause(reason_of(error), one_line(error), error)
        claim, task = self._claim, self._claim.task
        where = f"{task.env}, seed {task.seed} (task {task.index}, episode {claim.episode_id})"
        self._context.tracebacks.log(cause or error, f"{where}: {ending.detail}")
        return ending

    async def finish(self, ending: StopCause) -> None:
        """Write the episode's end, with outcome and success where it is scored."""
        outcomes = self._outcomes(ending)
        outcome, success = self._outcome(ending, outcomes)
        await self._context.store.finish(
            self._claim.episode_id,
            self._claim.fence,
            Ending(
                stop_reason=ending.stop_reason,
                outcome=outcome,
                success=success,
                outcomes=outcomes,
                detail=ending.detail,
            ),
        )

    # --- the steps of the machine

    async def _begin(self) -> StopCause | None:
        """Make the environment. Start the episode, or bring the environment to where the journal stands: by its newest
        snapshot and a replay of the turns after it, else by a replay of all turns."""
        claim, store = self._claim, self._context.store
        env = await self._make()
        unrestored = await self._restore(env)
        if unrestored == "":
            return await self._go_on()
        if unrestored is not None:
            await self.close()
            env, self._guard.seconds = await self._make(), 0.0
        self._start = await self._reset(env)
        if claim.start is not None:
            reason = await self._replay(env)
            if not reason:
                return await self._go_on()
            reason = f"{reason}; and of its snapshot: {unrestored}" if unrestored else reason
            reason = "; ".join(filter(None, (reason, await store.unsaved(claim.episode_id))))
            if claim.fork_turn is not None:  # its siblings begin at that turn
                raise EnvError(f"a fork cannot be brought to turn {len(claim.turns)}: {reason}")
            await store.restart_episode(claim.episode_id, claim.fence, reason)
            self._turns, self._begun, self._trial = [], None, self._trial + 1
            self._guard.seconds = 0.0
            self._start = await self._reset(env)
        schemas: Sequence[Mapping[str, Json]] = await self._guard("tool_schemas", lambda: _call(env.tool_schemas))
        self._schemas = schemas
        if schemas:
            self._tools = ShownTools(tuple(schemas), getattr(env, "tool_format", None) or env.template_format)
        await store.begin(claim.episode_id, claim.fence, self._start, self._tools)
        return None

    async def _make(self) -> AsyncEnv:
        env: AsyncEnv = await self._guard("make", lambda: _call(self._context.make_env, self._claim.task))
        self._env, self._keyed = env, env if isinstance(env, KeyedEnv) else None  # a slow question: once an episode
        prepare(env, self._context.settings)
        env.template_format = self._context.renderer.tool_format or ""
        return env

    async def _go_on(self) -> StopCause | None:
        """Go on where the journal stands: have the last action answered if it is not."""
        unanswered = bool(self._turns) and self._turns[-1].step is None
        with json_log.about(**self._ids(len(self._turns) - 1)):
            return await self._answer() if unanswered else None

    async def _restore(self, env: AsyncEnv) -> str | None:
        """Bring a fresh environment to where the journal stands by its newest snapshot. Returns "" if it is there, the
        reason if it is not, None without a snapshot."""
        snapshot = None
        if self._turns and isinstance(env, SnapshotEnv) and env.has_snapshots:
            snapshot = await self._context.store.snapshot(self._claim.episode_id)
        if snapshot is None:
            return None
        assert isinstance(env, SnapshotEnv)
        try:
            await self._guard("restore", partial(env.restore, snapshot.data))
            said = self._turns[snapshot.turn].step
            assert said is not None, "a snapshot is taken of a turn that is answered"
            self._said, self._guard.seconds = said, snapshot.seconds
            return await replay_after(env, snapshot.turn, self._claim, self._act)
        except (TimeUp, PolicyFault, InfrastructureError) as error:
            return one_line(error)

    async def _snapshot(self) -> None:
        """Keep a snapshot of the environment if it is due; if that failed once, it is not asked again."""
        env, context, turn = self._env, self._context, len(self._turns) - 1
        if self._snapshots and env is not None:
            self._snapshots = await keep_snapshot(env, self._guard, context.store, context.settings, self._claim, turn)

    async def _replay(self, env: AsyncEnv) -> str:
        """Bring a fresh environment to where the journal stands. Returns "", or the reason if it cannot."""
        try:
            return await replay(env, self._start, self._claim, self._act)
        except (TimeUp, PolicyFault) as error:
            return f"an action that was answered before was not: {one_line(error)}"

    async def _reset(self, env: AsyncEnv) -> Messages:
        most = self._context.settings.observation_bytes
        start: Step = await self._guard("reset", lambda: step_results.start(env, self._claim.task, most))
        self._said, self._first_role = start, start.role
        return start.observation

    async def _turn(self) -> StopCause | None:
        """One action and its answer; a `StopCause` if it was the last."""
        context, settings = self._context, self._context.settings
        try:
            prompt, self._next = self._next or await self._prompt(), None
        except PolicyFault as fault:  # of a journal that another chat template rendered
            return StopCause(StopReason.POLICY_FAULT, one_line(fault))
        room = settings.max_context - len(prompt.context)
        if room < 1:  # even the first prompt does not fit, or the run was resumed with less room
            which = f"the prompt of turn {len(self._turns)}" if self._turns else "the first prompt"
            return await self._no_room(f"{which} {_beyond(len(prompt.context), settings.max_context)}")
        try:
            turn = await self._generate(prompt, min(settings.max_tokens_per_turn, room))
        except ContextFull as error:
            return await self._no_room(one_line(error))
        await context.store.journal_turn(self._claim.episode_id, self._claim.fence, turn)
        log.info("the turn has %d tokens (%s)", len(turn.token_ids), turn.finish)
        self._turns.append(turn)
        return await self._answer()

    async def _no_room(self, detail: str) -> StopCause:
        """The ending before a turn for which the context has no room."""
        self._said = step_results.joined(self._said, await self._last_word(StopReason.CONTEXT_LIMIT))
        return StopCause(StopReason.CONTEXT_LIMIT, detail)

    async def _answer(self) -> StopCause | None:
        """Have the last turn answered, and journal the answer. If a limit of the run or a fault ends the episode here,
        the answer holds the stop reason and, at a limit, the environment's last word."""
        turn, reason = self._turns[-1], None
        step = Step(observation=())
        try:
            step = await self._act(turn)
        except TimeUp as up:
            reason, self._detail = StopReason.TIME_LIMIT, str(up)
        except PolicyFault as fault:
            reason, self._detail = StopReason.POLICY_FAULT, one_line(fault)
        self._turns[-1] = replace(turn, step=step)
        if reason is None and not (step.terminated or step.truncated):
            try:
                reason = await self._limit()
            except PolicyFault as fault:  # the chat template refuses what its words led to
                reason, self._detail = StopReason.POLICY_FAULT, one_line(fault)
        if reason is not None:
            step = await self._cut(step, reason)
            self._turns[-1] = replace(turn, step=step)
        if self._context.artifacts and turn.learns and self._env is not None:
            context, deadline_s = self._context, self._context.settings.step_deadline_s
            await keep_artifacts(self._env, self._guard, context.store, self._claim, turn.id, deadline_s)
        await self._context.store.journal_step(self._claim.episode_id, self._claim.fence, turn.index, step)
        log.info("the environment answered: reward %g", step.reward)
        ending = self._ended()
        if ending is None:
            await self._snapshot()
        return ending

    async def _limit(self) -> StopReason | None:
        """The limit of the run that is reached with the last turn, if any."""
        settings = self._context.settings
        if settings.max_turns is not None and compaction.acts(self._turns) >= settings.max_turns:
            return StopReason.TURN_LIMIT
        if self._guard.seconds >= settings.episode_deadline_s:
            return StopReason.TIME_LIMIT
        self._next = await self._render()
        return StopReason.CONTEXT_LIMIT if len(self._next.context) >= settings.max_context else None

    async def _cut(self, step: Step, reason: StopReason) -> Step:
        """The last step of an episode that the environment did not end: its `unsettled` reward is added."""
        due = self._said.unsettled
        if reason is not StopReason.POLICY_FAULT:
            step = step_results.joined(step, await self._last_word(reason))
        return replace(step, reward=step.reward + due, truncated=True, stop_reason=reason)

    async def _last_word(self, reason: StopReason) -> Step:
        """The environment's last word on an episode that ends at a limit of the run: it may judge the work so far. If
        that work cannot be judged, or not in time, the outcome is 0."""
        env = self._env
        assert env is not None
        deadline_s = self._context.settings.step_deadline_s
        try:
            return await self._guard(
                "end", lambda: step_results.end(env, reason, self._claim.task), policy_s=deadline_s
            )
        except (TimeUp, PolicyFault) as error:
            self._detail = self._detail or one_line(error)
            return Step(observation=(), outcome=0.0, success=False)

    async def _prompt(self) -> _Prompt:
        """The prompt of the next turn: that of the interrupted turn, if there is one."""
        begun = self._begun
        if begun is None:
            return await self._render()
        context = begun.prompt_ids
        if begun.parent is not None:
            context = context_ids(self._turns, begun.parent) + self._turns[begun.parent].token_ids + context
        return _Prompt(begun.role, begun.parent, begun.prompt_ids, context)

    async def _render(self) -> _Prompt:
        """Render the next turn up to where its role speaks. Tools are asked for at every fresh start and fork: the
        environment may not know them earlier, and may have changed them."""
        acts, news, history = self._first_role, self._start, None
        if self._turns:
            step = self._turns[-1].step
            assert step is not None
            acts, news, history = step.role, step.observation, step.history
        role = POLICY if acts is None else acts
        last = next((turn for turn in reversed(self._turns) if turn.role == role), None)
        if history is not None or last is None:
            prompt_ids = await self._started(news if history is None else history)
            return _Prompt(role, None, prompt_ids, prompt_ids)
        prompt_ids = await self._extended(last, news)
        context = context_ids(self._turns, last.index) + last.token_ids + prompt_ids
        return _Prompt(role, last.index, prompt_ids, context)

    async def _started(self, messages: Messages) -> tuple[int, ...]:
        """The tokens of a conversation that starts with `messages`."""
        env, task = self._env, self._claim.task
        assert env is not None
        schemas = self._schemas
        if schemas is None or self._turns:  # a rewritten history may come with other tools
            schemas = self._schemas = await self._guard("tool_schemas", lambda: _call(env.tool_schemas))
        start = partial(self._context.renderer.start, tools=schemas)
        return await rendered(
            start,
            messages,
            schemas,
            env=task.env,
            acted=bool(self._turns),
            policy_writes=getattr(env, "policy_writes_prompts", False),
        )

    async def _extended(self, last: Turn, messages: Messages) -> tuple[int, ...]:
        """The tokens that extend the conversation whose last turn is `last`."""
        env, schemas = self._env, self._schemas
        assert env is not None
        if schemas is None:  # the conversation began in another worker
            schemas = self._schemas = await self._guard("tool_schemas", lambda: _call(env.tool_schemas))
        extend = partial(self._context.renderer.extend, last.token_ids, tools=schemas)
        policy_writes = getattr(env, "policy_writes_prompts", False)
        return await rendered(extend, messages, env=self._claim.task.env, acted=True, policy_writes=policy_writes)

    async def _generate(self, prompt: _Prompt, max_tokens: int) -> Turn:
        context, claim, index = self._context, self._claim, len(self._turns)
        learns = prompt.role not in self._given
        trains = claim.purpose == TRAIN
        sampling = context.settings.sampling if trains else context.eval_sampling or context.settings.sampling
        request = GenerateRequest(
            request_id=self._ids(index)["request"] + f"-{self._pauses}" * bool(self._pauses),
            session=str(claim.group_id),
            token_ids=prompt.context,
            sampling=replace(sampling, max_tokens=max_tokens, stop_token_ids=context.renderer.stop_token_ids),
            deadline_s=context.settings.turn_deadline_s,
            policy=prompt.role if prompt.role in context.adapted else None,
            version=await context.opponents.version(context.store, claim, prompt.role, self._turns, self._begun),
            experts_from=untold(self._turns, prompt.parent) if context.experts and learns else None,
            kept=trains and learns and sampling.cuts,
            images=self._shown(prompt),
        )
        begun = self._begun or Partial(
            index=index, parent=prompt.parent, role=prompt.role, prompt_ids=prompt.prompt_ids, started_s=time.time()
        )
        every = context.settings.checkpoint_tokens
        turn = sample(
            context.frozen.get(prompt.role, self._engine),
            request,
            begun,
            decode=context.renderer.decode,
            keep=partial(context.store.post_partial, claim.episode_id, claim.fence),
            every=every,
            unbroken=self._unbroken,
        )
        try:
            generation = await (context.gate.during(turn, breakable=not self._unbroken) if every else turn)
        except TurnPaused:
            self._begun = (await context.store.reload(claim)).partial or begun
            self._pauses += 1
            await context.gate.passed()
            return await self._generate(prompt, max_tokens)
        self._begun = None
        return Turn(
            id=turn_id(claim.episode_id, self._trial, index),
            index=index,
            parent=prompt.parent,
            prompt_ids=prompt.prompt_ids,
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            spans=generation.spans,
            finish=generation.finish,
            text=context.renderer.decode(generation.token_ids),
            role=prompt.role,
            learns=learns,
            experts=generation.experts,
            columns=generation.columns,
            started_s=begun.started_s,
            ended_s=time.time(),
        )

    def _shown(self, prompt: _Prompt) -> tuple[images.Image, ...]:
        """The images of a context, which messages of the episode hold."""
        self._has_images = self._has_images or _has_images(prompt.prompt_ids)
        if not self._has_images:
            return ()
        with boundary(EnvError, f"{self._claim.task.env}:"):
            return images.shown(prompt.context, images.of_steps(self._start, (turn.step for turn in self._turns)))

    async def _act(self, turn: Turn) -> Step:
        """The environment's answer to a turn; a turn of notes never reaches it. Raises TimeUp, PolicyFault."""
        env, settings = self._env, self._context.settings
        if compaction.writes_notes(self._turns, turn.index):
            before = self._turns[turn.index - 1].step
            assert before is not None
            if env is not None:  # they are sampled tokens, which `EpisodeLimits.tokens` bounds
                env.charge_tokens(len(turn.token_ids))
            return compaction.noted(self._start, before, turn.text)
        assert env is not None
        env.charge_tokens(len(turn.token_ids))
        env.action_cut = turn.finish == "length"
        if self._keyed is not None:
            self._keyed.action_id = turn.id
        policy_s = max(min(settings.step_deadline_s, settings.episode_deadline_s - self._guard.seconds), 0.0)
        call = partial(step_results.act, env, turn.text, self._claim.task, settings.observation_bytes, turn.index)
        step: Step = await self._guard("step", call, policy_s=policy_s)
        self._said = step
        return await self._compacted(turn, step)

    async def _compacted(self, turn: Turn, step: Step) -> Step:
        """The answer to a turn, and the compaction that is due behind it: as the journal has it, if it has the turn's
        answer already."""
        settings = self._context.settings.compaction
        if turn.step is not None:  # in a worker before, perhaps with other settings
            return compaction.as_before(step, turn.step)
        if settings is None or step.terminated or step.truncated or step.history is not None:
            return step
        if step.role is not None or turn.role != POLICY:
            raise EnvError(f"{self._claim.task.env}: rollout.compaction is for environments of one role: leave it out")
        by_policy = settings.how == compaction.SUMMARY
        asked = compaction.ask(step, settings.request) if by_policy else step
        before = len(context_ids(self._turns, turn.index)) + len(turn.token_ids)
        most = settings.at * self._context.settings.max_context
        if before + compaction.most_tokens(asked.observation) < most:  # so that few answers are rendered twice
            return step
        context = before + len(await self._extended(turn, asked.observation))
        if context < most or by_policy:
            return step if context < most else asked
        where = f"rollout.compaction.how = {settings.how!r}"
        messages = compaction.conversation(self._start, self._turns, step)
        history = await self._guard(where, partial(compaction.shortened, settings, messages, where))
        if len(await self._started(history)) >= context:
            return replace(step, compaction=compaction.NO_SHORTER)
        return replace(step, history=history, compaction=compaction.SHORTENED)

    def _ended(self) -> StopCause | None:
        """How the last step ended the episode; None if it did not."""
        step = self._turns[-1].step if self._turns else None
        if step is None or not (step.terminated or step.truncated):
            return None
        self._said = step
        if step.stop_reason is not None:
            return StopCause(step.stop_reason, self._detail)
        return StopCause(StopReason.DONE if step.terminated else StopReason.TRUNCATED)

    def _outcomes(self, ending: StopCause) -> dict[str, float]:
        """The outcome of each role, if the environment gives them; with a rewarder all roles have the same."""
        if not ending.stop_reason.by_policy or self._context.rewarder is not None:
            return {}
        return dict(self._said.outcomes)

    def _outcome(self, ending: StopCause, outcomes: Mapping[str, float]) -> tuple[float | None, bool | None]:
        """Outcome reward and success. The outcome is the rewarder's if there is one; else that of the one learning
        role, if the environment gives outcomes by role and just one learns; else the environment's, or 0 without any:
        step rewards are then the whole signal. Success is the environment's; if it gives none, the one role succeeds
        from 1.0 on."""
        if not ending.stop_reason.by_policy:
            return None, None
        success = self._said.success
        learning = [role for role in outcomes if role not in self._given]
        if self._rewarded is not None:
            outcome = self._rewarded
        elif len(learning) == 1:
            outcome = outcomes[learning[0]]
            success = outcome >= 1.0 if success is None else success
        else:
            outcome = self._said.outcome or 0.0
        return outcome, success

    def _trajectory(self, ending: StopCause) -> Trajectory:
        """The episode as a rewarder gets it: with the environment's own verdict, so that a reward may be "the outcome
        less a penalty"."""
        claim, turns, outcomes = self._claim, list(self._turns), dict(self._said.outcomes)
        outcome, success = self._outcome(ending, outcomes)
        if turns and (step := turns[-1].step) is not None:  # the last word at a full context is no turn's answer
            turns[-1] = replace(turns[-1], step=step_results.joined(step, self._said))
        return Trajectory(
            episode_id=claim.episode_id,
            group_id=claim.group_id,
            member=claim.member,
            task=claim.task,
            start=self._start,
            turns=tuple(turns),
            stop_reason=ending.stop_reason,
            tools=self._tools,
            outcome=outcome,
            success=success,
            outcomes=outcomes,
        )


def _has_images(token_ids: Sequence[int]) -> bool:
    return max(token_ids, default=0) >= images.FIRST


def _beyond(tokens: int, most: int) -> str:
    mend = f"raise it to {tokens + 1} or more, or shorten the prompt"
    return f"has {tokens} tokens, and rollout.max_context = {most}: {mend}"


async def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
