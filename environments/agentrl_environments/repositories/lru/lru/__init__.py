"""Bounded caches."""

from lru.cache import LRUCache
from lru.memo import memoize
from lru.stats import Stats
from lru.ttl import TTLCache

__all__ = ["LRUCache", "Stats", "TTLCache", "memoize"]
