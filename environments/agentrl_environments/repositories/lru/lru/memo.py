"""Keeping the results of a function."""

from lru.cache import LRUCache


def make_key(args, kwargs):
    """A key for a call: equal for calls with the same arguments, whatever the order of the named ones."""
    return (tuple(args), tuple(sorted(kwargs.items())))


def memoize(function, capacity=128):
    """A function that calls `function` once for each of the last `capacity` different calls.

    The result has `cache`, the `LRUCache` it uses, and `forget(*args, **kwargs)`, which drops one call. A call that
    raises is not kept.
    """
    missing = object()

    def call(*args, **kwargs):
        key = make_key(args, kwargs)
        value = call.cache.get(key, missing)
        if value is missing:
            value = function(*args, **kwargs)
            call.cache.put(key, value)
        return value

    def forget(*args, **kwargs):
        return call.cache.pop(make_key(args, kwargs), missing) is not missing

    call.cache = LRUCache(capacity)
    call.forget = forget
    return call
