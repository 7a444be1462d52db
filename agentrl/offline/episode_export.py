"""Episodes of a run as files: untrained ones for another run of the same model and tasks, the best as demonstrations.

A file for another run is data: zstandard over lines of JSON. The first line tells the run and its tokenizer; then each
group has a line, and one for each of its members. A reader trusts nothing of it: lines and numbers are bounded, every
field is checked, an environment and its arguments must be those of the run that takes it. A group is written in one
transaction, or not at all. Snapshots are bytes that only the environment's own `restore` reads.

Demonstrations are chosen by rejection sampling, for `agentrl sft`: the choice needs one line for each episode, then one
episode after the other is read and written. The same store and the same choice give the same file.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import zstandard
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.config import RunConfig
from agentrl.env.spaces import Messages
from agentrl.errors import StoreError, UsageError
from agentrl.models.resolve import model_dir, vocabulary
from agentrl.records import POLICY, RoutedExperts, Step, StopReason, Task, Trajectory, Turn, VersionSpan
from agentrl.rewards.transcripts import messages_of
from agentrl.run.task_sources import first_tasks
from agentrl.store import TRAIN, EnvSnapshot, EpisodeRow, MovedGroup, MovedMember, Partial
from agentrl.store.codec import pack_answer, pack_identity, pack_messages, pack_task, unpack_answer, unpack_task
from agentrl.store.episodes.endings import Ending
from agentrl.store.interfaces import MovingStore, ReadStore
from agentrl.tokens import images, staleness

FORMAT: Final = "agentrl episodes 1"
_LEVEL: Final = 3
_LINE: Final = 64 << 20  # bytes
_GROUP: Final = 256 << 20  # bytes of all lines of a group, which comes in whole
_WINDOW: Final = 8 << 20  # memory that reading a stream may take
_MEMBERS: Final = 4096
_ROUNDING: Final = 1e-3  # nats that a log-prob may be above 0
T = TypeVar("T", bound=BaseModel)
Id = Annotated[int, Field(ge=0, lt=1 << 32)]
Index = Annotated[int, Field(ge=0, lt=1 << 20)]
Age = Annotated[int, Field(ge=0, lt=1 << 40)]
Seconds = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(description="a text as JSON: it may hold what no UTF-8 can")]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Head(_Line):
    """The first line. `tokenizer` is the digest of the model's tokenizer.json."""

    format: Literal["agentrl episodes 1"]
    run: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    tokenizer: str


class GroupLine(_Line):
    """A group: `size` lines of members follow. `ages`: how many optimizer steps each version was behind, by version."""

    group: Annotated[int, Field(ge=1, lt=1 << 63)]
    task: Text
    size: Annotated[int, Field(ge=1, le=_MEMBERS)]
    fork_turn: Index | None
    ages: dict[Annotated[str, Field(pattern=r"^\d{1,15}$")], Age]


class SampledLine(_Line):
    """Tokens of a turn, whole or under way."""

    parent: Index | None
    role: str
    prompt_ids: list[Id]
    token_ids: list[Id]
    logprobs: list[float]
    spans: list[tuple[Age, Index, Index] | tuple[Age, Index, Index, Literal[1]]]  # 1: recomputed
    columns: dict[str, list[int | float]]
    started_s: Seconds


class ExpertsLine(_Line):
    start: Index
    layers: Annotated[int, Field(ge=1, lt=1 << 16)]
    per_token: Annotated[int, Field(ge=1, lt=1 << 16)]
    width: Literal[1, 2]
    data: str


class StepLine(_Line):
    observation: Text
    reward: float
    terminated: bool
    truncated: bool
    answer: Text


class TurnLine(SampledLine):
    learns: bool
    finish: Literal["stop", "length", "abort"]
    text: Text
    ended_s: Seconds
    step: StepLine | None
    experts: ExpertsLine | None


class PartLine(SampledLine):
    spent_s: Seconds


class SnapshotLine(_Line):
    turn: Index
    seconds: Seconds
    data: str


