"""Aligning cells."""


def pad(text, width, align="left"):
    """`text` with spaces up to `width`: `left`, `right` or `center` (the odd space goes to the right)."""
    missing = max(0, width - len(text))
    if align == "left":
        return text + " " * missing
    if align == "right":
        return " " * missing + text
    if align == "center":
        before = missing // 2
        return " " * before + text + " " * (missing - before)
    raise ValueError(f"unknown alignment {align!r}")


def is_number(text):
    """Whether the text is a number: a sign, digits with commas between thousands, a point, a percent sign."""
    text = text.strip().removesuffix("%")
    if text[:1] in ("+", "-"):
        text = text[1:]
    whole, point, rest = text.partition(".")
    if point and not rest.isdigit():
        return False
    groups = whole.split(",")
    if len(groups) > 1 and (len(groups[0]) > 3 or any(len(group) != 3 for group in groups[1:])):
        return False
    return all(group.isdigit() for group in groups)


def natural(cells):
    """The alignment that suits a column: `right` if every cell that is not empty is a number, and there is one."""
    filled = [cell for cell in cells if cell.strip()]
    return "right" if filled and all(is_number(cell) for cell in filled) else "left"
