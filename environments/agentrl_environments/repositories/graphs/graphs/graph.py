"""The graph itself."""


class Graph:
    """Nodes, and edges with a weight from node to node. What is listed comes in the order in which it was added."""

    def __init__(self, edges=()):
        self._out = {}
        for edge in edges:
            self.add_edge(*edge)

    def __contains__(self, node):
        return node in self._out

    def __len__(self):
        return len(self._out)

    def add_node(self, node):
        """Add a node; one that is there stays as it is."""
        self._out.setdefault(node, {})

    def add_edge(self, start, end, weight=1, both=False):
        """Add an edge and its nodes, or change its weight; with `both` also the way back."""
        self.add_node(start)
        self.add_node(end)
        self._out[start][end] = weight
        if both:
            self._out[end][start] = weight

    def remove_edge(self, start, end):
        """Remove an edge. Raises KeyError if it is not there."""
        del self._out[start][end]

    def remove_node(self, node):
        """Remove a node and all its edges. Raises KeyError if it is not there."""
        del self._out[node]
        for ends in self._out.values():
            ends.pop(node, None)

    def nodes(self):
        """All nodes."""
        return list(self._out)

    def edges(self):
        """All edges as (start, end, weight)."""
        return [(start, end, weight) for start, ends in self._out.items() for end, weight in ends.items()]

    def neighbours(self, node):
        """The nodes that edges of `node` lead to. Raises KeyError for an unknown node."""
        return list(self._out[node])

    def weight(self, start, end):
        """The weight of an edge. Raises KeyError if it is not there."""
        return self._out[start][end]

    def degree_in(self, node):
        """How many edges lead to `node`."""
        return sum(node in ends for ends in self._out.values())

    def reversed(self):
        """A graph with all edges turned around."""
        turned = Graph()
        for node in self._out:
            turned.add_node(node)
        for start, end, weight in self.edges():
            turned.add_edge(end, start, weight)
        return turned

    def subgraph(self, nodes):
        """The graph of these nodes and the edges between them."""
        kept = set(nodes)
        part = Graph()
        for node in self._out:
            if node in kept:
                part.add_node(node)
        for start, end, weight in self.edges():
            if start in kept and end in kept:
                part.add_edge(start, end, weight)
        return part


def parse(text):
    """A graph from lines such as `a -> b: 3`, `a -- b` (both ways) or `a`; weights are whole numbers, 1 if left out."""
    graph = Graph()
    for line in text.splitlines():
        line = line.strip()
        if not line:
            continue
        for arrow, both in (("->", False), ("--", True)):
            if arrow in line:
                start, _, rest = line.partition(arrow)
                end, colon, weight = rest.partition(":")
                graph.add_edge(start.strip(), end.strip(), int(weight) if colon else 1, both=both)
                break
        else:
            graph.add_node(line)
    return graph
