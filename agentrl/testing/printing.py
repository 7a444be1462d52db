"""Does a reader of what boxes print stay linear? A property test for parsers of logs, patches, replies and the like.

    check_linear(my_parser, words=["PASSED ", "::"])

A policy decides what its box prints, and the reader runs in the worker that serves all episodes: one line that costs
quadratic time stops them all. The check feeds a reader texts made of short units repeated, and compares what a text
and one four times as long cost, in CPU time of this thread and in memory. Knows nothing of environments.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from agentrl.errors import PolicyFault

_UNITS: Final = (" ", "\n", "a", "0", ":", "-", ".", "(", "[", "{", "<", '"', "\\", "\x1b[", "é", "\r", "a - ", "a b ")
_SMALL: Final = 6_000  # characters: quadratic costs show, and a broken reader fails in seconds
_TIMES: Final = 4
_QUICK_S: Final = 0.03  # what the longer text may cost without more questions
_RATIO: Final = 9.0  # linear is 4, quadratic 16
_BYTES: Final = 500  # of memory for each character of the longer text


def check_linear(read: Callable[[str], object], *, words: Sequence[str] = (), seeds: int = 10) -> None:
    """Raises AssertionError naming the text for which `read` costs more than linear time or memory.

    `words` are the texts that mean something to the reader; mixed with common signs they make the units that are
    repeated, on one line and on many. `seeds` is how many random mixtures are tried. A PolicyFault that `read` raises
    is an answer; any other exception is passed on."""
    for unit in _units(words, seeds):
        for start, end in (("", ""), ("", "\n"), (words[0] if words else "x", "")):
            repeated = unit + end
            short, long = (start + repeated * (size // len(repeated)) for size in (_SMALL, _TIMES * _SMALL))
            what = f"{start!r} and then {repeated!r} again and again"
            if _cpu_s(read, long) > _QUICK_S:  # the best of several: another thread's work is not the reader's
                ratio = min(_cpu_s(read, long) for _ in range(3)) / min(_cpu_s(read, short) for _ in range(3))
                assert ratio < _RATIO, f"{what}: {_TIMES} times the text cost {ratio:.0f} times the time"
            used = _peak_bytes(read, long)
            assert used < _BYTES * len(long), f"{what}: {len(long)} characters took {used} bytes"


def _units(words: Sequence[str], seeds: int) -> Iterator[str]:
    yield from _UNITS
    yield from filter(None, words)
    for seed in range(seeds):
        chosen = random.Random(seed)
        yield "".join(chosen.choices([*words, *words, *_UNITS], k=chosen.randint(2, 4)))


def _cpu_s(read: Callable[[str], object], text: str) -> float:
    began = time.thread_time()
    with suppress(PolicyFault):
        read(text)
    return time.thread_time() - began


def _peak_bytes(read: Callable[[str], object], text: str) -> int:
    tracemalloc.start()
    try:
        with suppress(PolicyFault):
            read(text)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
