import unittest

from lru import TTLCache, memo, memoize


class Clock:
    def __init__(self):
        self.now = 100

    def time(self):
        return self.now


class TTLCacheTest(unittest.TestCase):
    def setUp(self):
        self.clock = Clock()
        self.cache = TTLCache(3, 10, clock=self.clock.time)
        self.cache.put("a", 1)

    def test_a_young_value_is_there(self):
        self.clock.now += 9
        self.assertEqual(self.cache.get("a"), 1)

    def test_a_value_ends_with_its_last_second(self):
        self.clock.now += 10
        self.assertIsNone(self.cache.get("a"))
        self.assertEqual(self.cache.get("a", "old"), "old")

    def test_membership_follows_age(self):
        self.assertIs("a" in self.cache, True)
        self.clock.now += 10
        self.assertIs("a" in self.cache, False)
        self.assertIs("b" in self.cache, False)

    def test_length_counts_living_values(self):
        self.clock.now += 5
        self.cache.put("b", 2)
        self.assertEqual(len(self.cache), 2)
        self.clock.now += 5
        self.assertEqual(len(self.cache), 1)

    def test_left(self):
        self.clock.now += 4
        self.assertEqual(self.cache.left("a"), 6)
        self.assertEqual(self.cache.left("b"), 0)
        self.clock.now += 20
        self.assertEqual(self.cache.left("a"), 0)

    def test_touch_starts_anew(self):
        self.clock.now += 8
        self.assertIs(self.cache.touch("a"), True)
        self.clock.now += 8
        self.assertEqual(self.cache.get("a"), 1)

    def test_touch_of_the_dead_does_nothing(self):
        self.clock.now += 10
        self.assertIs(self.cache.touch("a"), False)
        self.assertIs(self.cache.touch("b"), False)
        self.assertIsNone(self.cache.get("a"))

    def test_putting_again_starts_anew(self):
        self.clock.now += 8
        self.cache.put("a", 2)
        self.clock.now += 8
        self.assertEqual(self.cache.get("a"), 2)

    def test_expire_says_how_many(self):
        self.cache.put("b", 2)
        self.clock.now += 5
        self.cache.put("c", 3)
        self.clock.now += 5
        self.assertEqual(self.cache.expire(), 2)
        self.assertEqual(self.cache.expire(), 0)

    def test_capacity_still_holds(self):
        for key in "bcd":
            self.cache.put(key, key)
        self.assertIsNone(self.cache.get("a"))
        self.assertEqual(len(self.cache), 3)

    def test_seconds_must_be_positive(self):
        with self.assertRaises(ValueError):
            TTLCache(3, 0)


class MemoizeTest(unittest.TestCase):
    def setUp(self):
        self.calls = []

    def slow(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        if args and args[0] < 0:
            raise ValueError("negative")
        return sum(args) + sum(kwargs.values())

    def test_each_call_is_made_once(self):
        fast = memoize(self.slow)
        self.assertEqual([fast(1, 2), fast(1, 2), fast(2, 2)], [3, 3, 4])
        self.assertEqual(self.calls, [((1, 2), {}), ((2, 2), {})])

    def test_named_arguments_in_any_order(self):
        fast = memoize(self.slow)
        self.assertEqual([fast(1, x=2, y=3), fast(1, y=3, x=2)], [6, 6])
        self.assertEqual(len(self.calls), 1)

    def test_capacity_bounds_what_is_kept(self):
        fast = memoize(self.slow, capacity=1)
        for number in (1, 2, 1):
            fast(number)
        self.assertEqual(len(self.calls), 3)

    def test_forget_drops_one_call(self):
        fast = memoize(self.slow)
        fast(1)
        fast(2)
        self.assertIs(fast.forget(1), True)
        self.assertIs(fast.forget(1), False)
        fast(1)
        fast(2)
        self.assertEqual(len(self.calls), 3)

    def test_a_call_that_raises_is_not_kept(self):
        fast = memoize(self.slow)
        for _ in range(2):
            with self.assertRaises(ValueError):
                fast(-1)
        self.assertEqual(len(self.calls), 2)

    def test_keys_tell_calls_apart(self):
        self.assertEqual(memo.make_key([1], {"b": 2, "a": 1}), ((1,), (("a", 1), ("b", 2))))
        self.assertNotEqual(memo.make_key([1, 2], {}), memo.make_key([2, 1], {}))
