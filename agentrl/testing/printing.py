"""Does a parser of a box's output need only linear time? A property test for parsers of logs, patches, replies, etc.

    check_linear(my_parser, words=["PASSED ", "::"])

A policy controls the output of its box, and the parser runs in the worker that serves all episodes: one line that costs
quadratic time stops them all. The check calls a parser with texts made of repeated short units, and compares the cost
of a text with that of a text four times as long, in CPU time of this thread and in memory. Never knows environments.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from agentrl.errors import PolicyFault

SIGNS: Final = (" ", "\n", "a", "0", ":", "-", "(", "[", "<", '"', "\\", "\x1b[", "é", "a - ")
_TIMES: Final = 4
_QUICK_S: Final = 0.03  # below this cost of the longer text, no further check
_RATIO: Final = 9.0  # linear is 4, quadratic 16
_BYTES: Final = 500  # most bytes of memory per character of the longer text


def check_linear(
    read: Callable[[str], object],
    *,
    words: Sequence[str] = (),
    signs: Sequence[str] = SIGNS,
    seeds: int = 8,
    size: int = 4_000,
) -> None:
    """Raises AssertionError, which names the text, if `read` needs more than linear time or memory.

    `words` are texts with a meaning for the parser; they, `signs`, and `seeds` random mixtures of both are the repeated
    units, on one line and on many. `size` is the length of the shorter text in characters. A PolicyFault of `read` is a
    valid answer; any other exception is passed on."""
    for unit in _units(words, signs, seeds):
        # One line, many lines, and a line that begins like a real one: backtracking often starts only behind a match.
        for text_start, unit_end in (("", ""), ("", "\n"), (words[0] if words else "x", "")):
            repeated_unit = unit + unit_end
            counts = (length // len(repeated_unit) for length in (size, _TIMES * size))
            short, long = (text_start + repeated_unit * count for count in counts)
            label = f"{text_start!r} and then {repeated_unit!r} again and again"
            if _cpu_s(read, long) > _QUICK_S:  # the best of several runs: other threads may disturb one
                ratio = min(_cpu_s(read, long) for _ in range(3)) / min(_cpu_s(read, short) for _ in range(3))
                assert ratio < _RATIO, f"{label}: {_TIMES} times the text cost {ratio:.0f} times the time"
            # Memory in a run of its own: tracemalloc slows each allocation down, and would make the time that was
            # measured beside it useless.
            used_bytes = _peak_bytes(read, long)
            assert used_bytes < _BYTES * len(long), f"{label}: {len(long)} characters took {used_bytes} bytes"


def _units(words: Sequence[str], signs: Sequence[str], seeds: int) -> Iterator[str]:
    yield from signs
    yield from words
    for seed in range(seeds):
        generator = random.Random(seed)
        yield "".join(generator.choices([*words, *words, *signs], k=generator.randint(2, 4)))


def _cpu_s(read: Callable[[str], object], text: str) -> float:
    # CPU time of this thread: by the clock, a machine with too much to do would make a linear parser look quadratic.
    began_at = time.thread_time()
    with suppress(PolicyFault):
        read(text)
    return time.thread_time() - began_at


def _peak_bytes(read: Callable[[str], object], text: str) -> int:
    tracemalloc.start()
    try:
        with suppress(PolicyFault):
            read(text)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
