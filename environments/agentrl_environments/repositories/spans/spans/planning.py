"""Questions that a planner asks."""

import heapq
from bisect import bisect_right


def most_at_once(spans):
    """How many spans hold the same number, where that are the most. One that ends makes room for one that starts."""
    changes = []
    for start, end in spans:
        if start < end:
            changes.append((start, 1))
            changes.append((end, -1))
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def rooms(spans):
    """A room for each span, so that spans in one room do not overlap: numbers from 0, as few rooms as can be. Spans are
    served by start, then end; each gets the free room with the smallest number."""
    given = [0] * len(spans)
    busy = []
    free = []
    opened = 0
    for index in sorted(range(len(spans)), key=lambda index: spans[index]):
        start, end = spans[index]
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            room = heapq.heappop(free)
        else:
            room = opened
            opened += 1
        given[index] = room
        heapq.heappush(busy, (end, room))
    return given


def pick_most(spans):
    """As many spans as can be that do not overlap: always the one that ends first."""
    picked = []
    for start, end in sorted(spans, key=lambda span: (span[1], span[0])):
        if not picked or start >= picked[-1][1]:
            picked.append((start, end))
    return picked


def best_value(jobs):
    """Jobs are (start, end, value). The value of the best choice without overlap, and the choice, in order."""
    jobs = sorted(jobs, key=lambda job: job[1])
    ends = [job[1] for job in jobs]
    best = [(0, [])]
    for index, (start, end, value) in enumerate(jobs):
        before = bisect_right(ends, start, 0, index)
        with_it = best[before][0] + value
        if with_it > best[index][0]:
            best.append((with_it, [*best[before][1], (start, end, value)]))
        else:
            best.append(best[index])
    return best[-1]
