"""From URLs to handlers and back."""

from routes.pattern import Pattern, PatternError
from routes.query import decode, encode, parse_query, write_query
from routes.router import MethodNotAllowed, NotFound, Router

__all__ = [
    "MethodNotAllowed",
    "NotFound",
    "Pattern",
    "PatternError",
    "Router",
    "decode",
    "encode",
    "parse_query",
    "write_query",
]
