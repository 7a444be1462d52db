"""An episode with a box as bytes, for another instance: what happened to the environment, and the files of its box.

The environment's own code runs again, from the same reset through the same actions, so that whatever it holds in Python
is there again; its box answers from a record meanwhile, so that no command is run twice. Each observation must equal
the one of before. Then the files are put into the box, and the episode goes on. Nothing of it is executed: the bytes
are JSON and a packed box.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import Any, Final, cast

import zstandard

from agentrl.env.core import Env, StepResult
from agentrl.env.limits import Meter
from agentrl.errors import EnvError
from agentrl.records import Json, Message
from agentrl.sandbox.current_box import CurrentBox
from agentrl.sandbox.recording import Tape, unsaved

_MAGIC: Final = b"agentrle"
_LENGTH: Final = struct.Struct("<Q")
_LEVEL: Final = 3
_EXPANDS: Final = 4  # the record may have so many times the bytes of a snapshot, before it is compressed
_WINDOW: Final = 8 << 20  # memory that reading a stream may take


@dataclass(frozen=True, slots=True)
class Action:
    """One action as the environment received it, and a digest of its answer."""

    text: str
    cut: bool
    id: str
    answer: str


@dataclass(slots=True)
class Past:
    """The history of an environment since its reset. `tape` answers calls to the box while the history is repeated."""

    tape: Tape
    seed: int | None = None
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])
    start: str = ""
    actions: list[Action] = field(default_factory=list[Action])
    again: Past | None = None  # what must happen now
    meter: tuple[float, float, float] = (0.0, 0.0, 0.0)
    files: bytes = b""

    def began(self, observation: Sequence[Message]) -> None:
        """The reset was answered. Raises EnvError if it was answered otherwise before."""
        self.start = _digest(observation)
        if self.again is not None and self.start != self.again.start:
            raise EnvError("reset gave another first observation")

    def acted(self, text: str, *, cut: bool, id: str, answer: Sequence[Any]) -> None:
        """An action was answered. Raises EnvError if it was answered otherwise before."""
        turn_index = len(self.actions)
        self.actions.append(Action(text, cut, id, _digest(answer)))
        if self.again is not None and self.actions[turn_index].answer != self.again.actions[turn_index].answer:
            raise EnvError(f"turn {turn_index} was answered differently")

    def written(self, meter: Sequence[float]) -> bytes:
        """The record, without the files; `meter` is what the episode has used. Raises SandboxError without one."""
        # No snapshot is better than one that lies: what the tape could not record, an answer without end for example,
        # could not be played back either.
        if record_flaw := self.tape.flaw or ("a copy of its box is open" if self.tape.copies_open else ""):
            raise unsaved(record_flaw)
        document = {
            "seed": self.seed,
            "options": dict(self.options),
            "start": self.start,
            "actions": [
                [past_action.text, past_action.cut, past_action.id, past_action.answer] for past_action in self.actions
            ],
            "calls": self.tape.entries,
            "meter": list(meter),
        }
        packed_record = zstandard.compress(json.dumps(document).encode(), _LEVEL)
        return _MAGIC + _LENGTH.pack(len(packed_record)) + packed_record


class Recorded(Env):
    """Snapshots for a class whose episodes have a box that records its calls. The class calls `_begin_record` and
    `Past.began` in its reset, and `_record_action` after each step."""

    _record: Past | None = None
    _record_again: Past | None = None

    def _record_box(self) -> CurrentBox | None:
        """The box of its episodes; None if they have none."""
        raise NotImplementedError

    def _record_meter(self) -> Meter | None:
        """The meter of an episode that stands between two steps; None if there is none."""
        raise NotImplementedError

    @property
    def has_snapshots(self) -> bool:
        """Whether the class wrote its own, or its episodes have a box."""
        overridden = [
            getattr(type(self), method_name) is not getattr(Recorded, method_name)
            for method_name in ("snapshot", "restore")
        ]
        return all(overridden) if any(overridden) else self._record_box() is not None

    async def snapshot(self) -> bytes:
        """Save the actions so far, and the files of the box. Raises SandboxError if they cannot tell where the episode
        stands."""
        own_past, episode_meter, episode_box = self._record, self._record_meter(), self._record_box()
        if own_past is None or episode_meter is None or episode_box is None:
            raise EnvError(f"{type(self).__name__} has no episode with a box that stands between two steps")
        record_bytes = own_past.written(episode_meter.used)
        return record_bytes + await episode_box.pack(self.snapshot_bytes - len(record_bytes))

    async def restore(self, snapshot: bytes) -> None:
        """Do again what was done, with the box's answers of then, and put the files into a box. Raises EnvError if it
        comes out otherwise."""
        saved_past = self._record_again = read_past(snapshot, self.snapshot_bytes)
        try:
            await self.areset(seed=saved_past.seed, options=saved_past.options)
            for past_action in saved_past.actions:
                self.action_cut, self.action_id = past_action.cut, past_action.id
                await self.astep(past_action.text)
        finally:
            self._record_again = None
        # From here on calls reach the real box. Before the files are unpacked, since unpacking is itself a call to it.
        saved_past.tape.end()
        episode_box, episode_meter = self._record_box(), self._record_meter()
        if self._record is None or episode_meter is None or episode_box is None:
            raise EnvError(f"{type(self).__name__} has no episode with a box after it was restored")
        self._record.again = None
        episode_meter.resume(*saved_past.meter)
        await episode_box.unpack(saved_past.files)

    def _begin_record(self, seed: int | None, options: Mapping[str, Json] | None) -> Past:
        past_again = self._record_again
        call_tape = Tape(_EXPANDS * self.snapshot_bytes) if past_again is None else past_again.tape
        self._record = Past(call_tape, seed, dict(options or {}), again=past_again)
        if (episode_box := self._record_box()) is not None:
            episode_box.tape = call_tape
        return self._record

    def _record_action(self, action: str, answer: StepResult) -> None:
        observation, _, terminated, truncated, step_info = answer
        assert self._record is not None
        # What the next turn rests on. The reward is left out, as in a replay: the recorded one counts, and a judge may
        # word it differently the second time.
        compared = (observation, step_info.get("history"), step_info.get("role"), terminated, truncated)
        self._record.acted(action, cut=self.action_cut, id=self.action_id, answer=compared)


def read_past(data: bytes, snapshot_bytes: int) -> Past:
    """A past to be repeated, of `Past.written` and a packed box. Raises EnvError if the bytes are something else."""
    head_size = len(_MAGIC) + _LENGTH.size
    if not data.startswith(_MAGIC) or len(data) < head_size:
        raise EnvError("the snapshot is damaged: these bytes are no episode with a box")
    record_end = head_size + _LENGTH.unpack_from(data, len(_MAGIC))[0]
    most_bytes = 2 * _EXPANDS * snapshot_bytes
    try:
        # As a stream with a bound: the bytes come from a store that others may have written, and a few kilobytes of
        # zstandard can claim to be terabytes.
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(
            data[head_size:record_end]
        ) as record_stream:
            record_text = record_stream.read(most_bytes + 1)
        if len(record_text) > most_bytes:
            raise ValueError(f"its record has more than {most_bytes} bytes")
        record: Any = json.loads(record_text)
        recorded_calls = [
            (_str(call_key), cast("Mapping[str, Json]", call_answer)) for call_key, call_answer in record["calls"]
        ]
        if not all(
            isinstance(call_answer, dict) and len(call_answer) == 1 and {*call_answer} <= {"answer", "refused"}
            for _, call_answer in recorded_calls
        ):
            raise ValueError("a call without an answer")
        return Past(
            Tape(most_bytes, recorded_calls),
            seed=None if record["seed"] is None else int(record["seed"]),
            options=dict(record["options"]),
            start=_str(record["start"]),
            actions=[
                Action(_str(action_text), bool(was_cut), _str(action_id), _str(call_answer))
                for action_text, was_cut, action_id, call_answer in record["actions"]
            ],
            meter=_three(record["meter"]),
            files=data[record_end:],
        )
    except (
        zstandard.ZstdError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as record_error:
        raise EnvError(f"the snapshot is damaged: {record_error}") from record_error


def _three(value: Sequence[Any]) -> tuple[float, float, float]:
    tokens, seconds, tool_seconds = map(float, value)
    if not all(0 <= used_amount < inf for used_amount in (tokens, seconds, tool_seconds)):
        raise ValueError("no episode can have used what its meter says")
    return tokens, seconds, tool_seconds


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _digest(answer: object) -> str:
    return blake2b(json.dumps(answer, sort_keys=True).encode(), digest_size=16).hexdigest()
