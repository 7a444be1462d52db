"""Failures of a reward source: its calls and turns without a score, and the texts that never got one.

A judge that fails on particular texts decides which episodes are trained, so failures are counted by text too. Knows no
store: whoever serves a source records `row` under `KIND`, and `totals` reads such rows back.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agentrl.records import Json

KIND: Final = "reward_failures"
"""Of the rows, in the run's metrics."""

# A source that is down for hours fails for every text: an unbounded table would be the memory of the whole run.
_MOST_TEXTS = 1000  # that a process remembers; the turns of others are counted, not their texts
_SHOWN_TEXTS, _SHOWN_CHARACTERS = 5, 120
# Growth by a factor makes the number of rows logarithmic in the number of failures; the time limit shows the last
# few, too.
_GROWN = 1.02  # a row is due when so many times as many calls have failed as in the last row,
_DUE_S = 30.0  # or after so long
_SHARE, _CALLS = 0.1, 10  # of failed calls, from which a source is reported though a second attempt was scored


@dataclass(frozen=True, slots=True, kw_only=True)
class UnscoredText:
    """A text that the policy wrote and its source never scored: how many `turns`, and why the last one failed."""

    text: str
    turns: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreFailures:
    """Failures of a reward source. `calls_failed` of its `calls` gave no score; `turns_failed` of the `turns` that it
    had to score got none. `reason` is that of the last failure. `texts_failed` different texts never got a score;
    `texts` has the most frequent ones."""

    source: str
    calls: int = 0
    calls_failed: int = 0
    turns: int = 0
    turns_failed: int = 0
    texts_failed: int = 0
    reason: str = ""
    texts: tuple[UnscoredText, ...] = ()

    @property
    def matters(self) -> bool:
        """Whether turns went without a score, or many calls."""
        # Some failed calls are ordinary with servers, and the retry hides them. A tenth of them is a server in a bad
        # way, even if every turn got its score in the end.
        return self.turns_failed > 0 or self.calls_failed >= max(_CALLS, _SHARE * self.calls)

    def __str__(self) -> str:
        line = (
            f"reward source {self.source!r} gave no score for {self.turns_failed} of {self.turns} turns "
            f"({self.calls_failed} of {self.calls} calls failed), the last: {self.reason}"
        )
        if not self.texts_failed:
            return line
        worst = self.texts[0]
        texts = f"{self.texts_failed} different texts" if self.texts_failed > 1 else "one text"
        return f"{line}; {texts} never got a score, most often {worst.text[:60]!r} ({worst.turns} turns)"


@dataclass(slots=True)
class FailureCount:
    """Counts for one source, in one process. Times are of `time.monotonic`."""

    source: str
    life: str
    _sums: ScoreFailures = field(init=False)
    _texts: dict[str, UnscoredText] = field(default_factory=dict[str, UnscoredText])  # by a digest
    _recorded: int = 0  # failed calls, as of the last row
    _recorded_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._sums = ScoreFailures(source=self.source)

    def scored(self, text: str, calls: int, reason: str) -> None:
        """Count a turn for which `calls` calls were made, and the last gave a score; `reason` is why the call before
        failed."""
        self._add(calls, calls - 1, reason, turns_failed=0)
        # A text is listed as one that its source cannot score only as long as it never got one:
        # `tests/rewards/test_score_failures.py::test_a_text_that_is_scored_later_is_none_that_the_source_cannot_score`.
        if self._texts:
            self._texts.pop(_digest(text), None)

    def failed(self, text: str, calls: int, reason: str) -> None:
        """Count a turn for which `calls` calls were made, and none gave a score."""
        self._add(calls, calls, reason, turns_failed=1)
        text_digest = _digest(text)
        previous_count = self._texts.get(text_digest)
        if previous_count is not None or len(self._texts) < _MOST_TEXTS:
            turn_count = 1 if previous_count is None else previous_count.turns + 1
            self._texts[text_digest] = UnscoredText(text=text[:_SHOWN_CHARACTERS], turns=turn_count, reason=reason)

    def row(self) -> dict[str, Json] | None:
        """The counts so far, if they are worth a row now: calls failed since the last one."""
        failed_calls, recorded_s = self._sums.calls_failed, time.monotonic()
        if failed_calls == self._recorded or (
            failed_calls < _GROWN * self._recorded and recorded_s < self._recorded_s + _DUE_S
        ):
            return None
        self._recorded, self._recorded_s = failed_calls, recorded_s
        shown_texts = sorted(self._texts.items(), key=lambda item: -item[1].turns)[:_SHOWN_TEXTS]
        text_rows = [
            {"digest": digest, "text": unscored.text, "turns": unscored.turns, "reason": unscored.reason}
            for digest, unscored in shown_texts
        ]
        count_sums = self._sums
        return {
            "source": self.source,
            "life": self.life,
            "calls": count_sums.calls,
            "calls_failed": failed_calls,
            "turns": count_sums.turns,
            "turns_failed": count_sums.turns_failed,
            "texts_failed": len(self._texts),
            "reason": count_sums.reason,
            "texts": text_rows,  # pyright: ignore[reportReturnType]
        }

    def _add(self, calls: int, calls_failed: int, reason: str, *, turns_failed: int) -> None:
        count_sums = self._sums
        self._sums = replace(
            count_sums,
            calls=count_sums.calls + calls,
            calls_failed=count_sums.calls_failed + calls_failed,
            turns=count_sums.turns + 1,
            turns_failed=count_sums.turns_failed + turns_failed,
            reason=reason or count_sums.reason,
        )


def totals(rows: Iterable[Mapping[str, Any]]) -> list[ScoreFailures]:
    """The counts of each source over the lives of its processes, by name. `rows` in the order in which they were made:
    the last one of a life has its counts."""
    # Rows have the counts of a process so far, not what was added since: a row that could not be written is then no
    # loss. So the last of each life counts, and lives are added up.
    last_by_life = {(count_row["source"], count_row["life"]): count_row for count_row in rows}
    source_failures: list[ScoreFailures] = []
    for counted_source in sorted({counted_source for counted_source, _ in last_by_life}):
        life_rows = [count_row for (source_name, _), count_row in last_by_life.items() if source_name == counted_source]
        texts_by_digest: dict[str, UnscoredText] = {}
        for text_row in (text_row for count_row in life_rows for text_row in count_row["texts"]):
            earlier_lives = texts_by_digest.get(text_row["digest"])
            turn_count = text_row["turns"] + (0 if earlier_lives is None else earlier_lives.turns)
            texts_by_digest[text_row["digest"]] = UnscoredText(
                text=text_row["text"], turns=turn_count, reason=text_row["reason"]
            )
        count_names = ("calls", "calls_failed", "turns", "turns_failed", "texts_failed")
        source_failures.append(
            ScoreFailures(
                source=counted_source,
                reason=life_rows[-1]["reason"],
                texts=tuple(sorted(texts_by_digest.values(), key=lambda text: -text.turns)[:_SHOWN_TEXTS]),
                **{count_name: sum(count_row[count_name] for count_row in life_rows) for count_name in count_names},
            )
        )
    return source_failures


def _digest(text: str) -> str:
    # Byte-level policies do write lone surrogates, and a count of failures must not fail on them.
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
