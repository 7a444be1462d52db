import unittest

from lru import LRUCache, Stats


def filled(capacity, *keys):
    cache = LRUCache(capacity)
    for key in keys:
        cache.put(key, key.upper())
    return cache


class LRUCacheTest(unittest.TestCase):
    def test_get_returns_what_was_put(self):
        self.assertEqual(filled(2, "a").get("a"), "A")

    def test_get_of_a_missing_key_is_the_default(self):
        self.assertIsNone(filled(2).get("a"))
        self.assertEqual(filled(2).get("a", 7), 7)

    def test_the_key_used_longest_ago_is_evicted(self):
        self.assertEqual(filled(2, "a", "b", "c").keys(), ["b", "c"])

    def test_reading_counts_as_use(self):
        cache = filled(2, "a", "b")
        cache.get("a")
        cache.put("c", "C")
        self.assertEqual(cache.keys(), ["a", "c"])

    def test_writing_counts_as_use(self):
        cache = filled(2, "a", "b")
        cache.put("a", 1)
        cache.put("c", 3)
        self.assertEqual(cache.items(), [("a", 1), ("c", 3)])

    def test_writing_a_known_key_evicts_nothing(self):
        cache = filled(2, "a", "b")
        cache.put("b", 2)
        self.assertEqual(cache.items(), [("a", "A"), ("b", 2)])
        self.assertEqual(cache.stats.evictions, 0)

    def test_peek_does_not_count_as_use(self):
        cache = filled(2, "a", "b")
        self.assertEqual(cache.peek("a"), "A")
        self.assertEqual(cache.peek("z", 5), 5)
        self.assertEqual(cache.keys(), ["a", "b"])
        self.assertEqual(cache.stats.hits, 0)

    def test_length_and_membership(self):
        cache = filled(3, "a", "b")
        self.assertEqual(len(cache), 2)
        self.assertIs("a" in cache, True)
        self.assertIs("c" in cache, False)

    def test_pop_removes(self):
        cache = filled(3, "a", "b")
        self.assertEqual(cache.pop("a"), "A")
        self.assertEqual(cache.pop("a", "gone"), "gone")
        self.assertEqual(cache.keys(), ["b"])
        self.assertEqual(cache.stats.evictions, 0)

    def test_on_evict_is_told(self):
        told = []
        cache = LRUCache(1, on_evict=lambda key, value: told.append((key, value)))
        cache.put("a", 1)
        cache.put("b", 2)
        cache.put("c", 3)
        self.assertEqual(told, [("a", 1), ("b", 2)])

    def test_shrinking_evicts_the_oldest(self):
        cache = filled(4, "a", "b", "c", "d")
        cache.resize(2)
        self.assertEqual(cache.keys(), ["c", "d"])
        self.assertEqual(cache.stats.evictions, 2)
        self.assertEqual(cache.capacity, 2)

    def test_growing_makes_room(self):
        cache = filled(1, "a")
        cache.resize(2)
        cache.put("b", "B")
        self.assertEqual(cache.keys(), ["a", "b"])

    def test_capacity_must_be_positive(self):
        with self.assertRaises(ValueError):
            LRUCache(0)
        with self.assertRaises(ValueError):
            filled(2).resize(0)

    def test_capacity_of_one(self):
        self.assertEqual(filled(1, "a", "b").items(), [("b", "B")])

    def test_clear_forgets_without_eviction(self):
        cache = filled(3, "a", "b")
        cache.clear()
        self.assertEqual(len(cache), 0)
        self.assertEqual(cache.stats.evictions, 0)

    def test_none_is_a_value(self):
        cache = LRUCache(2)
        cache.put("a", None)
        self.assertIsNone(cache.get("a", 3))
        self.assertEqual(cache.stats.hits, 1)


class StatsTest(unittest.TestCase):
    def test_lookups_are_counted(self):
        cache = filled(2, "a")
        cache.get("a")
        cache.get("a")
        cache.get("b")
        self.assertEqual(cache.stats.as_dict(), {"hits": 2, "misses": 1, "evictions": 0})

    def test_rate(self):
        stats = Stats()
        for hit in (True, True, True, False):
            stats.record(hit)
        self.assertEqual(stats.rate(), 0.75)

    def test_rate_before_the_first_lookup(self):
        self.assertEqual(Stats().rate(), 0.0)

    def test_reset(self):
        stats = Stats()
        stats.record(True)
        stats.record(False)
        stats.evictions = 4
        stats.reset()
        self.assertEqual(stats.as_dict(), {"hits": 0, "misses": 0, "evictions": 0})
