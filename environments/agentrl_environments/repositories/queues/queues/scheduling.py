"""Schedules of one processor. Jobs are (name, comes at, takes); schedules are lists of (name, start, end)."""

from collections import deque

from queues.heap import PriorityQueue


def shortest_first(jobs, preempt=False):
    """Always the job that takes shortest, of equal ones the one that came first; with `preempt`, a job that is shorter
    than what is left of the running one takes its place."""
    arrivals = deque(sorted(jobs, key=lambda job: job[1]))
    left = {name: takes for name, _, takes in jobs}
    ready = PriorityQueue()
    schedule = []
    now = 0
    while arrivals or len(ready):
        if not len(ready):
            now = max(now, arrivals[0][1])
        while arrivals and arrivals[0][1] <= now:
            name = arrivals.popleft()[0]
            ready.push(name, left[name])
        name, takes = ready.pop()
        end = now + takes
        if preempt and arrivals and arrivals[0][1] < end:
            end = arrivals[0][1]
        _append(schedule, name, now, end)
        left[name] -= end - now
        now = end
        if left[name]:
            ready.push(name, left[name])
    return schedule


def round_robin(jobs, slice_length):
    """Each job in turn for at most `slice_length`; who comes while a job runs stands before that job."""
    if slice_length < 1:
        raise ValueError("a slice must be at least 1 long")
    arrivals = deque(sorted(jobs, key=lambda job: job[1]))
    left = {name: takes for name, _, takes in jobs}
    queue = deque()
    schedule = []
    now = 0
    while arrivals or queue:
        if not queue:
            now = max(now, arrivals[0][1])
        while arrivals and arrivals[0][1] <= now:
            queue.append(arrivals.popleft()[0])
        name = queue.popleft()
        length = min(slice_length, left[name])
        _append(schedule, name, now, now + length)
        now += length
        left[name] -= length
        while arrivals and arrivals[0][1] <= now:
            queue.append(arrivals.popleft()[0])
        if left[name]:
            queue.append(name)
    return schedule


def _append(schedule, name, start, end):
    """Add a piece, as a part of the last one if the same job just goes on."""
    if schedule and schedule[-1][0] == name and schedule[-1][2] == start:
        schedule[-1] = (name, schedule[-1][1], end)
    else:
        schedule.append((name, start, end))


def turnaround(jobs, schedule):
    """From coming to end, by job."""
    ends = {}
    for name, _, end in schedule:
        ends[name] = max(end, ends.get(name, 0))
    return {name: ends[name] - comes for name, comes, _ in jobs}
