"""Half-open spans of whole numbers and what is planned with them."""

from spans.algebra import clip, gaps, intersect, merge, subtract, total
from spans.bookings import Bookings, Conflict
from spans.planning import best_value, most_at_once, pick_most, rooms

__all__ = [
    "Bookings",
    "Conflict",
    "best_value",
    "clip",
    "gaps",
    "intersect",
    "merge",
    "most_at_once",
    "pick_most",
    "rooms",
    "subtract",
    "total",
]
