"""A calendar of one room."""

from spans.algebra import check, gaps


class Conflict(Exception):
    """The room is taken; `names` says by whom."""

    def __init__(self, names):
        super().__init__("taken by " + ", ".join(names))
        self.names = names


class Bookings:
    """Bookings by name, none of which overlap."""

    def __init__(self):
        self._spans = {}

    def book(self, name, start, end):
        """Book the room. Raises Conflict if it is taken, ValueError for an empty span or a name in use."""
        check((start, end))
        if start == end:
            raise ValueError("an empty booking")
        if name in self._spans:
            raise ValueError(f"{name} has a booking")
        taken = self.between(start, end)
        if taken:
            raise Conflict(taken)
        self._spans[name] = (start, end)

    def cancel(self, name):
        """Give the booking back. Raises KeyError if there is none."""
        del self._spans[name]

    def move(self, name, start):
        """Move a booking to another start, as long as before; on a conflict it stays where it is."""
        old = self._spans.pop(name)
        try:
            self.book(name, start, start + old[1] - old[0])
        except (Conflict, ValueError):
            self._spans[name] = old
            raise

    def between(self, start, end):
        """Names of the bookings that overlap a span, by their start."""
        found = [name for name, span in self._spans.items() if span[0] < end and start < span[1]]
        return sorted(found, key=lambda name: self._spans[name])

    def at(self, moment):
        """Who has the room at a moment, None if it is free."""
        found = self.between(moment, moment + 1)
        return found[0] if found else None

    def first_free(self, length, start, end):
        """Start of the first free span of at least `length` from `start` up to `end`; None if there is none."""
        for first, last in gaps(self._spans.values(), start, end):
            if last - first >= length:
                return first
        return None

    def listing(self):
        """(start, end, name) of all bookings, in order."""
        return sorted((start, end, name) for name, (start, end) in self._spans.items())
