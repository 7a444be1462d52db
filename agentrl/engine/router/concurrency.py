"""How many requests an engine should have at once: additive increase, multiplicative decrease on its own metrics.

Pure arithmetic: no clock, no network. An engine that preempts, runs out of KV blocks or lets requests queue has too
many; one that is full up to the limit without any of that may get more. (The rule is TCP's: Chiu and Jain, 1989.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USED = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"


@dataclass(slots=True, kw_only=True)
class Aimd:
    """`limit` is how many requests to send at once. It grows by `step` while it is what holds requests back, shrinks
    by `factor` under pressure, and stays within [floor, ceiling].

    Pressure: a preemption since the last look, KV use above `kv_high` with requests waiting, or more than `queue_share`
    of the running requests waiting at two looks in a row: at one look alone it may be a burst, such as the first turns
    of a group, that is being taken in."""

    limit: float = 64.0
    floor: float = 4.0
    ceiling: float = 4096.0
    step: float = 8.0
    # Gentler than TCP's half: a lowered limit costs an engine throughput at once, and the pressure shows within a
    # second of `control`.
    factor: float = 0.75
    kv_high: float = 0.95
    queue_share: float = 0.25
    _preemptions: float | None = field(default=None, init=False)
    _queued: bool = field(default=False, init=False)

    def look(self, metrics: Mapping[str, float], sent: int) -> float:
        """Take one reading of an engine's metrics, with `sent` requests of ours at it; return the new limit."""
        waiting_count, running_count = metrics.get(WAITING, 0.0), metrics.get(RUNNING, 0.0)
        preemptions = metrics.get(PREEMPTIONS, 0.0)
        has_preempted = self._preemptions is not None and preemptions > self._preemptions
        # The counter's first reading is the base: an attached engine may have preempted for another client's
        # requests.
        self._preemptions = preemptions
        is_starved = waiting_count > 0 and metrics.get(KV_USED, 0.0) > self.kv_high
        # At least `floor`, so that an engine that runs one request is not called crowded for the second.
        was_queued, self._queued = self._queued, waiting_count > self.queue_share * max(running_count, self.floor)
        if has_preempted or is_starved or (was_queued and self._queued):
            self.limit = max(self.floor, self.limit * self.factor)
        # Only while the limit holds requests back. Grown in quiet times, it would stand at its ceiling and stop
        # nothing when the load comes.
        elif sent >= self.limit - 1 and not self._queued:
            self.limit = min(self.ceiling, self.limit + self.step)
        return self.limit
