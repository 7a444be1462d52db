"""Customers at a counter with several clerks."""

from queues.heap import PriorityQueue
from queues.simulation import Simulation


class Counter:
    """Serves customers: urgent ones first (a smaller urgency is more urgent), else in the order of their coming. Who
    would have to wait longer than `patience` leaves; None waits for ever."""

    def __init__(self, clerks, patience=None):
        if clerks < 1:
            raise ValueError("there must be a clerk")
        self._free = clerks
        self._patience = patience
        self._waiting = PriorityQueue()
        self._leaving = {}
        self._service = {}
        self._came = {}
        self._simulation = Simulation()
        self.served = []
        self.left = []

    def run(self, customers):
        """Play customers, tuples (name, comes at, takes, urgency). Afterwards `served` has (name, began, ended) by
        the time of beginning, `left` the names of who left."""
        for name, comes, takes, urgency in customers:
            self._service[name] = (takes, urgency)
            self._simulation.after(comes, self._arrival(name))
        self._simulation.run()

    def _arrival(self, name):
        def arrive():
            if self._free:
                self._serve(name)
                return
            self._came[name] = self._simulation.now
            self._waiting.push(name, (self._service[name][1], self._simulation.now))
            if self._patience is not None:
                self._leaving[name] = self._simulation.after(self._patience, lambda: self._leave(name))

        return arrive

    def _serve(self, name):
        self._free -= 1
        now = self._simulation.now
        takes = self._service[name][0]
        self.served.append((name, now, now + takes))
        self._simulation.after(takes, self._next)

    def _next(self):
        self._free += 1
        if len(self._waiting):
            name, _ = self._waiting.pop()
            if name in self._leaving:
                self._simulation.cancel(self._leaving.pop(name))
            self._serve(name)

    def _leave(self, name):
        self._waiting.remove(name)
        self.left.append(name)


def summary(customers, served):
    """Numbers of a day: how many were `served`, the `longest` wait, the `total` wait, and when all was `done`."""
    came = {name: comes for name, comes, _, _ in customers}
    waits = [began - came[name] for name, began, _ in served]
    return {
        "served": len(served),
        "longest": max(waits, default=0),
        "total": sum(waits),
        "done": max((ended for _, _, ended in served), default=0),
    }
