"""A cache that forgets what was used longest ago."""

from lru.stats import Stats


class LRUCache:
    """Maps keys to values, at most `capacity` of them.

    Reading or writing a key makes it the one used last. When a new key finds the cache full, the key used longest ago
    is evicted, and `on_evict(key, value)` is called if it was given.
    """

    def __init__(self, capacity, on_evict=None):
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self.capacity = capacity
        self.on_evict = on_evict
        self.stats = Stats()
        self._items = {}

    def __len__(self):
        return len(self._items)

    def __contains__(self, key):
        return key in self._items

    def get(self, key, default=None):
        """The value of `key`, which becomes the key used last; `default` if it is not there."""
        if key not in self._items:
            self.stats.record(False)
            return default
        self.stats.record(True)
        value = self._items.pop(key)
        self._items[key] = value
        return value

    def peek(self, key, default=None):
        """The value of `key`, without counting as a use."""
        return self._items.get(key, default)

    def put(self, key, value):
        """Set the value of `key`, which becomes the key used last."""
        if key in self._items:
            del self._items[key]
        elif len(self._items) >= self.capacity:
            self._evict()
        self._items[key] = value

    def pop(self, key, default=None):
        """Remove `key` and return its value; `default` if it is not there. This is no eviction."""
        return self._items.pop(key, default)

    def keys(self):
        """The keys, the one used longest ago first."""
        return list(self._items)

    def items(self):
        """Pairs of key and value, the one used longest ago first."""
        return list(self._items.items())

    def resize(self, capacity):
        """Change the capacity, evicting what does not fit any more."""
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self.capacity = capacity
        while len(self._items) > capacity:
            self._evict()

    def clear(self):
        """Forget everything; nothing counts as evicted."""
        self._items.clear()

    def _evict(self):
        key = next(iter(self._items))
        value = self._items.pop(key)
        self.stats.evictions += 1
        if self.on_evict is not None:
            self.on_evict(key, value)
