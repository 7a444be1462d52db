import unittest

from queues import Empty, PriorityQueue, Simulation


class PriorityQueueTest(unittest.TestCase):
    def setUp(self):
        self.queue = PriorityQueue([("c", 3), ("a", 1), ("d", 4), ("b", 2)])

    def test_the_smallest_comes_first(self):
        self.assertEqual(self.queue.drain(), ["a", "b", "c", "d"])

    def test_many_items(self):
        numbers = [(number * 37) % 101 for number in range(101)]
        queue = PriorityQueue([(number, number) for number in numbers])
        self.assertEqual(queue.drain(), sorted(numbers))

    def test_of_equal_ones_the_first_pushed(self):
        queue = PriorityQueue([("x", 1), ("b", 0), ("y", 1), ("a", 0), ("z", 1)])
        self.assertEqual(queue.drain(), ["b", "a", "x", "y", "z"])

    def test_peek_leaves_it_there(self):
        self.assertEqual([self.queue.peek(), self.queue.peek(), len(self.queue)], [("a", 1), ("a", 1), 4])

    def test_pop(self):
        self.assertEqual([self.queue.pop(), self.queue.pop(), len(self.queue)], [("a", 1), ("b", 2), 2])
        self.assertIs("a" in self.queue, False)

    def test_an_empty_queue(self):
        queue = PriorityQueue()
        for function in (queue.peek, queue.pop):
            with self.assertRaises(Empty):
                function()
        self.assertEqual(queue.drain(), [])

    def test_an_item_is_held_once(self):
        with self.assertRaisesRegex(ValueError, "a is there already"):
            self.queue.push("a", 9)
        self.queue.pop()
        self.queue.push("a", 9)
        self.assertEqual(self.queue.priority("a"), 9)

    def test_change_to_the_front(self):
        self.queue.change("d", 0)
        self.assertEqual(self.queue.drain(), ["d", "a", "b", "c"])

    def test_change_to_the_back(self):
        self.queue.change("a", 9)
        self.assertEqual(self.queue.drain(), ["b", "c", "d", "a"])

    def test_change_keeps_the_rank_among_equals(self):
        self.queue.change("b", 3)
        self.assertEqual(self.queue.drain(), ["a", "c", "b", "d"])

    def test_unknown_items(self):
        for function in (self.queue.priority, self.queue.remove):
            with self.assertRaises(KeyError):
                function("z")
        with self.assertRaises(KeyError):
            self.queue.change("z", 1)

    def test_remove(self):
        self.queue.remove("b")
        self.queue.remove("d")
        self.assertEqual(self.queue.drain(), ["a", "c"])

    def test_remove_lets_the_last_item_rise(self):
        pairs = [("r", 0), ("a", 10), ("b", 1), ("c", 11), ("d", 12), ("e", 2), ("f", 3)]
        queue = PriorityQueue(pairs)
        queue.remove("c")
        self.assertEqual(queue.drain(), ["r", "b", "e", "f", "a", "d"])

    def test_merge(self):
        other = PriorityQueue([("a", 0), ("b", 7), ("e", 2)])
        self.queue.merge(other)
        self.assertEqual(len(other), 0)
        self.assertEqual(self.queue.priority("a"), 0)
        self.assertEqual(self.queue.drain(), ["a", "b", "e", "c", "d"])


class SimulationTest(unittest.TestCase):
    def setUp(self):
        self.simulation = Simulation()
        self.log = []

    def note(self, text):
        return lambda: self.log.append((text, self.simulation.now))

    def test_calls_are_made_in_order(self):
        self.simulation.after(5, self.note("late"))
        self.simulation.after(2, self.note("early"))
        self.assertEqual(self.simulation.run(), 2)
        self.assertEqual(self.log, [("early", 2), ("late", 5)])

    def test_at_the_same_time_the_first_planned(self):
        for text in "abc":
            self.simulation.after(1, self.note(text))
        self.simulation.run()
        self.assertEqual(self.log, [("a", 1), ("b", 1), ("c", 1)])

    def test_calls_can_plan_calls(self):
        self.simulation.after(3, lambda: self.simulation.after(4, self.note("then")))
        self.simulation.run()
        self.assertEqual(self.log, [("then", 7)])

    def test_cancel(self):
        event = self.simulation.after(1, self.note("never"))
        self.assertIs(self.simulation.cancel(event), True)
        self.assertIs(self.simulation.cancel(event), False)
        self.assertEqual([self.simulation.run(), self.log], [0, []])

    def test_what_was_made_cannot_be_cancelled(self):
        event = self.simulation.after(1, self.note("once"))
        self.simulation.run()
        self.assertIs(self.simulation.cancel(event), False)

    def test_run_until(self):
        self.simulation.every(3, self.note("tick"), 4)
        self.assertEqual(self.simulation.run(until=7), 2)
        self.assertEqual([self.simulation.now, self.simulation.pending()], [7, 2])
        self.simulation.run(until=9)
        self.assertEqual(self.log, [("tick", 3), ("tick", 6), ("tick", 9)])

    def test_step(self):
        self.simulation.after(1, self.note("one"))
        self.assertEqual([self.simulation.step(), self.simulation.step(), self.simulation.now], [True, False, 1])

    def test_no_delay(self):
        self.simulation.after(0, self.note("now"))
        self.simulation.run()
        self.assertEqual(self.log, [("now", 0)])

    def test_the_past(self):
        with self.assertRaises(ValueError):
            self.simulation.after(-1, self.note("before"))
