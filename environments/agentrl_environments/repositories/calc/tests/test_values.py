import unittest
from fractions import Fraction

from calc import calculate, evaluate, parse
from calc.errors import EvaluationError
from calc.evaluator import run


class CalculateTest(unittest.TestCase):
    def test_whole_numbers_stay_whole(self):
        self.assertEqual(repr(calculate("1 + 2 * 3")), "7")

    def test_subtraction_goes_from_left_to_right(self):
        self.assertEqual(calculate("10 - 4 - 3"), 3)

    def test_division_is_exact(self):
        self.assertEqual(calculate("1 / 3"), Fraction(1, 3))
        self.assertEqual(repr(calculate("6 / 3")), "2")

    def test_decimals_are_exact(self):
        self.assertEqual(calculate("0.1 + 0.2"), Fraction(3, 10))

    def test_remainders(self):
        self.assertEqual(calculate("7 % 3"), 1)
        self.assertEqual(calculate("-7 % 3"), 2)

    def test_powers(self):
        self.assertEqual([calculate("2 ^ 10"), calculate("2 ^ 3 ^ 2"), calculate("-2 ^ 2")], [1024, 512, -4])

    def test_negative_powers(self):
        self.assertEqual(calculate("2 ^ -2"), Fraction(1, 4))

    def test_powers_are_bounded(self):
        self.assertEqual(calculate("1 ^ 1000"), 1)
        for text in ("2 ^ 1001", "2 ^ 0.5", "0 ^ -1"):
            with self.subTest(text), self.assertRaises(EvaluationError):
                calculate(text)

    def test_nothing_is_divided_by_zero(self):
        for text in ("1 / 0", "1 % (2 - 2)"):
            with self.subTest(text), self.assertRaisesRegex(EvaluationError, "division by zero"):
                calculate(text)

    def test_functions(self):
        self.assertEqual(calculate("abs(-3) + min(4, 2, 8) * max(1, 5)"), 13)
        self.assertEqual([calculate("floor(7 / 2)"), calculate("floor(-7 / 2)")], [3, -4])
        self.assertEqual(calculate("avg(1, 2, 6)"), 3)

    def test_functions_check_their_arguments(self):
        for text in ("abs(1, 2)", "min()", "floor()"):
            with self.subTest(text), self.assertRaisesRegex(EvaluationError, "wrong number of arguments"):
                calculate(text)

    def test_unknown_names_are_said(self):
        with self.assertRaisesRegex(EvaluationError, "unknown name y"):
            calculate("x + y", {"x": 1})
        with self.assertRaisesRegex(EvaluationError, "unknown function f"):
            calculate("f(1)")

    def test_names(self):
        self.assertEqual(calculate("x * x - y", {"x": 5, "y": Fraction(1, 2)}), Fraction(49, 2))

    def test_trees_can_be_used_twice(self):
        tree = parse("n * (n + 1) / 2")
        self.assertEqual([evaluate(tree, {"n": n}) for n in (1, 4, 100)], [1, 10, 5050])


class RunTest(unittest.TestCase):
    def test_later_lines_know_earlier_names(self):
        self.assertEqual(run("a = 2\nb = a * 3\na + b"), [2, 6, 8])

    def test_comments_and_empty_lines_are_left_out(self):
        self.assertEqual(run("# start\n\n1 + 1  # two\n   \n3"), [2, 3])

    def test_an_assignment_has_a_value(self):
        self.assertEqual(run("a = b = 4\na * b"), [4, 16])

    def test_names_can_change(self):
        self.assertEqual(run("a = 1\na = a + 1\na"), [1, 2, 2])
