"""Foreign text on a terminal. Of its own, as most commands print some, and few need an environment."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return model text without control characters: it must not drive a terminal."""
    return "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in text)
