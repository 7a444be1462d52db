"""Linear equations."""

from matrix.elimination import reduced
from matrix.matrix import Matrix


def solve(matrix, values):
    """The numbers x with `matrix` times x equal to `values`; those that may be chosen freely are 0. None if there are
    no such numbers."""
    width = matrix.shape[1]
    form, pivots = reduced(matrix.beside(Matrix([[value] for value in values])))
    if width in pivots:
        return None
    solution = [0] * width
    for row, column in enumerate(pivots):
        solution[column] = form.at(row, width)
    return solution


def null_space(matrix):
    """A basis of the numbers x with `matrix` times x equal to zero: one list for each number that may be chosen."""
    form, pivots = reduced(matrix)
    width = matrix.shape[1]
    basis = []
    for free in range(width):
        if free in pivots:
            continue
        vector = [0] * width
        vector[free] = 1
        for row, column in enumerate(pivots):
            vector[column] = -form.at(row, free)
        basis.append(vector)
    return basis


def fit_line(points):
    """Slope and height at 0 of the line that fits points (x, y) best: least squares. Raises ValueError if all x are the
    same."""
    rows = Matrix([[x, 1] for x, _ in points])
    heights = Matrix([[y] for _, y in points])
    turned = rows.transposed()
    solution = solve(turned * rows, (turned * heights).column(0))
    if len({x for x, _ in points}) < 2 or solution is None:
        raise ValueError("the points lie on no single line that is a function of x")
    return solution[0], solution[1]
