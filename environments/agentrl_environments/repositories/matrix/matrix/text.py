"""Matrices as text."""

from fractions import Fraction

from matrix.matrix import Matrix


def parse(text):
    """A matrix from text: rows are lines or parts between `;`, values stand between spaces or commas and may be `1/3`
    or `0.5`. Raises ValueError."""
    rows = []
    for line in text.replace(";", "\n").splitlines():
        values = line.replace(",", " ").split()
        if values:
            rows.append([Fraction(value) for value in values])
    return Matrix(rows)


def show(matrix):
    """A matrix as lines of right-aligned columns."""
    cells = [[str(value) for value in row] for row in matrix.rows()]
    widths = [max(len(cell) for cell in column) for column in zip(*cells)]
    return "\n".join(" ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in cells)
