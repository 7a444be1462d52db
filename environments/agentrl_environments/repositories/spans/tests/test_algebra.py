import unittest

from spans import clip, gaps, intersect, merge, subtract, total
from spans.algebra import shift


class MergeTest(unittest.TestCase):
    def test_overlapping_spans_become_one(self):
        self.assertEqual(merge([(1, 5), (3, 8)]), [(1, 8)])

    def test_touching_spans_become_one(self):
        self.assertEqual(merge([(5, 7), (1, 5)]), [(1, 7)])

    def test_a_span_within_another(self):
        self.assertEqual(merge([(1, 10), (2, 3)]), [(1, 10)])

    def test_apart_spans_stay_apart_and_are_sorted(self):
        self.assertEqual(merge([(6, 8), (1, 2), (3, 5)]), [(1, 2), (3, 5), (6, 8)])

    def test_empty_spans_vanish(self):
        self.assertEqual(merge([(3, 3), (1, 2), (2, 2)]), [(1, 2)])

    def test_a_span_that_ends_before_it_starts_is_refused(self):
        with self.assertRaisesRegex(ValueError, "5..4"):
            merge([(1, 2), (5, 4)])

    def test_total_counts_once(self):
        self.assertEqual(total([(1, 5), (3, 8), (10, 11)]), 8)
        self.assertEqual(total([]), 0)


class IntersectTest(unittest.TestCase):
    def test_common_parts(self):
        self.assertEqual(intersect([(0, 10), (20, 30)], [(5, 25)]), [(5, 10), (20, 25)])

    def test_touching_is_not_common(self):
        self.assertEqual(intersect([(0, 5)], [(5, 9)]), [])

    def test_many_against_one(self):
        self.assertEqual(intersect([(0, 100)], [(1, 2), (3, 4), (99, 120)]), [(1, 2), (3, 4), (99, 100)])

    def test_equal_ends(self):
        self.assertEqual(intersect([(0, 4), (4, 9)], [(2, 9)]), [(2, 9)])

    def test_clip(self):
        self.assertEqual(clip([(0, 4), (6, 9), (12, 15)], 3, 13), [(3, 4), (6, 9), (12, 13)])


class GapsTest(unittest.TestCase):
    def test_between_and_around(self):
        self.assertEqual(gaps([(2, 4), (6, 7)], 0, 10), [(0, 2), (4, 6), (7, 10)])

    def test_nothing_taken(self):
        self.assertEqual(gaps([], 3, 5), [(3, 5)])

    def test_all_taken(self):
        self.assertEqual(gaps([(0, 20)], 5, 10), [])

    def test_spans_outside_do_not_matter(self):
        self.assertEqual(gaps([(0, 2), (20, 30)], 5, 10), [(5, 10)])

    def test_spans_across_the_ends(self):
        self.assertEqual(gaps([(0, 6), (9, 12)], 5, 10), [(6, 9)])


class SubtractTest(unittest.TestCase):
    def test_a_hole(self):
        self.assertEqual(subtract([(0, 10)], [(3, 5)]), [(0, 3), (5, 10)])

    def test_everything(self):
        self.assertEqual(subtract([(2, 5)], [(0, 10)]), [])

    def test_from_nothing(self):
        self.assertEqual(subtract([], [(0, 10)]), [])

    def test_several_from_several(self):
        self.assertEqual(subtract([(0, 5), (8, 12)], [(4, 9), (11, 20)]), [(0, 4), (9, 11)])

    def test_shift(self):
        self.assertEqual(shift([(0, 2), (5, 6)], -3), [(-3, -1), (2, 3)])