class EndingLine(_Line):
    stop_reason: str
    outcome: float
    success: bool | None
    outcomes: dict[str, float]
    detail: str


class MemberLine(_Line):
    """A member as far as it went."""

    start: Text | None
    turns: list[TurnLine]
    partial: PartLine | None
    snapshot: SnapshotLine | None
    ending: EndingLine | None


@dataclass(slots=True)
class Moved:
    """What went out or came in. `unfinished` episodes go on; `known` groups had come in before; `left` late episodes
    stayed, as their group was trained; `large` groups stayed, as a member is too large for a line."""

    groups: int = 0
    episodes: int = 0
    unfinished: int = 0
    known: int = 0
    left: int = 0
    large: int = 0

    def count(self, group: MovedGroup) -> None:
        self.groups += 1
        self.episodes += len(group.members)
        self.unfinished += sum(one.ending is None for one in group.members)


# --- out ------------------------------------------------------------------------------------------------------------


def export_episodes(config: RunConfig, store: MovingStore, file: Path) -> Moved:
    """Write every untrained group of a run to `file`. The run is not changed, and may go on meanwhile: a group that is
    trained in between stays out."""
    moved = Moved(left=store.left_behind())
    part = file.with_name(f"{file.name}.part")
    head = Head(format=FORMAT, run=store.run_id(), tokenizer=_tokenizer(config))
    try:
        with part.open("wb") as raw, zstandard.ZstdCompressor(level=_LEVEL).stream_writer(raw) as out:
            out.write(_line(head))
            for id in store.movable():
                group = store.move_out(id)
                if group is None:
                    continue
                lines = [_line(_group_line(group, store)), *(_line(_member_line(one)) for one in group.members)]
                if (
                    max(map(len, lines)) > _LINE or sum(map(len, lines)) > _GROUP
                ):  # no reader would take it, nor what follows it
                    moved.large += 1
                    continue
                out.write(b"".join(lines))
                moved.count(group)
        part.replace(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    return moved


def _line(line: _Line) -> bytes:
    return line.model_dump_json().encode() + b"\n"


def _group_line(group: MovedGroup, store: MovingStore) -> GroupLine:
    now = _step(store)
    turns = [turn for one in group.members for turn in one.turns if turn.learns]
    parts = [one.partial for one in group.members if one.partial is not None]
    versions = {span.version for each in (*turns, *parts) for span in each.spans}
    ages = {str(version): staleness.lag(now, store.step_of(version)) for version in sorted(versions)}
    size, task = len(group.members), pack_task(group.task)
    return GroupLine(group=group.id, task=task, size=size, fork_turn=group.fork_turn, ages=ages)


def _member_line(member: MovedMember) -> MemberLine:
    part, kept, ending = member.partial, member.snapshot, member.ending
    return MemberLine(
        start=None if member.start is None else pack_messages(member.start, "the start"),
        turns=[_turn_line(turn) for turn in member.turns],
        partial=None if part is None else PartLine(**_sampled(part), spent_s=part.spent_s),
        snapshot=None if kept is None else SnapshotLine(turn=kept.turn, seconds=kept.seconds, data=_text(kept.data)),
        ending=None
        if ending is None
        else EndingLine(
            stop_reason=ending.stop_reason.value,
            outcome=ending.outcome or 0.0,
            success=ending.success,
            outcomes=dict(ending.outcomes),
            detail=ending.detail,
        ),
    )


def _turn_line(turn: Turn) -> TurnLine:
    step, experts = turn.step, turn.experts
    return TurnLine(
        **_sampled(turn),
        learns=turn.learns,
        finish=turn.finish,
        text=json.dumps(turn.text),
        ended_s=turn.ended_s,
        step=None
        if step is None
        else StepLine(
            observation=pack_messages(step.observation, "an answer"),
            reward=step.reward,
            terminated=step.terminated,
            truncated=step.truncated,
            answer=pack_answer(step, "an answer"),
        ),
        experts=None
        if experts is None
        else ExpertsLine(
            start=experts.start,
            layers=experts.layers,
            per_token=experts.per_token,
            width=cast(Literal[1, 2], experts.width),
            data=_text(experts.data),
        ),
    )


def _sampled(sampled: Turn | Partial) -> dict[str, Any]:
    return {
        "parent": sampled.parent,
        "role": sampled.role,
        "prompt_ids": list(sampled.prompt_ids),
        "token_ids": list(sampled.token_ids),
        "logprobs": list(sampled.logprobs),
        "spans": [(span.version, span.start, span.end, *[1] * span.recomputed) for span in sampled.spans],
        "columns": {name: list(values) for name, values in sampled.columns.items()},
        "started_s": sampled.started_s,
    }


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


# --- in -------------------------------------------------------------------------------------------------------------


def import_episodes(config: RunConfig, store: MovingStore, file: Path, *, snapshots: bool = True) -> Moved:
    """Take the groups of `file` into a run, whether it goes on meanwhile or not. A group that came in before is left
    out. Without `snapshots`, environments are replayed.

    Raises UsageError for a file that is no such file or is of another model or task; groups before the line that it
    names are in."""
    moved = Moved()
    lines = _Reader(file)
    head = lines.next(Head)
    if head is None:
        raise UsageError(f"{file} is empty: this is no file of agentrl export-episodes")
    if head.tokenizer != _tokenizer(config):
        raise UsageError(f"{file} is of a run whose model has another tokenizer than {config.model!r}")
    if head.run == store.run_id():
        raise UsageError(f"{file} is of this very run: its episodes go on by themselves")
    known, tokens = {_kind(task) for task in first_tasks(config)}, vocabulary(model_dir(config.model))
    while (line := lines.next(GroupLine)) is not None:
        with lines.naming():
            task = _task(line.task)
            if _kind(task) not in known:
                raise ValueError(f"a task of {task.env!r} with arguments that this run does not play")
        members: list[MovedMember] = []
        for _ in range(line.size):
            said = lines.next(MemberLine)
            with lines.naming():
                if said is None:
                    raise ValueError(f"the file ends before the group's {line.size} members")
                members.append(_member(said, tokens, snapshots=snapshots))
        group = MovedGroup(id=line.group, task=task, fork_turn=line.fork_turn, members=tuple(members))
        now = _step(store)
        with lines.naming():
            here = store.move_in(head.run, group, {int(version): now - age for version, age in line.ages.items()})
        if here is None:
            moved.known += 1
        else:
            moved.count(group)
    return moved


class _Reader:
    """The lines of a file, one after the other, and where it stands."""

    def __init__(self, file: Path) -> None:
        self._file, self._at, self._of_group = file, 0, 0
        try:
            raw = file.open("rb")
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from error
        stream = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(raw, closefd=True)
        self._lines = io.BufferedReader(cast(io.RawIOBase, stream))

    def next(self, kind: type[T]) -> T | None:
        """The next line as `kind`; None at the end of the file."""
        self._at += 1
        with self.naming():
            line = self._lines.readline(_LINE)
            if not line:
                return None
            if not line.endswith(b"\n"):
                raise ValueError(f"it is cut off, or longer than {_LINE} bytes")
            self._of_group = len(line) + (0 if kind is GroupLine else self._of_group)
            if self._of_group > _GROUP:
                raise ValueError(f"its group is longer than {_GROUP} bytes")
            return kind.model_validate_json(line)

    def naming(self) -> _Naming:
        """What goes wrong in this block is a fault of the line that was read last."""
        return _Naming(f"{self._file}, line {self._at}")


class _Naming:
    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise UsageError(f"{self._where}: {place or 'it'}: {first['msg']}") from error
        if type(error) is StoreError or isinstance(
            error,
            zstandard.ZstdError
            | ValueError
            | TypeError
            | KeyError
            | AttributeError
            | ArithmeticError
            | RecursionError
            | EOFError,
        ):
            words = " ".join(str(error).split())[:300]
            raise UsageError(f"{self._where}: {words}: this is no file of agentrl export-episodes") from error


def _member(said: MemberLine, tokens: int | None, *, snapshots: bool) -> MovedMember:
    part, kept, ending = said.partial, said.snapshot, said.ending
    for line in (*said.turns, *([part] if part is not None else ())):
        ids = (*(id for id in line.prompt_ids if id < images.FIRST), *line.token_ids)
        if tokens is not None and max(ids, default=0) >= tokens:
            raise ValueError(f"a token beyond the model's {tokens}")
    snapshot = None
    if kept is not None and snapshots:
        snapshot = EnvSnapshot(turn=kept.turn, seconds=kept.seconds, data=_bytes(kept.data))
    return MovedMember(
        start=None if said.start is None else _messages(said.start),
        turns=tuple(_turn(at, line) for at, line in enumerate(said.turns)),
        partial=None if part is None else Partial(index=len(said.turns), **_of(part), spent_s=part.spent_s),
        snapshot=snapshot,
        ending=None
        if ending is None
        else Ending(
            stop_reason=_by_policy(ending.stop_reason),
            outcome=ending.outcome,
            success=ending.success,
            outcomes=ending.outcomes,
            detail=ending.detail,
        ),
    )


def _turn(at: int, line: TurnLine) -> Turn:
    experts, step = line.experts, line.step
    return Turn(
        index=at,
        **_of(line),
        learns=line.learns,
        finish=line.finish,
        text=_checked(line.text, str, loads=True),
        ended_s=line.ended_s,
        step=None
        if step is None
        else Step(
            observation=_messages(step.observation),
            reward=step.reward,
            terminated=step.terminated,
            truncated=step.truncated,
            **unpack_answer(_checked(step.answer, dict)),
        ),
        experts=None
        if experts is None
        else RoutedExperts(
            start=experts.start,
            layers=experts.layers,
            per_token=experts.per_token,
            width=experts.width,
            data=_bytes(experts.data),
        ),
    )


def _of(line: SampledLine) -> dict[str, Any]:
    n = len(line.token_ids)
    if len(line.logprobs) != n:
        raise ValueError(f"{n} tokens with {len(line.logprobs)} log-probs")
    if (highest := max(line.logprobs, default=0.0)) > _ROUNDING:
        raise ValueError(f"{highest!r} as a log-prob")
    covered = 0
    for _, start, end, *_ in line.spans:
        if start != covered or end <= start:
            raise ValueError(f"versions that do not cover {n} tokens once")
        covered = end
    if covered != n:
        raise ValueError(f"versions that do not cover {n} tokens once")
    return {
        "parent": line.parent,
        "role": line.role,
        "prompt_ids": tuple(line.prompt_ids),
        "token_ids": tuple(line.token_ids),
        "logprobs": tuple(line.logprobs),
        "spans": tuple(VersionSpan(*span[:3], recomputed=len(span) > 3) for span in line.spans),
        "columns": {name: tuple(values) for name, values in line.columns.items()},
        "started_s": line.started_s,
    }


def _task(text: str) -> Task:
    task = unpack_task(_checked(text, dict))
    whole: tuple[object, ...] = (task.index, task.seed)
    named: tuple[object, ...] = (task.kwargs, task.options)
    if not (all(type(n) is int and n >= 0 for n in whole) and all(isinstance(one, dict) for one in named)):
        raise ValueError("a task with odd fields")
    return task


def _checked(text: str, kind: type, *, loads: bool = False) -> Any:
    """JSON text of a `kind`: the text, or with `loads` what it holds."""
    value = json.loads(text)
    if not isinstance(value, kind):
        raise ValueError(f"{text[:40]!r} is no {kind.__name__}")
    return value if loads else text


def _messages(text: str) -> tuple[Any, ...]:
    messages = tuple(_checked(text, list, loads=True))
    if reason := Messages(max_messages=100_000, max_length=_LINE, max_images=_LINE).why_not(messages):
        raise ValueError(reason)
    return messages


def _by_policy(word: str) -> StopReason:
    reason = StopReason(word)
    if not reason.by_policy:
        raise ValueError(f"an episode that ended as {word} is no finished one")
    return reason


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _kind(task: Task) -> str:
    return json.dumps([task.env, dict(task.kwargs)], sort_keys=True)


def _step(store: MovingStore) -> int:
    try:
        return store.current_version().step
    except StoreError:  # no engine serves any weights yet: the run starts at step 0
        return 0


def _tokenizer(config: RunConfig) -> str:
    file = model_dir(config.model) / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


Format = Literal["messages", "tokens"]
_PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Of the scored training episodes of a task, the first `best_of` (None: all) compete; those with an outcome of at
    least `min_outcome` stay, the best `per_task` of them, of two as good the earlier. With `best_of` alone, one."""

    best_of: int | None = None
    min_outcome: float | None = None
    per_task: int | None = None

    def of(self, store: ReadStore) -> list[int]:
        """Ids of the chosen episodes, in order."""
        by_task: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for row in _rows(store):
            if row.stop_reason is not None and row.stop_reason.by_policy and row.outcome is not None:
                by_task[pack_identity(row.task)].append((-row.outcome, row.id))
        at_most = self.per_task or (1 if self.best_of is not None else None)
        chosen: list[int] = []
        for scored in by_task.values():
            kept = [one for one in scored[: self.best_of] if self.min_outcome is None or -one[0] >= self.min_outcome]
            chosen += [id for _, id in sorted(kept)[:at_most]]
        return sorted(chosen)


@dataclass(slots=True)
class Selected:
    """How many episodes are in the file, and how many were left out: their tokens are gone, or they are no single
    conversation."""

    written: int = 0
    dropped: int = 0
    rewritten: int = 0


def select(store: ReadStore, choice: Choice, form: Format, out: Path) -> Selected:
    """Write the chosen episodes to a new file. Raises UsageError if it cannot be written."""
    told = Selected()
    try:
        with out.open("w", encoding="utf-8") as file:
            for id in choice.of(store):
                trajectory = store.trajectory(id)
                line = _message_line(trajectory, told) if form == "messages" else _token_line(trajectory, told)
                if line is not None:
                    file.write(json.dumps({**line, **_said(trajectory)}) + "\n")
                    told.written += 1
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from error
    return told


def _rows(store: ReadStore) -> Iterator[EpisodeRow]:
    after = 0
    while page := store.episodes(TRAIN, after=after, limit=_PAGE):
        yield from page
        after = page[-1].id


def _message_line(trajectory: Trajectory, told: Selected) -> dict[str, Any] | None:
    """A conversation in its order. One with several roles, or whose history was rewritten, is none."""
    turns = trajectory.turns
    if any(turn.role != POLICY or turn.parent != (turn.index - 1 if turn.index else None) for turn in turns):
        told.rewritten += 1
        return None
    messages = messages_of(trajectory)
    last = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    return {"messages": list(messages[: last + 1])}


def _token_line(trajectory: Trajectory, told: Selected) -> dict[str, Any] | None:
    """The tokens as they were sampled; masked turns, and those of policies that do not learn, are context."""
    if any(not turn.token_ids and turn.text for turn in trajectory.turns):
        told.dropped += 1
        return None
    return {
        "turns": [
            {
                "parent": turn.parent,
                "prompt_ids": list(turn.prompt_ids),
                "token_ids": list(turn.token_ids),
                "learns": turn.learns and not (turn.step is not None and turn.step.masked),
            }
            for turn in trajectory.turns
        ]
    }


def _said(trajectory: Trajectory) -> dict[str, Any]:
    task = trajectory.task
    return {"episode": trajectory.episode_id, "env": task.env, "seed": task.seed, "outcome": trajectory.outcome}
