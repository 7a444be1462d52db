import unittest

from spans import Bookings, Conflict, best_value, most_at_once, pick_most, rooms


class PlanningTest(unittest.TestCase):
    def test_most_at_once(self):
        self.assertEqual(most_at_once([(0, 10), (5, 15), (9, 20), (30, 40)]), 3)

    def test_one_that_ends_makes_room(self):
        self.assertEqual(most_at_once([(0, 5), (5, 9), (9, 12)]), 1)

    def test_empty_spans_do_not_count(self):
        self.assertEqual(most_at_once([(4, 4), (4, 4)]), 0)

    def test_rooms(self):
        self.assertEqual(rooms([(0, 10), (2, 4), (4, 6), (5, 7)]), [0, 1, 1, 2])

    def test_rooms_follow_the_order_given(self):
        self.assertEqual(rooms([(5, 7), (0, 10)]), [1, 0])

    def test_the_smallest_free_room(self):
        self.assertEqual(rooms([(0, 2), (0, 3), (0, 9), (3, 5)]), [0, 1, 2, 0])

    def test_as_few_rooms_as_can_be(self):
        spans = [(0, 3), (1, 4), (2, 5), (4, 6), (5, 8)]
        self.assertEqual(max(rooms(spans)) + 1, most_at_once(spans))

    def test_pick_most(self):
        self.assertEqual(pick_most([(0, 10), (1, 3), (3, 5), (4, 6), (6, 8)]), [(1, 3), (3, 5), (6, 8)])

    def test_pick_most_of_nothing(self):
        self.assertEqual(pick_most([]), [])

    def test_best_value(self):
        self.assertEqual(best_value([(0, 3, 5), (3, 6, 5), (0, 6, 8)]), (10, [(0, 3, 5), (3, 6, 5)]))

    def test_one_large_job(self):
        self.assertEqual(best_value([(0, 3, 3), (3, 6, 3), (0, 6, 8)]), (8, [(0, 6, 8)]))

    def test_a_chain(self):
        jobs = [(1, 2, 50), (3, 5, 20), (6, 19, 100), (2, 100, 200)]
        self.assertEqual(best_value(jobs), (250, [(1, 2, 50), (2, 100, 200)]))

    def test_no_jobs(self):
        self.assertEqual(best_value([]), (0, []))


class BookingsTest(unittest.TestCase):
    def setUp(self):
        self.bookings = Bookings()
        self.bookings.book("ann", 9, 11)
        self.bookings.book("bob", 13, 14)

    def test_listing(self):
        self.assertEqual(self.bookings.listing(), [(9, 11, "ann"), (13, 14, "bob")])

    def test_touching_bookings_are_fine(self):
        self.bookings.book("cy", 11, 13)
        self.assertEqual([name for _, _, name in self.bookings.listing()], ["ann", "cy", "bob"])

    def test_a_conflict_says_with_whom(self):
        with self.assertRaisesRegex(Conflict, "taken by ann, bob") as caught:
            self.bookings.book("cy", 10, 14)
        self.assertEqual(caught.exception.names, ["ann", "bob"])

    def test_one_booking_a_name(self):
        with self.assertRaisesRegex(ValueError, "ann has a booking"):
            self.bookings.book("ann", 20, 21)

    def test_bad_spans(self):
        for start, end in ((5, 5), (6, 5)):
            with self.subTest(start), self.assertRaises(ValueError):
                self.bookings.book("cy", start, end)

    def test_cancel(self):
        self.bookings.cancel("ann")
        self.assertEqual(self.bookings.listing(), [(13, 14, "bob")])
        with self.assertRaises(KeyError):
            self.bookings.cancel("ann")

    def test_move_keeps_the_length(self):
        self.bookings.move("ann", 10)
        self.assertEqual(self.bookings.listing(), [(10, 12, "ann"), (13, 14, "bob")])

    def test_a_move_into_a_conflict_changes_nothing(self):
        with self.assertRaises(Conflict):
            self.bookings.move("ann", 12)
        self.assertEqual(self.bookings.listing(), [(9, 11, "ann"), (13, 14, "bob")])

    def test_who_is_there(self):
        self.assertEqual([self.bookings.at(hour) for hour in (8, 9, 10, 11, 13)], [None, "ann", "ann", None, "bob"])

    def test_first_free(self):
        self.assertEqual(self.bookings.first_free(2, 9, 20), 11)
        self.assertEqual(self.bookings.first_free(3, 9, 20), 14)
        self.assertEqual(self.bookings.first_free(1, 8, 20), 8)
        self.assertIsNone(self.bookings.first_free(7, 9, 20))
