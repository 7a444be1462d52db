"""All plain data that crosses a package's boundary. Standard library only; immutable; no methods but views of the data.

How a token travels: an engine samples it (`Generation`), the episode journals it (`Turn`), the group of its
episode finishes (`Group`), the learner reads it (`Trajectory`). It is never re-tokenized on the way.

Worked example: an episode of two turns in ChatML. P is the rendered prompt, A and B are sampled, O is the tool's answer
rendered with the next generation prompt::

    turn 0: parent=None  prompt_ids=P  token_ids=A      context = P
    turn 1: parent=0     prompt_ids=O  token_ids=B      context = P A O
    row trained on:      P A O B       with A and B scored

If the environment rewrote history before turn 1 the prompt no longer extends `P A`: turn 1 gets `parent=None` and
its whole prompt, a *fork*, and the episode becomes two rows. If several roles take turns, each has its own chain: a
turn extends the last turn of its role.
"""

from __future__ import annotations

import hmac
import os
import secrets
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import chain, pairwise
from typing import Any, ClassVar, Final, Literal, NotRequired, TypedDict

Json = Any
"""A JSON-safe value: None, bool, int, float, str, list or dict of such."""


class ImagePart(TypedDict):
    """An image of a message: it stands before character `at` of the content. `url` holds its data (`data:`)."""

    at: int
    url: str


class Message(TypedDict):
    """One chat message. `content` is text; `tool_calls` have OpenAI's shape if a template needs them;
    `reasoning_content` are the thoughts of an assistant's message. An environment may give a content of OpenAI's parts,
    text and `image_url`: their text becomes the content, with `images` beside. A message that is `raw` is a whole
    prompt: no chat template writes around it, and control tokens in it are control tokens."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    images: NotRequired[list[ImagePart]]
    tool_calls: NotRequired[list[dict[str, Json]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    raw: NotRequired[bool]


Messages = tuple[Message, ...]


class StopReason(StrEnum):
    """Why an episode ended. `by_policy` says whether it stays in loss and baseline (law 3)."""

    DONE = "done"  # the environment terminated
    TRUNCATED = "truncated"  # the environment truncated for its own reason
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    TIME_LIMIT = "time_limit"
    TOOL_TIME_LIMIT = "tool_time_limit"
    CONTEXT_LIMIT = "context_limit"
    PARSE_FAILURE = "parse_failure"
    POLICY_FAULT = "policy_fault"  # it broke something that the environment needs, such as a file of its box
    ENGINE_FAILED = "engine_failed"
    SANDBOX_FAILED = "sandbox_failed"
    ENV_FAILED = "env_failed"
    EXPIRED = "expired"  # its group's deadline passed

    @property
    def by_policy(self) -> bool:
        """False for failures that the policy could not have caused."""
        return self not in _INFRASTRUCTURE


_INFRASTRUCTURE = frozenset(
    {StopReason.ENGINE_FAILED, StopReason.SANDBOX_FAILED, StopReason.ENV_FAILED, StopReason.EXPIRED}
)

Finish = Literal["stop", "length", "abort"]

POLICY = "policy"
"""The role of an environment that names none."""

ENV = "env"
"""The environment as a source of rewards."""

LARGEST = 1e30
"""The largest magnitude of a reward or an outcome: sums of these are finite, also in the learner's float32."""

