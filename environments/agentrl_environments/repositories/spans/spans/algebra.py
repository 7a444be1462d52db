"""Sets of numbers, written as lists of spans."""


def check(span):
    """The span itself. Raises ValueError if it ends before it starts."""
    start, end = span
    if end < start:
        raise ValueError(f"span ends before it starts: {start}..{end}")
    return start, end


def merge(spans):
    """The same numbers as the fewest spans, in order. Spans that touch become one, empty ones vanish."""
    merged = []
    for start, end in sorted(check(span) for span in spans):
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total(spans):
    """How many numbers the spans hold; what several hold counts once."""
    return sum(end - start for start, end in merge(spans))


def intersect(left, right):
    """The numbers that both lists hold."""
    left, right = merge(left), merge(right)
    found = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return found


def gaps(spans, start, end):
    """The numbers from `start` up to `end` that no span holds."""
    free = []
    at = start
    for first, last in merge(spans):
        if first >= end:
            break
        if first > at:
            free.append((at, first))
        at = max(at, last)
    if at < end:
        free.append((at, end))
    return free


def subtract(left, right):
    """The numbers of `left` that `right` does not hold."""
    left = merge(left)
    if not left:
        return []
    return intersect(left, gaps(right, left[0][0], left[-1][1]))


def clip(spans, start, end):
    """What of the spans lies from `start` up to `end`."""
    return intersect(spans, [(start, end)])


def shift(spans, distance):
    """The spans, moved."""
    return [(start + distance, end + distance) for start, end in spans]
