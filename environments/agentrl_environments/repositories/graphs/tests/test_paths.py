import unittest

from graphs import (
    Cycle,
    Graph,
    all_distances,
    components,
    layers,
    parse,
    path_cost,
    shortest_path,
    topological,
    within,
)


class PathsTest(unittest.TestCase):
    def setUp(self):
        self.graph = parse("a -> b: 7\na -> c: 3\nc -> b: 2\nb -> d: 1\nc -> d: 8\nd -> a: 1\nisland")

    def test_the_cheapest_path(self):
        self.assertEqual(shortest_path(self.graph, "a", "d"), (6, ["a", "c", "b", "d"]))

    def test_no_way_to_go(self):
        self.assertEqual(shortest_path(self.graph, "a", "a"), (0, ["a"]))

    def test_no_path(self):
        self.assertIsNone(shortest_path(self.graph, "a", "island"))

    def test_negative_weights_are_refused(self):
        self.graph.add_edge("d", "b", -1)
        with self.assertRaisesRegex(ValueError, "negative weight"):
            shortest_path(self.graph, "a", "c")

    def test_a_weight_of_zero_is_fine(self):
        self.assertEqual(shortest_path(Graph([("a", "b", 0)]), "a", "b"), (0, ["a", "b"]))

    def test_path_cost(self):
        self.assertEqual(path_cost(self.graph, ["a", "c", "d", "a"]), 12)
        self.assertEqual(path_cost(self.graph, ["a"]), 0)
        with self.assertRaises(KeyError):
            path_cost(self.graph, ["b", "a"])

    def test_all_distances(self):
        distances = all_distances(self.graph)
        self.assertEqual([distances["a", "b"], distances["b", "c"], distances["d", "d"]], [5, 5, 0])
        self.assertIs(("a", "island") in distances, False)
        self.assertEqual(len(distances), 17)

    def test_all_distances_agree_with_the_paths(self):
        distances = all_distances(self.graph)
        for start in "abcd":
            for end in "abcd":
                self.assertEqual(shortest_path(self.graph, start, end)[0], distances[start, end])

    def test_distances_may_be_negative(self):
        distances = all_distances(Graph([("a", "b", 2), ("b", "c", -5), ("a", "c", 0)]))
        self.assertEqual(distances["a", "c"], -3)

    def test_negative_cycles_are_refused(self):
        with self.assertRaisesRegex(ValueError, "negative cycle"):
            all_distances(Graph([("a", "b", 1), ("b", "a", -2)]))

    def test_within(self):
        self.assertEqual(within(self.graph, "a", 5), {"a": 0, "b": 5, "c": 3})


class OrderTest(unittest.TestCase):
    def test_layers(self):
        graph = parse("shirt -> tie\ntie -> jacket\npants -> shoes\npants -> belt\nbelt -> jacket")
        self.assertEqual(layers(graph), [["shirt", "pants"], ["tie", "shoes", "belt"], ["jacket"]])

    def test_topological(self):
        graph = parse("c -> d\na -> b\nb -> c")
        self.assertEqual(topological(graph), ["a", "b", "c", "d"])

    def test_nothing_to_order(self):
        self.assertEqual(layers(Graph()), [])

    def test_a_node_waits_for_all(self):
        self.assertEqual(layers(parse("a -> c\na -> b\nb -> c")), [["a"], ["b"], ["c"]])

    def test_cycles_are_named(self):
        with self.assertRaisesRegex(Cycle, "cycle among b, c, d") as caught:
            topological(parse("a -> b\nb -> c\nc -> b\nc -> d"))
        self.assertEqual(caught.exception.nodes, ["b", "c", "d"])

    def test_components(self):
        graph = parse("a -> b\nb -> c\nc -> a\nc -> d\nd -> e\ne -> d\ne -> f")
        self.assertEqual(components(graph), [["a", "b", "c"], ["d", "e"], ["f"]])

    def test_components_follow_the_edges(self):
        self.assertEqual(components(parse("z -> a\nm -> z")), [["m"], ["z"], ["a"]])

    def test_one_component(self):
        self.assertEqual(components(parse("a -- b\nb -- c")), [["a", "b", "c"]])