UNKNOWN = -1
"""The state of a turn that nobody wrote down: it is like no other's."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start` (inclusive) to `end` (exclusive) of one generation were sampled under `version`. `recomputed`:
    here the turn went on in a new request, which computed all keys and values before `start` anew, under `version`."""

    version: int
    start: int
    end: int
    recomputed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """A set of weights. `version` is minted once and never reused, not even after a restart; `step` is the optimizer
    step that made it (two versions of one step differ only by a restart between them)."""

    version: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one turn. Log-probs are those of the distribution that these settings define: the logits divided by
    `temperature` (0 takes the likeliest token), then only the tokens at least `min_p` times as likely as the likeliest,
    of these the `top_k` likeliest (≤ 0: all), of these the fewest that together have a probability of `top_p`. A turn
    ends with a token of `stop_token_ids`, or with the token that completes a text of `stop`; both belong to it."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    @property
    def cuts(self) -> bool:
        """Whether a token is drawn from a part of the vocabulary: its kept set."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts that a mixture used for the tokens of a request, context and samples, from token `start` to the last
    but one (the last token is computed only when another follows). `data` is an array [tokens, layers, per_token] of
    unsigned little-endian integers of `width` bytes."""

    start: int
    layers: int
    per_token: int
    width: int
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) % (self.layers * self.per_token * self.width):
            raise ValueError(f"{len(self.data)} bytes are no whole tokens of {self.layers} x {self.per_token} experts")

    @property
    def end(self) -> int:
        """One past the last token covered."""
        return self.start + len(self.data) // (self.layers * self.per_token * self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """An engine's samples: `token_ids` [T], stop token included; `logprobs` [T] in nats; `spans` cover [0, T).
    `experts` is set only on request; `columns` holds more about each token, see `agentrl.tokens.columns`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish: Finish
    experts: RoutedExperts | None = None
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of one group of episodes: an environment id, its constructor arguments, a seed and reset options.
    `index` is the task's position in its source, so that a restart goes on from there."""

    index: int
    env: str
    seed: int
    kwargs: Mapping[str, Json] = field(default_factory=dict[str, Json])
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The environment's answer to one action (or to reset): messages to append, the turn's process reward,
    gymnasium's flags, and other facts that a run acts on. `agentrl.env.step_results` builds it from gymnasium's `info`,
    whose keys have the names of the fields; `info` here is the rest of it, JSON-safe and for people only.

    `outcome` is the episode's outcome reward and `success` whether it succeeded, each None if the environment does not
    set it; `stop_reason` is why it ended. `history` replaces all messages before it: a fork, unless it `continues` the
    conversation of an earlier turn, whose tokens stay, with the messages of `observation`. A `masked` turn stays in
    context but not in the loss. If several roles take turns, `role` acts next, and `rewards` and `outcomes` are by role
    (see `agentrl.env.multi_agent`). `unsettled` is added to the last turn's reward if something else ends the episode
    here, such as a limit of the run: a potential-based reward must then settle the potential of the current state.
    `observation_cut` counts the bytes of messages beyond the run's limit, and `compaction` is what happened to the
    conversation behind this answer (see `agentrl.rollout.compaction`); the driver sets both."""

    observation: Messages
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    outcome: float | None = None
    success: bool | None = None
    stop_reason: StopReason | None = None
    history: Messages | None = None
    continues: int | None = None
    masked: bool = False
    role: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    outcomes: Mapping[str, float] = field(default_factory=dict[str, float])
    unsettled: float = 0.0
    observation_cut: int = 0
    compaction: str = ""
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One action of the policy and the environment's answer.

    `id` names it within the run, already before the environment sees the action and also after a resume: see `turn_id`.
    `parent` is the index of the turn whose context and sampled tokens this turn's prompt extends verbatim, None if
    it starts anew; `prompt_ids` are the tokens between the parent's end and the first sampled token. `step` is None
    after the action was journaled until the environment has answered. `role` is the role that acted; `learns` is False
    if another policy played it (a frozen opponent): its versions are not the run's, and the turn is context only.
    `experts` begin where those of the turns before end, at the last token of `parent` unless it has none, so that a
    chain has no gap. `columns` holds more about each sampled token (`agentrl.tokens.columns`). `scores` are the scores
    of the reward sources other than the environment, and `score` is their sum, weighted as in the run file."""

    index: int
    parent: int | None
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish: Finish
    text: str
    step: Step | None = None
    role: str = POLICY
    learns: bool = True
    experts: RoutedExperts | None = None
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    score: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    id: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        token_count = len(self.token_ids)
        if len(self.logprobs) != token_count:
            raise ValueError(f"turn {self.index}: {token_count} tokens but {len(self.logprobs)} log-probs")
        # Checked when a turn is made: a token without a version has no age, so the lag bound could not hold for it (law
        # 2), and nobody could later find out which one it was.
        covered_tokens = 0
        for version_span in self.spans:
            if version_span.start != covered_tokens or version_span.end <= version_span.start:
                raise ValueError(f"turn {self.index}: version spans {self.spans} leave a gap at token {covered_tokens}")
            covered_tokens = version_span.end
        if covered_tokens != token_count:
            raise ValueError(f"turn {self.index}: version spans cover {covered_tokens} of {token_count} tokens")

    @property
    def rewards(self) -> dict[str, float]:
        """The turn's reward from each source; `env` is the environment, once it has answered."""
        return {**({} if self.step is None else {ENV: self.step.reward}), **self.scores}

    @property
    def reward(self) -> float:
        """Its process reward: the environment's and the weighted sum of the other sources' scores."""
        return (self.step.reward if self.step else 0.0) + self.score

    @property
    def state(self) -> int:
        """A number from 0: a hash of `prompt_ids`, equal for turns that answered the same text."""
        prompt_bytes = array("I", self.prompt_ids).tobytes()
        # Shifted, as the store's integers have a sign. And not Python's own hash: members of a group are compared that
        # were played in different processes.
        return int.from_bytes(blake2b(prompt_bytes, digest_size=8).digest(), "little") >> 1

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight version of each sampled token, [T]."""
        return tuple(
            version_span.version for version_span in self.spans for _ in range(version_span.start, version_span.end)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """A scored member's rewards, for the baseline of its siblings: exact, so that any estimator can be computed.

    `rewards` has one process reward for each turn of a role, in order; `outcomes` has the outcome rewards of roles with
    their own. In a run with reward sources, `streams` has by role and source the rewards that `rewards` sums up, before
    their `weights` (those of the environment are called `env`, with weight 1). `states` has the state of each turn of a
    role: two turns that answered the same text have the same (see `Turn.state`). It holds no tokens."""

    outcome: float
    outcomes: Mapping[str, float]
    rewards: Mapping[str, tuple[float, ...]]
    streams: Mapping[str, Mapping[str, tuple[float, ...]]] = field(
        default_factory=dict[str, Mapping[str, tuple[float, ...]]]
    )
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    states: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    def outcome_of(self, role: str) -> float:
        """The outcome reward of a role: its own, else the episode's."""
        return self.outcomes.get(role, self.outcome)

    def streams_of(self, role: str) -> Mapping[str, tuple[float, ...]]:
        """The process rewards of a role's turns by source."""
        return self.streams.get(role, {ENV: self.rewards.get(role, ())})


