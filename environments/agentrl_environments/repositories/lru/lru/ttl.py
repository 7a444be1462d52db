"""A cache whose values also grow too old."""

import time

from lru.cache import LRUCache


class TTLCache:
    """An `LRUCache` whose values live for `seconds` after they were put. `clock` gives the time in seconds."""

    def __init__(self, capacity, seconds, clock=time.monotonic):
        if seconds <= 0:
            raise ValueError("seconds must be above 0")
        self.seconds = seconds
        self._clock = clock
        self._cache = LRUCache(capacity)

    def __len__(self):
        self.expire()
        return len(self._cache)

    def __contains__(self, key):
        entry = self._cache.peek(key)
        return entry is not None and not self._is_old(entry)

    def put(self, key, value):
        """Set the value of `key`; its life starts now."""
        self._cache.put(key, (value, self._clock() + self.seconds))

    def get(self, key, default=None):
        """The value of `key`, or `default` if it is not there or too old."""
        entry = self._cache.get(key)
        if entry is None:
            return default
        if self._is_old(entry):
            self._cache.pop(key)
            return default
        return entry[0]

    def left(self, key):
        """Seconds that the value of `key` still lives; 0 if it is not there or too old."""
        entry = self._cache.peek(key)
        if entry is None:
            return 0
        return max(0, entry[1] - self._clock())

    def touch(self, key):
        """Let the life of `key` start anew; whether it was there."""
        entry = self._cache.peek(key)
        if entry is None or self._is_old(entry):
            return False
        self._cache.put(key, (entry[0], self._clock() + self.seconds))
        return True

    def expire(self):
        """Remove what is too old; how many that were."""
        old = [key for key, entry in self._cache.items() if self._is_old(entry)]
        for key in old:
            self._cache.pop(key)
        return len(old)

    def _is_old(self, entry):
        return self._clock() >= entry[1]
