"""Sets that grow together, and trees that span a graph (Kruskal)."""


class Forest:
    """Disjoint sets of items."""

    def __init__(self, items=()):
        self._parent = {item: item for item in items}
        self._size = dict.fromkeys(self._parent, 1)

    def find(self, item):
        """The item that stands for the set of `item`. Raises KeyError for an unknown one."""
        root = item
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[item] != root:
            self._parent[item], item = root, self._parent[item]
        return root

    def join(self, one, other):
        """Make one set of two; False if they were one already."""
        one, other = self.find(one), self.find(other)
        if one == other:
            return False
        if self._size[one] < self._size[other]:
            one, other = other, one
        self._parent[other] = one
        self._size[one] += self._size[other]
        return True

    def size(self, item):
        """How many items the set of `item` has."""
        return self._size[self.find(item)]

    def sets(self):
        """All sets, each sorted, in the order of their first items."""
        groups = {}
        for item in self._parent:
            groups.setdefault(self.find(item), []).append(item)
        return sorted(sorted(group) for group in groups.values())


def spanning_tree(graph):
    """The edges of a cheapest tree (a forest, where the graph falls apart), cheapest first. Directions do not count."""
    forest = Forest(graph.nodes())
    chosen = []
    for weight, start, end in sorted((weight, start, end) for start, end, weight in graph.edges()):
        if forest.join(start, end):
            chosen.append((start, end, weight))
    return chosen