Earned = tuple[str, float, Mapping[str, float], Mapping[str, float], int]
"""What one turn earned: the role that acted, its reward from the environment, the rewards of other roles for this turn,
the scores of other sources; and the state it was in."""


def member_record(
    outcome: float, outcomes: Mapping[str, float], turns: Iterable[Earned], weights: Mapping[str, float]
) -> MemberRecord:
    """The record of a member, from its turns in order and the weights of the run's sources. The reward of another role
    is added to that role's last turn (a role that has not acted yet gets nothing)."""
    streams_by_role: dict[str, dict[str, list[float]]] = {}
    states_by_role: dict[str, list[int]] = {}
    for acting_role, turn_reward, other_rewards, source_scores, turn_state in turns:
        states_by_role.setdefault(acting_role, []).append(turn_state)
        for role_name, role_streams in streams_by_role.items():
            if role_name != acting_role:
                role_streams[ENV][-1] += float(other_rewards.get(role_name, 0.0))
        actor_streams = streams_by_role.setdefault(
            acting_role, {source_name: [] for source_name in (ENV, *sorted(weights))}
        )
        for source_name, stream_values in actor_streams.items():
            stream_values.append(turn_reward if source_name == ENV else source_scores.get(source_name, 0.0))
    return MemberRecord(
        outcome=outcome,
        outcomes=outcomes,
        rewards={role_name: _weighted(role_streams, weights) for role_name, role_streams in streams_by_role.items()},
        streams={
            role_name: {source_name: tuple(stream_values) for source_name, stream_values in role_streams.items()}
            for role_name, role_streams in streams_by_role.items()
            if weights
        },
        weights=dict(weights),
        states={role_name: tuple(role_states) for role_name, role_states in states_by_role.items()},
    )


