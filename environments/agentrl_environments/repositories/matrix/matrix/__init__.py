"""Exact matrices."""

from matrix.elimination import determinant, inverse, rank, reduced
from matrix.equations import fit_line, null_space, solve
from matrix.matrix import Matrix, ShapeError, identity
from matrix.text import parse, show

__all__ = [
    "Matrix",
    "ShapeError",
    "determinant",
    "fit_line",
    "identity",
    "inverse",
    "null_space",
    "parse",
    "rank",
    "reduced",
    "show",
    "solve",
]
