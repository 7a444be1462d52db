"""From blocks to HTML and to plain text."""

from minimark.blocks import parse_blocks
from minimark.inline import escape, inline_html, inline_text
from minimark.outline import slugs


def to_html(text, ids=False):
    """A text as HTML, one block a line. With `ids`, headings can be linked to."""
    blocks = parse_blocks(text)
    names = iter(slugs(blocks)) if ids else None
    return "\n".join(_html(block, names) for block in blocks)


def _html(block, names=None):
    kind = block[0]
    if kind == "heading":
        _, level, text = block
        name = f' id="{next(names)}"' if names is not None else ""
        return f"<h{level}{name}>{inline_html(text)}</h{level}>"
    if kind == "paragraph":
        return f"<p>{inline_html(block[1])}</p>"
    if kind == "code":
        language = f' class="language-{escape(block[1])}"' if block[1] else ""
        return f"<pre><code{language}>{escape(block[2])}</code></pre>"
    if kind == "rule":
        return "<hr>"
    if kind == "quote":
        return "<blockquote>" + "".join(_html(inner) for inner in block[1]) + "</blockquote>"
    tag = "ol" if block[1] else "ul"
    return f"<{tag}>" + "".join(f"<li>{_item(item)}</li>" for item in block[2]) + f"</{tag}>"


def _item(blocks):
    """An item of one paragraph only, or of one before a list, stands without the paragraph's tag."""
    if blocks and blocks[0][0] == "paragraph" and all(block[0] == "list" for block in blocks[1:]):
        return inline_html(blocks[0][1]) + "".join(_html(block) for block in blocks[1:])
    return "".join(_html(block) for block in blocks)


def plain_text(text):
    """A text without any markup: blocks are separated by empty lines, items and quotes keep a sign in front."""
    return "\n\n".join(_plain(block) for block in parse_blocks(text) if block[0] != "rule")


def _plain(block):
    kind = block[0]
    if kind == "heading":
        return inline_text(block[2])
    if kind == "paragraph":
        return inline_text(block[1])
    if kind == "code":
        return block[2]
    if kind == "quote":
        inside = "\n\n".join(_plain(inner) for inner in block[1])
        return "\n".join(f"> {line}".rstrip() for line in inside.split("\n"))
    lines = []
    for number, item in enumerate(block[2], start=1):
        sign = f"{number}. " if block[1] else "- "
        inside = "\n".join(_plain(inner) for inner in item).split("\n")
        lines.append(sign + inside[0])
        lines.extend(" " * len(sign) + line for line in inside[1:])
    return "\n".join(lines)
