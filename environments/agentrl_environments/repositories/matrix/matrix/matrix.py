"""The matrix and its arithmetic."""

from fractions import Fraction


class ShapeError(ValueError):
    """The shapes of matrices do not fit."""


class Matrix:
    """Rows of fractions, all of one length; a matrix never changes."""

    def __init__(self, rows):
        rows = [tuple(Fraction(value) for value in row) for row in rows]
        if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
            raise ShapeError("rows must have the same length, at least 1")
        self._rows = tuple(rows)

    @property
    def shape(self):
        """Numbers of rows and columns."""
        return len(self._rows), len(self._rows[0])

    def rows(self):
        """All rows as lists."""
        return [list(row) for row in self._rows]

    def row(self, index):
        """One row, counted from 0."""
        return list(self._rows[index])

    def column(self, index):
        """One column, counted from 0."""
        return [row[index] for row in self._rows]

    def at(self, row, column):
        """One value."""
        return self._rows[row][column]

    def __eq__(self, other):
        return isinstance(other, Matrix) and self._rows == other._rows

    def __hash__(self):
        return hash(self._rows)

    def __add__(self, other):
        self._same_shape(other)
        return Matrix([[a + b for a, b in zip(one, two)] for one, two in zip(self._rows, other._rows)])

    def __sub__(self, other):
        self._same_shape(other)
        return Matrix([[a - b for a, b in zip(one, two)] for one, two in zip(self._rows, other._rows)])

    def __neg__(self):
        return self.scaled(-1)

    def __mul__(self, other):
        """With a number: each value times it. With a matrix: the matrix product."""
        if not isinstance(other, Matrix):
            return self.scaled(other)
        if self.shape[1] != other.shape[0]:
            raise ShapeError(f"cannot multiply {self.shape} by {other.shape}")
        columns = [other.column(index) for index in range(other.shape[1])]
        return Matrix([[dot(row, column) for column in columns] for row in self._rows])

    def __rmul__(self, number):
        return self.scaled(number)

    def __pow__(self, exponent):
        """The product of `exponent` matrices; 0 gives the identity."""
        if self.shape[0] != self.shape[1]:
            raise ShapeError("only square matrices have powers")
        if exponent < 0:
            raise ValueError("the exponent must not be negative")
        result, square = identity(self.shape[0]), self
        while exponent:
            if exponent % 2:
                result = result * square
            square = square * square
            exponent //= 2
        return result

    def scaled(self, number):
        """Each value times a number."""
        factor = Fraction(number)
        return Matrix([[value * factor for value in row] for row in self._rows])

    def transposed(self):
        """Rows as columns."""
        return Matrix(zip(*self._rows))

    def beside(self, other):
        """Both matrices side by side."""
        if self.shape[0] != other.shape[0]:
            raise ShapeError("numbers of rows differ")
        return Matrix([one + two for one, two in zip(self._rows, other._rows)])

    def without(self, row, column):
        """The matrix without one row and one column."""
        kept = [values for index, values in enumerate(self._rows) if index != row]
        return Matrix([values[:column] + values[column + 1 :] for values in kept])

    def trace(self):
        """The sum of the diagonal."""
        return sum(self._rows[index][index] for index in range(min(self.shape)))

    def is_symmetric(self):
        """Whether rows and columns are the same."""
        return self == self.transposed()

    def _same_shape(self, other):
        if self.shape != other.shape:
            raise ShapeError(f"shapes differ: {self.shape} and {other.shape}")


def identity(size):
    """Ones on the diagonal, zeros elsewhere."""
    return Matrix([[int(row == column) for column in range(size)] for row in range(size)])


def dot(one, other):
    """The sum of the products of two rows."""
    return sum(a * b for a, b in zip(one, other))
