import unittest

from graphs import Forest, Graph, breadth_first, depth_first, is_bipartite, parse, reachable, spanning_tree


class GraphTest(unittest.TestCase):
    def setUp(self):
        self.graph = Graph([("a", "b", 4), ("a", "c"), ("c", "b", 2)])

    def test_nodes_and_edges_in_order(self):
        self.assertEqual(self.graph.nodes(), ["a", "b", "c"])
        self.assertEqual(self.graph.edges(), [("a", "b", 4), ("a", "c", 1), ("c", "b", 2)])

    def test_neighbours(self):
        self.assertEqual(self.graph.neighbours("a"), ["b", "c"])
        self.assertEqual(self.graph.neighbours("b"), [])
        with self.assertRaises(KeyError):
            self.graph.neighbours("z")

    def test_weights_can_change(self):
        self.graph.add_edge("a", "b", 7)
        self.assertEqual(self.graph.weight("a", "b"), 7)
        self.assertEqual(len(self.graph.edges()), 3)

    def test_both_ways(self):
        self.graph.add_edge("c", "d", 5, both=True)
        self.assertEqual([self.graph.weight("c", "d"), self.graph.weight("d", "c")], [5, 5])

    def test_size_and_membership(self):
        self.assertEqual(len(self.graph), 3)
        self.assertIs("b" in self.graph, True)
        self.assertIs("z" in self.graph, False)

    def test_adding_a_known_node_keeps_its_edges(self):
        self.graph.add_node("a")
        self.assertEqual(self.graph.neighbours("a"), ["b", "c"])

    def test_remove_edge(self):
        self.graph.remove_edge("a", "b")
        self.assertEqual(self.graph.neighbours("a"), ["c"])
        with self.assertRaises(KeyError):
            self.graph.remove_edge("b", "a")

    def test_remove_node(self):
        self.graph.remove_node("b")
        self.assertEqual(self.graph.edges(), [("a", "c", 1)])
        self.assertEqual(self.graph.nodes(), ["a", "c"])

    def test_degree_in(self):
        self.assertEqual([self.graph.degree_in(node) for node in "abc"], [0, 2, 1])

    def test_reversed(self):
        turned = self.graph.reversed()
        self.assertEqual(turned.edges(), [("b", "a", 4), ("b", "c", 2), ("c", "a", 1)])
        self.assertEqual(turned.nodes(), ["a", "b", "c"])

    def test_subgraph(self):
        self.assertEqual(self.graph.subgraph(["c", "b"]).edges(), [("c", "b", 2)])
        self.assertEqual(self.graph.subgraph(["b", "a"]).nodes(), ["a", "b"])

    def test_parse(self):
        graph = parse("a -> b: 3\n\n b -- c \nlonely\n")
        self.assertEqual(graph.edges(), [("a", "b", 3), ("b", "c", 1), ("c", "b", 1)])
        self.assertEqual(graph.nodes(), ["a", "b", "c", "lonely"])


class WalksTest(unittest.TestCase):
    def setUp(self):
        self.graph = parse("a -> b\na -> c\nb -> d\nc -> d\nd -> a\ne -> a")

    def test_breadth_first(self):
        self.assertEqual(breadth_first(self.graph, "a"), ["a", "b", "c", "d"])

    def test_depth_first(self):
        self.assertEqual(depth_first(self.graph, "a"), ["a", "b", "d", "c"])

    def test_depth_first_after(self):
        self.assertEqual(depth_first(self.graph, "a", after=True), ["d", "b", "c", "a"])

    def test_reachable(self):
        self.assertIs(reachable(self.graph, "e", "d"), True)
        self.assertIs(reachable(self.graph, "a", "e"), False)
        self.assertIs(reachable(self.graph, "a", "a"), True)

    def test_bipartite(self):
        self.assertIs(is_bipartite(parse("a -> b\nb -> c\nc -> d\nd -> a")), True)
        self.assertIs(is_bipartite(parse("a -> b\nb -> c\nc -> a")), False)
        self.assertIs(is_bipartite(parse("b -> a\nc -> a\nx -> y\ny -> z\nz -> x")), False)
        self.assertIs(is_bipartite(Graph()), True)


class TreesTest(unittest.TestCase):
    def test_sets_grow_together(self):
        forest = Forest("abcde")
        self.assertEqual([forest.join("a", "b"), forest.join("c", "d"), forest.join("b", "a")], [True, True, False])
        self.assertEqual(forest.sets(), [["a", "b"], ["c", "d"], ["e"]])

    def test_sizes(self):
        forest = Forest([0, 1, 2, 3, 4, 5])
        for one, other in ((0, 1), (2, 3), (1, 3)):
            forest.join(one, other)
        self.assertEqual([forest.size(item) for item in (0, 3, 5)], [4, 4, 1])

    def test_one_stands_for_all(self):
        forest = Forest("abc")
        forest.join("a", "b")
        forest.join("b", "c")
        self.assertEqual(len({forest.find(item) for item in "abc"}), 1)

    def test_spanning_tree(self):
        graph = parse("a -- b: 4\nb -- c: 1\na -- c: 2\nc -- d: 7\nb -- d: 6\nx -- y: 3")
        edges = [("b", "c", 1), ("a", "c", 2), ("x", "y", 3), ("b", "d", 6)]
        self.assertEqual(spanning_tree(graph), edges)
