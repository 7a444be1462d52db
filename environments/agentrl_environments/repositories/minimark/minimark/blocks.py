"""From lines to blocks, which are tuples:

("heading", level, text)    ("paragraph", text)    ("code", language, text)    ("rule",)
("quote", blocks)           ("list", ordered, [blocks of an item])
"""


def parse_blocks(text):
    """The blocks of a text."""
    return _parse(text.expandtabs(4).splitlines())


def _parse(lines):
    blocks = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if not line.strip():
            at += 1
        elif line.startswith("```"):
            block, at = _code(lines, at)
            blocks.append(block)
        elif heading(line) is not None:
            blocks.append(("heading", *heading(line)))
            at += 1
        elif is_rule(line):
            blocks.append(("rule",))
            at += 1
        elif line.startswith(">"):
            end = _while(lines, at, lambda line: line.startswith(">"))
            inside = [line[2:] if line.startswith("> ") else line[1:] for line in lines[at:end]]
            blocks.append(("quote", _parse(inside)))
            at = end
        elif marker(line) is not None:
            block, at = _list(lines, at)
            blocks.append(block)
        else:
            end = _while(lines, at, _goes_on)
            end = max(end, at + 1)
            blocks.append(("paragraph", " ".join(line.strip() for line in lines[at:end])))
            at = end
    return blocks


def _while(lines, at, holds):
    while at < len(lines) and holds(lines[at]):
        at += 1
    return at


def _goes_on(line):
    """Whether a line belongs to the paragraph before it."""
    starts = line.startswith((">", "```")) or heading(line) is not None or is_rule(line) or marker(line) is not None
    return bool(line.strip()) and not starts


def heading(line):
    """Level (1 to 6) and text of a heading; None if the line is none. Signs at the end do not count."""
    level = len(line) - len(line.lstrip("#"))
    if not 1 <= level <= 6 or not line[level:].startswith(" "):
        return None
    return level, line[level:].strip().rstrip("#").rstrip()


def is_rule(line):
    """Whether the line is a rule: three or more `-` or `*`, and nothing else but spaces."""
    signs = line.replace(" ", "")
    return len(signs) >= 3 and signs[0] in "-*" and signs.strip(signs[0]) == ""


def marker(line):
    """(ordered, width) of what begins a list item, such as `- ` or `12. `; None if the line begins none."""
    if line[:2] in ("- ", "* ", "+ "):
        return False, 2
    digits, point, rest = line.partition(".")
    if point and digits.isdigit() and len(digits) <= 9 and rest.startswith(" "):
        return True, len(digits) + 2
    return None


def _code(lines, at):
    """The lines up to the closing fence, or to the end."""
    end = _while(lines, at + 1, lambda line: not line.startswith("```"))
    return ("code", lines[at][3:].strip(), "\n".join(lines[at + 1 : end])), end + 1


def _list(lines, at):
    """Items of one kind; lines that are indented, also behind an empty line, belong to the item before them."""
    ordered = marker(lines[at])[0]
    items = []
    while at < len(lines):
        found = marker(lines[at])
        if found is None or found[0] != ordered or is_rule(lines[at]):
            break
        width = found[1]
        inside = [lines[at][width:]]
        at += 1
        while at < len(lines):
            line = lines[at]
            if line.startswith(" " * width):
                inside.append(line[width:])
            elif not line.strip() and at + 1 < len(lines) and lines[at + 1].startswith(" " * width):
                inside.append("")
            elif line.strip() and not line.startswith(" ") and inside[-1] and _goes_on(line):
                inside.append(line)
            else:
                break
            at += 1
        items.append(_parse(inside))
        if at + 1 < len(lines) and not lines[at].strip() and marker(lines[at + 1]) is not None:
            at += 1
    return ("list", ordered, items), at
