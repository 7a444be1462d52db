"""A subset of Markdown."""

from minimark.blocks import parse_blocks
from minimark.inline import escape, inline_html, inline_text
from minimark.outline import outline, slug, table_of_contents
from minimark.render import plain_text, to_html

__all__ = [
    "escape",
    "inline_html",
    "inline_text",
    "outline",
    "parse_blocks",
    "plain_text",
    "slug",
    "table_of_contents",
    "to_html",
]
