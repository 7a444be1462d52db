"""Shortest paths (Dijkstra) and distances between all nodes (Floyd and Warshall)."""

import heapq


def path_cost(graph, path):
    """The sum of the weights along a path. Raises KeyError if an edge is missing."""
    return sum(graph.weight(start, end) for start, end in zip(path, path[1:]))


def shortest_path(graph, start, end):
    """The cost and the nodes of a cheapest path; None if there is none. Raises ValueError for a negative weight."""
    if any(weight < 0 for _, _, weight in graph.edges()):
        raise ValueError("negative weight")
    best = {start: 0}
    came_from = {}
    done = set()
    heap = [(0, start)]
    while heap:
        cost, node = heapq.heappop(heap)
        if node in done:
            continue
        if node == end:
            return cost, _walk_back(came_from, start, end)
        done.add(node)
        for neighbour in graph.neighbours(node):
            through = cost + graph.weight(node, neighbour)
            if neighbour not in best or through < best[neighbour]:
                best[neighbour] = through
                came_from[neighbour] = node
                heapq.heappush(heap, (through, neighbour))
    return None


def _walk_back(came_from, start, end):
    path = [end]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path[::-1]


def all_distances(graph):
    """Cost of a cheapest path by (start, end), for pairs that a path joins. Weights may be negative. Raises ValueError
    if a cycle makes paths ever cheaper."""
    cost = {(node, node): 0 for node in graph.nodes()}
    for start, end, weight in graph.edges():
        cost[start, end] = min(weight, cost.get((start, end), weight))
    for middle in graph.nodes():
        for start in graph.nodes():
            for end in graph.nodes():
                if (start, middle) in cost and (middle, end) in cost:
                    through = cost[start, middle] + cost[middle, end]
                    if (start, end) not in cost or through < cost[start, end]:
                        cost[start, end] = through
    if any(cost[node, node] < 0 for node in graph.nodes()):
        raise ValueError("negative cycle")
    return cost


def within(graph, start, budget):
    """The nodes whose distance from `start` is at most `budget`, with their distances."""
    found = {}
    for node in graph.nodes():
        path = shortest_path(graph, start, node)
        if path is not None and path[0] <= budget:
            found[node] = path[0]
    return found
