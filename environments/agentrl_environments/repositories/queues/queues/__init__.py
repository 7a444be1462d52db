"""A priority queue and what is simulated with it."""

from queues.counter import Counter, summary
from queues.heap import Empty, PriorityQueue
from queues.scheduling import round_robin, shortest_first, turnaround
from queues.simulation import Simulation

__all__ = [
    "Counter",
    "Empty",
    "PriorityQueue",
    "Simulation",
    "round_robin",
    "shortest_first",
    "summary",
    "turnaround",
]
