"""Tables as text."""

from texttable.parse import parse
from texttable.table import Table
from texttable.wrap import shorten, wrap

__all__ = ["Table", "parse", "shorten", "wrap"]
