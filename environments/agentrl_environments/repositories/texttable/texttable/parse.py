"""Reading tables with bars, as `Table.render(border="bars")` writes them."""

from texttable.table import Table


def split_row(line):
    """The cells of a line; `\\|` is a bar within a cell."""
    cells = [""]
    escaped = False
    for character in line.strip():
        if escaped:
            cells[-1] += character if character == "|" else "\\" + character
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "|":
            cells.append("")
        else:
            cells[-1] += character
    if escaped:
        cells[-1] += "\\"
    return [cell.strip() for cell in cells[1:-1]]


def is_rule(line):
    """Whether the line is a rule between rows."""
    cells = split_row(line)
    return bool(cells) and all(cell and not cell.strip("-:") for cell in cells)


def parse(text):
    """The table in a text of lines with bars. Raises ValueError where there is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines or not all(line.strip().startswith("|") and line.strip().endswith("|") for line in lines):
        raise ValueError("no table: every line must start and end with a bar")
    table = Table(split_row(lines[0]))
    for line in lines[1:]:
        if not is_rule(line):
            table.add(*split_row(line))
    return table
