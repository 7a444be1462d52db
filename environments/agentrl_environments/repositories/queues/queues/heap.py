"""A binary heap that knows where its items are."""


class Empty(LookupError):
    """The queue holds nothing."""


class PriorityQueue:
    """Items with priorities; the smallest comes first, of equal ones the one pushed first. An item is held once."""

    def __init__(self, pairs=()):
        self._heap = []
        self._places = {}
        self._pushed = 0
        for item, priority in pairs:
            self.push(item, priority)

    def __len__(self):
        return len(self._heap)

    def __contains__(self, item):
        return item in self._places

    def push(self, item, priority):
        """Add an item. Raises ValueError if it is there."""
        if item in self._places:
            raise ValueError(f"{item} is there already")
        self._heap.append((priority, self._pushed, item))
        self._places[item] = len(self._heap) - 1
        self._pushed += 1
        self._rise(len(self._heap) - 1)

    def peek(self):
        """The first item and its priority. Raises Empty."""
        if not self._heap:
            raise Empty
        priority, _, item = self._heap[0]
        return item, priority

    def pop(self):
        """Take out the first item; the item and its priority. Raises Empty."""
        item, priority = self.peek()
        self.remove(item)
        return item, priority

    def priority(self, item):
        """The priority of an item. Raises KeyError if it is not there."""
        return self._heap[self._places[item]][0]

    def change(self, item, priority):
        """Give an item another priority; it keeps its rank among equals. Raises KeyError if it is not there."""
        place = self._places[item]
        _, pushed, _ = self._heap[place]
        self._heap[place] = (priority, pushed, item)
        self._sink(self._rise(place))

    def remove(self, item):
        """Take out an item, wherever it stands. Raises KeyError if it is not there."""
        place = self._places.pop(item)
        last = self._heap.pop()
        if place < len(self._heap):
            self._heap[place] = last
            self._places[last[2]] = place
            self._sink(self._rise(place))

    def merge(self, other):
        """Move all items of another queue into this one, in their order; of items in both, the smaller priority
        stays."""
        while len(other):
            item, priority = other.pop()
            if item not in self:
                self.push(item, priority)
            elif priority < self.priority(item):
                self.change(item, priority)

    def drain(self):
        """Take out all items, in order."""
        items = []
        while self._heap:
            items.append(self.pop()[0])
        return items

    def _rise(self, place):
        while place > 0:
            parent = (place - 1) // 2
            if self._heap[parent] <= self._heap[place]:
                break
            self._swap(place, parent)
            place = parent
        return place

    def _sink(self, place):
        while True:
            smallest = place
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(self._heap) and self._heap[child] < self._heap[smallest]:
                    smallest = child
            if smallest == place:
                return place
            self._swap(place, smallest)
            place = smallest

    def _swap(self, one, other):
        heap = self._heap
        heap[one], heap[other] = heap[other], heap[one]
        self._places[heap[one][2]] = one
        self._places[heap[other][2]] = other
