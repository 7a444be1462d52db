"""Gauss and Jordan."""

from fractions import Fraction

from matrix.matrix import Matrix, ShapeError, identity


def _reduce(rows, columns):
    """Bring `rows` (changed in place) to reduced echelon form in their first `columns` columns. Gives the columns of
    the leading ones and the determinant of the square part."""
    factor = Fraction(1)
    pivots = []
    at = 0
    for column in range(columns):
        found = next((row for row in range(at, len(rows)) if rows[row][column] != 0), None)
        if found is None:
            continue
        if found != at:
            rows[at], rows[found] = rows[found], rows[at]
            factor = -factor
        lead = rows[at][column]
        factor *= lead
        rows[at] = [value / lead for value in rows[at]]
        for other in range(len(rows)):
            if other != at and rows[other][column] != 0:
                times = rows[other][column]
                rows[other] = [value - times * top for value, top in zip(rows[other], rows[at])]
        pivots.append(column)
        at += 1
        if at == len(rows):
            break
    return pivots, factor if len(pivots) == columns else Fraction(0)


def reduced(matrix):
    """The reduced echelon form, and the columns of its leading ones."""
    rows = matrix.rows()
    pivots, _ = _reduce(rows, matrix.shape[1])
    return Matrix(rows), pivots


def rank(matrix):
    """How many rows are independent."""
    return len(reduced(matrix)[1])


def determinant(matrix):
    """The determinant. Raises ShapeError unless the matrix is square."""
    if matrix.shape[0] != matrix.shape[1]:
        raise ShapeError("only square matrices have a determinant")
    return _reduce(matrix.rows(), matrix.shape[1])[1]


def inverse(matrix):
    """The inverse. Raises ShapeError unless the matrix is square, ZeroDivisionError if it has none."""
    size = matrix.shape[0]
    if matrix.shape[1] != size:
        raise ShapeError("only square matrices have an inverse")
    rows = matrix.beside(identity(size)).rows()
    pivots, _ = _reduce(rows, size)
    if len(pivots) < size:
        raise ZeroDivisionError("the matrix has no inverse")
    return Matrix([row[size:] for row in rows])


def cofactor(matrix, row, column):
    """The determinant of the matrix without a row and a column, with the sign of its place."""
    sign = -1 if (row + column) % 2 else 1
    return sign * determinant(matrix.without(row, column))
