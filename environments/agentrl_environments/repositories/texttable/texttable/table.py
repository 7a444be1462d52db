"""Tables of rows and columns."""

from texttable.align import natural, pad
from texttable.wrap import wrap

BORDERS = {"none": ("", "  ", ""), "bars": ("| ", " | ", " |")}


class Table:
    """Rows of cells under a header. Cells become text when they are added: None is empty, numbers keep at most two
    decimals."""

    def __init__(self, header):
        self.header = [to_text(cell) for cell in header]
        self.rows = []

    def add(self, *cells):
        """Add a row; missing cells are empty. Raises ValueError for more cells than columns."""
        if len(cells) > len(self.header):
            raise ValueError(f"{len(cells)} cells in {len(self.header)} columns")
        row = [to_text(cell) for cell in cells]
        self.rows.append(row + [""] * (len(self.header) - len(row)))

    def column(self, name):
        """The cells of a column, without its header. Raises KeyError for an unknown name."""
        if name not in self.header:
            raise KeyError(name)
        index = self.header.index(name)
        return [row[index] for row in self.rows]

    def sort(self, name, reverse=False):
        """Sort the rows by a column, numbers by their size and before text; equal rows stay in order."""
        keys = [sort_key(cell) for cell in self.column(name)]
        order = sorted(range(len(self.rows)), key=lambda index: keys[index], reverse=reverse)
        self.rows = [self.rows[index] for index in order]

    def widths(self, widest=None):
        """The width that each column needs, at most `widest`."""
        columns = zip(self.header, *self.rows)
        widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
        return widths if widest is None else [min(width, widest) for width in widths]

    def render(self, border="none", widest=None, footer=None):
        """The table as text: header, rule, rows, and below another rule `footer`, a row of cells. Columns of numbers
        are aligned to the right. Cells wider than `widest` are wrapped."""
        left, between, right = BORDERS[border]
        widths = self.widths(widest)
        aligns = [natural(self.column(name)) for name in self.header]

        def lines(row):
            wrapped = [wrap(cell, max(1, width)) for cell, width in zip(row, widths)]
            height = max(len(cell) for cell in wrapped)
            for at in range(height):
                parts = [cell[at] if at < len(cell) else "" for cell in wrapped]
                cells = [pad(part, width, align) for part, width, align in zip(parts, widths, aligns)]
                yield (left + between.join(cells) + right).rstrip()

        rule = (left + between.join("-" * width for width in widths) + right).rstrip()
        shown = [*lines(self.header), rule]
        for row in self.rows:
            shown.extend(lines(row))
        if footer is not None:
            shown.append(rule)
            shown.extend(lines([to_text(cell) for cell in footer]))
        return "\n".join(shown)


def to_text(cell):
    """A cell as text."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        text = f"{cell:.2f}".rstrip("0")
        return text.rstrip(".")
    return str(cell)


def sort_key(cell):
    """Numbers first, by size; then text, whatever its case."""
    try:
        return (0, float(cell.replace(",", "").removesuffix("%")), "")
    except ValueError:
        return (1, 0.0, cell.lower())
