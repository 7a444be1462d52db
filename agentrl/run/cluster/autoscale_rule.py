"""When a run moves a place between its engines and its learner: a pure rule, which knows no process and no store.

A look is made at a window of steps that no other look has seen. A place moves if

- the same move promises at least `gain` in `agree` looks in a row,
- within `horizon_s`, or what is left of the run, it earns `margin` times what a move was measured to cost, and
- nothing moved between the same two splits lately: for `horizon_s` after the first time, for twice as long after each
  further one. So the moves of a run are few, whatever its load and its predictions do: between two neighbours their
  number grows with the logarithm of its length.

After each move its promise is checked once: if the run trains fewer tokens than before by `gain` or more, the place
goes back at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.config.cluster import ControllerSettings, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFigures:
    """What a window shows. `rate`: tokens trained a second; `gains`: by split beside the present one, the share of more
    of them that it promises; `cost_s`: seconds of training that a move costs; `left_s`: until the run's end."""

    present: Split
    rate: float
    gains: Mapping[Split, float]
    cost_s: float
    left_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Where to move, None to stay, and why, for a reader."""

    to: Split | None
    why: str


@dataclass(slots=True)
class AutoscaleRule:
    """Looks in the order of time; `now_s` never decreases, in seconds of any clock."""

    settings: ControllerSettings
    _toward: Split | None = None
    _seen: int = 0  # looks in a row that would move there
    _moves: dict[frozenset[Split], list[float]] = field(default_factory=dict[frozenset[Split], list[float]])
    _before: tuple[Split, float] | None = None  # the split before the last move, and its rate: not checked yet

    def moved(self, was: Split, to: Split, now_s: float) -> None:
        """Note a move, also one of an earlier life of the run."""
        self._moves.setdefault(frozenset((was, to)), []).append(now_s)
        self._toward, self._seen = None, 0

    def look(self, sight: WindowFigures, now_s: float) -> Decision:
        decision = self._check(sight) or self._judge(sight, now_s)
        if decision.to is not None:
            self.moved(sight.present, decision.to, now_s)
        return decision

    def _check(self, sight: WindowFigures) -> Decision | None:
        """Go back if the last move did harm."""
        if self._before is None:
            return None
        (before, rate), self._before = self._before, None
        lost = 1 - sight.rate / rate if rate else 0.0
        if before == sight.present or lost < self.settings.gain or not self._pays(lost, sight):
            return None
        return Decision(before, f"{lost:.0%} fewer tokens a second than with {before}")

    def _judge(self, sight: WindowFigures, now_s: float) -> Decision:
        asked = self.settings
        best = max(sight.gains, key=lambda split: sight.gains[split], default=None)
        if best is None or (gain := sight.gains[best]) < asked.gain:
            self._toward, self._seen = None, 0
            return Decision(None, f"no move promises {asked.gain:.0%} more tokens a second")
        self._seen = self._seen + 1 if best == self._toward else 1
        self._toward = best
        promise = f"{best} promises {gain:+.0%} tokens a second"
        if self._seen < asked.agree:
            return Decision(None, f"{promise}, in {self._seen} of {asked.agree} looks")
        times = self._moves.get(frozenset((sight.present, best)), [])
        if times and now_s < (until := times[-1] + asked.horizon_s * 2.0 ** (len(times) - 1)):
            return Decision(None, f"{promise}; a place moved between the two lately, {until - now_s:.0f} s to wait")
        if not self._pays(gain, sight):
            return Decision(None, f"{promise}, which does not earn what a move costs, {sight.cost_s:.0f} s")
        self._before = (sight.present, sight.rate)
        return Decision(best, promise)

    def _pays(self, gain: float, sight: WindowFigures) -> bool:
        return gain * min(self.settings.horizon_s, sight.left_s) > self.settings.margin * sight.cost_s
