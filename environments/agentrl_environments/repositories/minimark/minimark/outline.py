"""Headings and links to them."""

from minimark.blocks import parse_blocks
from minimark.inline import inline_text


def slug(text):
    """A heading's name in links: small letters, digits and hyphens."""
    name = ""
    for character in inline_text(text).lower():
        if character.isalnum():
            name += character
        elif character in " -_" and not name.endswith("-"):
            name += "-"
    return name.strip("-")


def slugs(blocks):
    """The names of all headings at the top level; one that is taken gets a number, from 2."""
    names = []
    counts = {}
    for block in blocks:
        if block[0] != "heading":
            continue
        name = slug(block[2])
        counts[name] = counts.get(name, 0) + 1
        names.append(name if counts[name] == 1 else f"{name}-{counts[name]}")
    return names


def outline(text):
    """(level, text, name) of all headings at the top level."""
    blocks = parse_blocks(text)
    headings = [block for block in blocks if block[0] == "heading"]
    return [(level, inline_text(title), name) for (_, level, title), name in zip(headings, slugs(blocks))]


def table_of_contents(text, deepest=6):
    """A list of links to the headings, as Markdown, indented by their level below the highest one."""
    found = [entry for entry in outline(text) if entry[0] <= deepest]
    if not found:
        return ""
    highest = min(level for level, _, _ in found)
    return "\n".join(f"{'  ' * (level - highest)}- [{title}](#{name})" for level, title, name in found)
