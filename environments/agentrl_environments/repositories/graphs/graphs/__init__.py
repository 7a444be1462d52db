"""Directed graphs with weights."""

from graphs.graph import Graph, parse
from graphs.order import Cycle, components, layers, topological
from graphs.paths import all_distances, path_cost, shortest_path, within
from graphs.trees import Forest, spanning_tree
from graphs.walks import breadth_first, depth_first, is_bipartite, reachable

__all__ = [
    "Cycle",
    "Forest",
    "Graph",
    "all_distances",
    "breadth_first",
    "components",
    "depth_first",
    "is_bipartite",
    "layers",
    "parse",
    "path_cost",
    "reachable",
    "shortest_path",
    "spanning_tree",
    "topological",
    "within",
]
