"""Events in virtual time."""

from queues.heap import PriorityQueue


class Simulation:
    """Calls functions at their time; of those due at the same time, the one planned first. `now` is the time."""

    def __init__(self):
        self.now = 0
        self._due = PriorityQueue()
        self._actions = {}
        self._count = 0

    def after(self, delay, action):
        """Plan a call of `action()` in `delay`; a number to cancel it by. Raises ValueError for a negative delay."""
        if delay < 0:
            raise ValueError("the past cannot be planned")
        event = self._count
        self._count += 1
        self._actions[event] = action
        self._due.push(event, self.now + delay)
        return event

    def every(self, period, action, times):
        """Plan `times` calls, the first one in `period`."""
        for number in range(1, times + 1):
            self.after(number * period, action)

    def cancel(self, event):
        """Take a planned call back; whether it was still to come."""
        if event not in self._actions:
            return False
        del self._actions[event]
        self._due.remove(event)
        return True

    def pending(self):
        """How many calls are still to come."""
        return len(self._due)

    def step(self):
        """Go on to the next call and make it; False if there is none."""
        if not len(self._due):
            return False
        event, self.now = self._due.pop()
        self._actions.pop(event)()
        return True

    def run(self, until=None):
        """Make all calls, or those up to the time `until`, at which the clock then stands. How many were made."""
        made = 0
        while len(self._due) and (until is None or self._due.peek()[1] <= until):
            self.step()
            made += 1
        if until is not None and until > self.now:
            self.now = until
        return made
