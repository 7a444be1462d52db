"""Orders that follow the edges, and what stands in their way."""

from graphs.walks import depth_first


class Cycle(Exception):
    """The edges go round in a circle; `nodes` are those that no order can place."""

    def __init__(self, nodes):
        super().__init__("cycle among " + ", ".join(str(node) for node in nodes))
        self.nodes = nodes


def layers(graph):
    """The nodes in layers: each edge leads to a later layer, each node stands in the first layer that it can. Raises
    Cycle."""
    missing = {node: graph.degree_in(node) for node in graph.nodes()}
    layer = [node for node in graph.nodes() if missing[node] == 0]
    found = []
    while layer:
        found.append(layer)
        following = []
        for node in layer:
            del missing[node]
            for neighbour in graph.neighbours(node):
                missing[neighbour] -= 1
                if missing[neighbour] == 0:
                    following.append(neighbour)
        layer = following
    if missing:
        raise Cycle(list(missing))
    return found


def topological(graph):
    """The nodes in an order in which each edge leads forward. Raises Cycle."""
    return [node for layer in layers(graph) for node in layer]


def components(graph):
    """The strongly connected components (Kosaraju), each sorted, the one that others lead to last."""
    finished = []
    seen = set()
    for start in graph.nodes():
        if start not in seen:
            rest = graph.subgraph(node for node in graph.nodes() if node not in seen)
            found = depth_first(rest, start, after=True)
            seen.update(found)
            finished.extend(found)
    turned = graph.reversed()
    parts = []
    left = set(finished)
    for start in reversed(finished):
        if start in left:
            part = depth_first(turned.subgraph(left), start)
            left.difference_update(part)
            parts.append(sorted(part))
    return parts
