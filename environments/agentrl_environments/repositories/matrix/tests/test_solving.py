import unittest
from fractions import Fraction

from matrix import ShapeError, determinant, elimination, fit_line, inverse, null_space, parse, rank, reduced, solve


class EliminationTest(unittest.TestCase):
    def test_reduced(self):
        form, pivots = reduced(parse("1 2 1; 2 4 0; 3 6 1"))
        self.assertEqual((form.rows(), pivots), ([[1, 2, 0], [0, 0, 1], [0, 0, 0]], [0, 2]))

    def test_reduced_swaps_rows(self):
        form, pivots = reduced(parse("0 2; 4 0"))
        self.assertEqual((form.rows(), pivots), ([[1, 0], [0, 1]], [0, 1]))

    def test_reduced_of_a_wide_matrix(self):
        form, pivots = reduced(parse("2 4 6 8; 1 3 5 7"))
        self.assertEqual((form.rows(), pivots), ([[1, 0, -1, -2], [0, 1, 2, 3]], [0, 1]))

    def test_rank(self):
        ranks = [rank(parse(text)) for text in ("1 2; 2 4", "1 2; 3 4", "0 0; 0 0", "1; 2; 3", "1 2 3")]
        self.assertEqual(ranks, [1, 2, 0, 1, 1])

    def test_determinant(self):
        self.assertEqual(determinant(parse("1 2; 3 4")), -2)
        self.assertEqual(determinant(parse("2 0 1; 1 3 2; 1 1 4")), 18)

    def test_determinant_turns_with_the_rows(self):
        self.assertEqual(determinant(parse("0 1; 1 0")), -1)
        self.assertEqual(determinant(parse("0 0 1; 1 0 0; 0 1 0")), 1)

    def test_determinant_of_dependent_rows(self):
        self.assertEqual(determinant(parse("1 2; 2 4")), 0)

    def test_determinant_of_one_value(self):
        self.assertEqual(determinant(parse("7")), 7)

    def test_only_square_matrices(self):
        for function in (determinant, inverse):
            with self.assertRaises(ShapeError):
                function(parse("1 2"))

    def test_inverse(self):
        self.assertEqual(inverse(parse("1 2; 3 4")).rows(), [[-2, 1], [Fraction(3, 2), Fraction(-1, 2)]])

    def test_inverse_undoes(self):
        matrix = parse("2 0 1; 1 3 2; 1 1 4")
        self.assertEqual((matrix * inverse(matrix)).rows(), [[1, 0, 0], [0, 1, 0], [0, 0, 1]])

    def test_what_has_no_inverse(self):
        with self.assertRaises(ZeroDivisionError):
            inverse(parse("1 2; 2 4"))

    def test_cofactor(self):
        matrix = parse("1 2 3; 4 5 6; 7 8 10")
        self.assertEqual([elimination.cofactor(matrix, 0, column) for column in range(3)], [2, 2, -3])

    def test_cofactors_give_the_determinant(self):
        matrix = parse("1 2 3; 4 5 6; 7 8 10")
        expanded = sum(matrix.at(0, column) * elimination.cofactor(matrix, 0, column) for column in range(3))
        self.assertEqual([expanded, determinant(matrix)], [-3, -3])


class EquationsTest(unittest.TestCase):
    def test_one_solution(self):
        self.assertEqual(solve(parse("2 1; 1 3"), [5, 10]), [1, 3])

    def test_fractions(self):
        self.assertEqual(solve(parse("3 0; 0 2"), [1, 1]), [Fraction(1, 3), Fraction(1, 2)])

    def test_no_solution(self):
        self.assertIsNone(solve(parse("1 1; 1 1"), [1, 2]))

    def test_many_solutions(self):
        self.assertEqual(solve(parse("1 2 1"), [4]), [4, 0, 0])
        self.assertEqual(solve(parse("0 2 1"), [4]), [0, 2, 0])

    def test_more_equations_than_numbers(self):
        self.assertEqual(solve(parse("1 0; 0 1; 1 1"), [1, 2, 3]), [1, 2])
        self.assertIsNone(solve(parse("1 0; 0 1; 1 1"), [1, 2, 4]))

    def test_null_space(self):
        self.assertEqual(null_space(parse("1 2 0; 0 0 1")), [[-2, 1, 0]])
        self.assertEqual(null_space(parse("1 1 1")), [[-1, 1, 0], [-1, 0, 1]])
        self.assertEqual(null_space(parse("1 0; 0 1")), [])

    def test_a_line_through_points(self):
        self.assertEqual(fit_line([(0, 1), (1, 3), (2, 5)]), (2, 1))

    def test_the_best_line(self):
        self.assertEqual(fit_line([(0, 0), (1, 1), (2, 1)]), (Fraction(1, 2), Fraction(1, 6)))

    def test_no_line(self):
        with self.assertRaises(ValueError):
            fit_line([(1, 1), (1, 2)])
