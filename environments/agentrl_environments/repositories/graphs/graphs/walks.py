"""Visiting nodes."""

from collections import deque


def breadth_first(graph, start):
    """The nodes that can be reached, near ones first."""
    seen = {start}
    order = []
    queue = deque([start])
    while queue:
        node = queue.popleft()
        order.append(node)
        for neighbour in graph.neighbours(node):
            if neighbour not in seen:
                seen.add(neighbour)
                queue.append(neighbour)
    return order


def depth_first(graph, start, after=False):
    """The nodes that can be reached, going on as far as possible before turning back. A node comes before what it leads
    to; with `after`, behind it."""
    order = []
    seen = {start}
    stack = [(start, iter(graph.neighbours(start)))]
    if not after:
        order.append(start)
    while stack:
        node, rest = stack[-1]
        for neighbour in rest:
            if neighbour not in seen:
                seen.add(neighbour)
                if not after:
                    order.append(neighbour)
                stack.append((neighbour, iter(graph.neighbours(neighbour))))
                break
        else:
            stack.pop()
            if after:
                order.append(node)
    return order


def reachable(graph, start, end):
    """Whether a walk leads from `start` to `end`."""
    return end in breadth_first(graph, start)


def is_bipartite(graph):
    """Whether the nodes fall into two sides so that every edge joins both; directions do not matter."""
    side = {}
    turned = graph.reversed()
    for start in graph.nodes():
        if start in side:
            continue
        side[start] = 0
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for neighbour in [*graph.neighbours(node), *turned.neighbours(node)]:
                if neighbour not in side:
                    side[neighbour] = 1 - side[node]
                    queue.append(neighbour)
                elif side[neighbour] == side[node]:
                    return False
    return True
