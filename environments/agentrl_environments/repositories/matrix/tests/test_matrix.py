import unittest
from fractions import Fraction

from matrix import Matrix, ShapeError, identity, parse, show


class MatrixTest(unittest.TestCase):
    def setUp(self):
        self.a = parse("1 2; 3 4")
        self.b = parse("0 1; 1 0")

    def test_values(self):
        self.assertEqual(self.a.rows(), [[1, 2], [3, 4]])
        self.assertEqual([self.a.row(1), self.a.column(1), self.a.at(1, 0)], [[3, 4], [2, 4], 3])

    def test_shape(self):
        self.assertEqual(parse("1 2 3; 4 5 6").shape, (2, 3))

    def test_rows_of_one_length(self):
        for rows in ([], [[]], [[1, 2], [3]]):
            with self.subTest(rows), self.assertRaises(ShapeError):
                Matrix(rows)

    def test_sum_and_difference(self):
        self.assertEqual((self.a + self.b).rows(), [[1, 3], [4, 4]])
        self.assertEqual((self.a - self.b).rows(), [[1, 1], [2, 4]])
        self.assertEqual((-self.a).rows(), [[-1, -2], [-3, -4]])

    def test_shapes_must_fit_a_sum(self):
        with self.assertRaises(ShapeError):
            self.a + parse("1 2 3")
        with self.assertRaises(ShapeError):
            self.a - parse("1; 2")

    def test_product(self):
        self.assertEqual((self.a * self.b).rows(), [[2, 1], [4, 3]])
        self.assertEqual((self.b * self.a).rows(), [[3, 4], [1, 2]])

    def test_product_of_other_shapes(self):
        self.assertEqual((parse("1 2 3") * parse("1; 2; 3")).rows(), [[14]])
        self.assertEqual((parse("1; 2") * parse("3 4")).rows(), [[3, 4], [6, 8]])

    def test_shapes_must_fit_a_product(self):
        with self.assertRaises(ShapeError):
            self.a * parse("1 2")

    def test_times_a_number(self):
        self.assertEqual((self.a * Fraction(1, 2)).rows(), [[Fraction(1, 2), 1], [Fraction(3, 2), 2]])
        self.assertEqual((3 * self.a).rows(), [[3, 6], [9, 12]])

    def test_powers(self):
        fibonacci = parse("1 1; 1 0")
        self.assertEqual((fibonacci**10).rows(), [[89, 55], [55, 34]])
        self.assertEqual((self.a**1).rows(), self.a.rows())
        self.assertEqual((self.a**0).rows(), [[1, 0], [0, 1]])

    def test_what_has_no_power(self):
        with self.assertRaises(ShapeError):
            parse("1 2") ** 2
        with self.assertRaises(ValueError):
            self.a ** (-1)

    def test_transposed(self):
        self.assertEqual(parse("1 2 3; 4 5 6").transposed().rows(), [[1, 4], [2, 5], [3, 6]])

    def test_beside(self):
        self.assertEqual(self.a.beside(self.b).rows(), [[1, 2, 0, 1], [3, 4, 1, 0]])
        with self.assertRaises(ShapeError):
            self.a.beside(parse("1"))

    def test_without(self):
        self.assertEqual(parse("1 2 3; 4 5 6; 7 8 9").without(0, 1).rows(), [[4, 6], [7, 9]])

    def test_trace(self):
        self.assertEqual([self.a.trace(), parse("1 2 3; 4 5 6").trace()], [5, 6])

    def test_symmetry(self):
        self.assertIs(self.b.is_symmetric(), True)
        self.assertIs(self.a.is_symmetric(), False)

    def test_equality(self):
        self.assertIs(self.a == parse("1 2; 3 4"), True)
        self.assertIs(self.a == self.b, False)
        self.assertIs(self.a != parse("1 2; 3 5"), True)

    def test_identity(self):
        self.assertEqual(identity(3).rows(), [[1, 0, 0], [0, 1, 0], [0, 0, 1]])


class TextTest(unittest.TestCase):
    def test_parse(self):
        self.assertEqual(parse("1, 1/2\n\n0.25 -3").rows(), [[1, Fraction(1, 2)], [Fraction(1, 4), -3]])

    def test_parse_refuses_words(self):
        with self.assertRaises(ValueError):
            parse("1 a")

    def test_show(self):
        self.assertEqual(show(parse("1 -1/2; 10 3")), " 1 -1/2\n10    3")
