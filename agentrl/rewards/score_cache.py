"""Cache of recent values, by the content of the episodes that got them. Knows no source."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from agentrl.records import Trajectory
from agentrl.rewards.transcripts import messages_of

# Scores of some thousand contents cover the groups that are being played at once, where repetition happens; older
# ones hardly ever come again.
_MOST: Final = 4096  # contents that are remembered

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Recent(Generic[K, V]):
    """The values of the last keys; the oldest ones go."""

    _values: OrderedDict[K, V] = field(default_factory=lambda: OrderedDict[K, V]())

    def get(self, key: K) -> V | None:
        """The value of a key; None if it has none any more."""
        return self._values.get(key)

    def keep(self, key: K, value: V) -> None:
        """Remember a value."""
        self._values[key] = value
        if len(self._values) > _MOST:
            self._values.popitem(last=False)


@dataclass(slots=True)
class ScoreCache(Generic[V]):
    """Values by the content of an episode so far: task, all messages, whether it is over. With `apart`, turns of equal
    content have values of their own: the measured value depends on more than the content."""

    apart: bool = False
    _values: Recent[bytes, V] = field(default_factory=lambda: Recent[bytes, V]())

    def get(self, seen: Trajectory) -> V | None:
        return self._values.get(self._key(seen))

    def keep(self, seen: Trajectory, value: V) -> None:
        self._values.keep(self._key(seen), value)

    def _key(self, seen: Trajectory) -> bytes:
        return _content(seen) + (seen.turns[-1].id.encode() if self.apart and seen.turns else b"")


def _content(seen: Trajectory) -> bytes:
    task = seen.task
    # The task is part of it, since a source may look at its seed or options, and the same words can be right for one
    # task and wrong for another. The stop reason, since a potential ends at 0.
    content_parts = [task.env, task.seed, dict(task.kwargs), dict(task.options), messages_of(seen), seen.stop_reason]
    return hashlib.sha256(json.dumps(content_parts, sort_keys=True).encode()).digest()