def _weighted(streams: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> tuple[float, ...]:
    """The weighted sum of a role's streams, turn by turn."""
    # In one order, always: the sum of floats depends on it, and a baseline must come out equal wherever it is computed.
    source_names = sorted(weights)
    return tuple(
        env_reward + sum(weights[source] * value for source, value in zip(source_names, values, strict=True))
        for env_reward, *values in zip(streams[ENV], *(streams[source] for source in source_names), strict=True)
    )


@dataclass(frozen=True, slots=True)
class ShownTools:
    """The tools that a conversation offers: their schemas as the chat template gets them, and the dialect in which the
    policy writes its calls (see `agentrl.env.tools.parsers`). Without schemas the texts themselves teach the tools."""

    schemas: tuple[Mapping[str, Json], ...] = ()
    dialect: str = ""


NO_TOOLS: Final = ShownTools()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """An episode as far as it went. `outcome` is its outcome reward, None until scored; `outcomes` has those of its
    roles if the environment gives each its own. `weights` are those of the run's reward sources, `tools` those that the
    first conversation of the episode offered."""

    episode_id: int
    group_id: int
    member: int
    task: Task
    start: Messages
    turns: tuple[Turn, ...]
    stop_reason: StopReason | None = None
    outcome: float | None = None
    success: bool | None = None
    outcomes: Mapping[str, float] = field(default_factory=dict[str, float])
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    tools: ShownTools = NO_TOOLS

    @property
    def scored(self) -> bool:
        """Whether it may enter loss and baseline: it ended, not by a failure of infrastructure, and has an outcome."""
        return self.stop_reason is not None and self.stop_reason.by_policy and self.outcome is not None

    @property
    def record(self) -> MemberRecord:
        """The record that this trajectory would give for the baseline of its siblings."""
        earned_turns = (
            (
                turn.role,
                turn.step.reward if turn.step else 0.0,
                turn.step.rewards if turn.step else dict[str, float](),
                turn.scores,
                turn.state,
            )
            for turn in self.turns
        )
        return member_record(self.outcome or 0.0, self.outcomes, earned_turns, self.weights)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The process reward of each turn."""
        return tuple(turn.reward for turn in self.turns)


def turn_id(episode_id: int, trial: int, index: int) -> str:
    """A turn's name for reward sources: `12.0.3` is turn 3 of episode 12, in its first trial (an episode that starts
    anew is in its next trial)."""
    return f"{episode_id}.{trial}.{index}"


def context_ids(turns: Sequence[Turn], index: int) -> tuple[int, ...]:
    """All tokens before the first sampled token of `turns[index]`, by following parents."""
    context_parts: list[tuple[int, ...]] = []
    context_turn = turns[index]
    while True:
        # From the end to the beginning, and joined once: a conversation of a hundred turns would otherwise be copied a
        # hundred times.
        context_parts.append(context_turn.prompt_ids)
        if context_turn.parent is None:
            break
        context_turn = turns[context_turn.parent]
        context_parts.append(context_turn.token_ids)
    return tuple(chain.from_iterable(reversed(context_parts)))


def spans_of(versions: Sequence[int], recomputed: Collection[int] = ()) -> tuple[VersionSpan, ...]:
    """Join equal neighbours into spans: `[3, 3, 4]` gives version 3 for [0, 2) and version 4 for [2, 3). `recomputed`
    has the tokens before which keys and values were computed anew; where they had that version anyway, it is no news
    and makes no span."""
    if versions and versions.count(versions[0]) == len(versions):  # most often
        return (VersionSpan(versions[0], 0, len(versions)),)
    recomputed_starts, version_start = set[int](), 0
    for position in sorted(recomputed):
        if position < len(versions) and any(
            version != versions[position] for version in versions[version_start:position]
        ):
            recomputed_starts.add(position)
            version_start = position
    inner_bounds = [
        position
        for position in range(1, len(versions))
        if versions[position] != versions[position - 1] or position in recomputed_starts
    ]
    span_bounds = [0, *inner_bounds, len(versions)] if versions else []
    return tuple(
        VersionSpan(versions[span_start], span_start, span_end, span_start in recomputed_starts)
        for span_start, span_end in pairwise(span_bounds)
    )


class GroupState(StrEnum):
    """The state of a group. A `SCORED` group is closed: its record is written, and members that still run are late.
    `TAKEN` carries the learner step; a checkpoint at step k turns taken ≤ k into trained, a restart from k puts
    taken > k back to scored."""

    WAITING = "waiting"
    RUNNING = "running"
    SCORED = "scored"
    TAKEN = "taken"
    TRAINED = "trained"
    EXPIRED = "expired"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sibling episodes of one task. `started_step` is the learner step at its admission, `taken_step` the step that
    took it (late members may be taken later).

    In a group read whole, `trajectories` are all its members. In a group taken for a step, they are the members that
    the step trains; `left_out` are members that leave untrained: infrastructure failed them, or all their tokens are
    too old. `record` holds the records for the baseline, by member, as they ended; if None, the baseline is over
    `trajectories`.
    A `skipped` group left the buffer without signal: all its members are in `left_out`, and only report how they did.
    `weight` multiplies its share of the loss: the correction of an order that prefers some groups (see `group_order`).
    """

    id: int
    task: Task
    state: GroupState
    size: int
    trajectories: tuple[Trajectory, ...]
    started_step: int = 0
    taken_step: int | None = None
    left_out: tuple[Trajectory, ...] = ()
    record: Mapping[int, MemberRecord] | None = None
    skipped: bool = False
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKey:
    """The secrets of an engine: `value` is shown with each request; `signing` signs the requests that change the engine
    and is never sent. A process that only samples has none. What an engine that a user keyed by hand is signed with
    follows from its one key."""

    value: str = field(repr=False)
    signing: str | None = field(default=None, repr=False)

    VALUE: ClassVar[str] = "AGENTRL_ENGINE_KEY"  # environment variables
    SIGNING: ClassVar[str] = "AGENTRL_WEIGHTS_KEY"

    @classmethod
    def of(cls, value: str) -> EngineKey:
        """Make the key of an engine that has one secret for everything."""
        return cls(value=value, signing=hmac.new(value.encode(), b"agentrl weights", "sha256").hexdigest())

    @classmethod
    def fresh(cls) -> EngineKey:
        """Make a key of new secrets."""
        return cls(value=secrets.token_urlsafe(24), signing=secrets.token_urlsafe(24))

    @classmethod
    def of_environment(cls) -> EngineKey | None:
        """Read the key from this process's environment; None if it has none. One secret alone is for everything, one
        beside an empty one is not for changes."""
        key_value, signing_key = os.environ.get(cls.VALUE), os.environ.get(cls.SIGNING)
        if not key_value:
            return None
        return cls.of(key_value) if signing_key is None else cls(value=key_value, signing=signing_key or None)

    def variables(self, *, signs: bool) -> dict[str, str]:
        """Return the environment variables that a process needs; with `signs`, to change engines, or to check who
        does."""
        return {self.VALUE: self.value, self.SIGNING: (self.signing or "") if signs else ""}
