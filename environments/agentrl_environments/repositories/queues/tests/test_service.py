import unittest

from queues import Counter, round_robin, shortest_first, summary, turnaround

JOBS = [("a", 0, 7), ("b", 2, 4), ("c", 4, 1), ("d", 5, 4)]


class CounterTest(unittest.TestCase):
    def play(self, customers, clerks=1, patience=None):
        counter = Counter(clerks, patience)
        counter.run(customers)
        return counter

    def test_one_after_the_other(self):
        counter = self.play([("ann", 0, 5, 1), ("bob", 1, 2, 1)])
        self.assertEqual(counter.served, [("ann", 0, 5), ("bob", 5, 7)])

    def test_two_clerks(self):
        counter = self.play([("ann", 0, 5, 1), ("bob", 1, 2, 1), ("cy", 2, 1, 1)], clerks=2)
        self.assertEqual(counter.served, [("ann", 0, 5), ("bob", 1, 3), ("cy", 3, 4)])

    def test_urgent_ones_first(self):
        counter = self.play([("ann", 0, 5, 1), ("bob", 1, 2, 3), ("cy", 2, 2, 1), ("dan", 3, 2, 2)])
        self.assertEqual([name for name, _, _ in counter.served], ["ann", "cy", "dan", "bob"])

    def test_equally_urgent_ones_in_the_order_of_coming(self):
        counter = self.play([("ann", 0, 5, 1), ("cy", 2, 1, 1), ("bob", 1, 1, 1)])
        self.assertEqual([name for name, _, _ in counter.served], ["ann", "bob", "cy"])

    def test_who_is_impatient_leaves(self):
        counter = self.play([("ann", 0, 5, 1), ("bob", 1, 2, 1), ("cy", 3, 2, 1)], patience=3)
        self.assertEqual([counter.served, counter.left], [[("ann", 0, 5), ("cy", 5, 7)], ["bob"]])

    def test_who_is_served_does_not_leave(self):
        counter = self.play([("ann", 0, 2, 1), ("bob", 1, 9, 1)], patience=3)
        self.assertEqual([counter.served, counter.left], [[("ann", 0, 2), ("bob", 2, 11)], []])

    def test_a_pause(self):
        counter = self.play([("ann", 0, 1, 1), ("bob", 10, 1, 1)])
        self.assertEqual(counter.served, [("ann", 0, 1), ("bob", 10, 11)])

    def test_there_must_be_a_clerk(self):
        with self.assertRaises(ValueError):
            Counter(0)

    def test_summary(self):
        customers = [("ann", 0, 5, 1), ("bob", 1, 2, 1), ("cy", 3, 2, 1)]
        numbers = {"served": 3, "longest": 4, "total": 8, "done": 9}
        self.assertEqual(summary(customers, self.play(customers).served), numbers)

    def test_summary_of_nothing(self):
        self.assertEqual(summary([], []), {"served": 0, "longest": 0, "total": 0, "done": 0})


class SchedulingTest(unittest.TestCase):
    def test_shortest_first(self):
        self.assertEqual(shortest_first(JOBS), [("a", 0, 7), ("c", 7, 8), ("b", 8, 12), ("d", 12, 16)])

    def test_shortest_first_with_preemption(self):
        schedule = [("a", 0, 2), ("b", 2, 4), ("c", 4, 5), ("b", 5, 7), ("d", 7, 11), ("a", 11, 16)]
        self.assertEqual(shortest_first(JOBS, preempt=True), schedule)

    def test_pieces_of_one_job_are_joined(self):
        jobs = [("a", 0, 3), ("b", 1, 5)]
        self.assertEqual(shortest_first(jobs, preempt=True), [("a", 0, 3), ("b", 3, 8)])

    def test_shortest_first_waits_for_jobs(self):
        self.assertEqual(shortest_first([("a", 2, 1), ("b", 9, 1)]), [("a", 2, 3), ("b", 9, 10)])

    def test_round_robin(self):
        schedule = [("a", 0, 3), ("b", 3, 6), ("a", 6, 9), ("c", 9, 10), ("d", 10, 13), ("b", 13, 14), ("a", 14, 15)]
        self.assertEqual(round_robin(JOBS, 3), [*schedule, ("d", 15, 16)])

    def test_round_robin_of_one_job(self):
        self.assertEqual(round_robin([("a", 1, 7)], 2), [("a", 1, 8)])

    def test_who_comes_stands_before_who_ran(self):
        self.assertEqual(round_robin([("a", 0, 4), ("b", 2, 2)], 2), [("a", 0, 2), ("b", 2, 4), ("a", 4, 6)])

    def test_slices(self):
        with self.assertRaises(ValueError):
            round_robin(JOBS, 0)

    def test_turnaround(self):
        self.assertEqual(turnaround(JOBS, shortest_first(JOBS)), {"a": 7, "b": 10, "c": 4, "d": 11})
        self.assertEqual(turnaround(JOBS, shortest_first(JOBS, preempt=True)), {"a": 16, "b": 5, "c": 1, "d": 6})
