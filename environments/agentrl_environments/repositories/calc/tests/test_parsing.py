import unittest

from calc import parse, show, tokenize
from calc.errors import CalcError, ParseError


class TokenizeTest(unittest.TestCase):
    def test_kinds_and_positions(self):
        self.assertEqual(
            tokenize("a1 + 20"),
            [("name", "a1", 0), ("operator", "+", 3), ("number", "20", 5), ("end", "", 7)],
        )

    def test_a_number_may_have_a_point(self):
        self.assertEqual([token[1] for token in tokenize("1.25*3")], ["1.25", "*", "3", ""])

    def test_a_point_needs_digits_behind_it(self):
        with self.assertRaises(ParseError) as caught:
            tokenize("12.")
        self.assertEqual(caught.exception.position, 2)

    def test_one_point_only(self):
        with self.assertRaises(ParseError):
            tokenize("1.2.3")

    def test_names_may_hold_underscores(self):
        self.assertEqual(tokenize("_a_b2")[0], ("name", "_a_b2", 0))

    def test_nothing_is_one_token(self):
        self.assertEqual(tokenize("  "), [("end", "", 2)])

    def test_unknown_characters_are_named(self):
        with self.assertRaisesRegex(ParseError, "unknown character '\\$' at 2"):
            tokenize("1 $ 2")


class ParseTest(unittest.TestCase):
    def test_strength(self):
        self.assertEqual(show(parse("1 + 2 * 3 - 4")), "((1 + (2 * 3)) - 4)")

    def test_equal_strength_binds_to_the_left(self):
        self.assertEqual(show(parse("8 / 4 % 3 * 2")), "(((8 / 4) % 3) * 2)")

    def test_powers_bind_to_the_right(self):
        self.assertEqual(show(parse("2 ^ 3 ^ 2")), "(2 ^ (3 ^ 2))")

    def test_a_sign_binds_weaker_than_a_power(self):
        self.assertEqual(show(parse("-2 ^ 2")), "(-(2 ^ 2))")

    def test_a_sign_in_an_exponent(self):
        self.assertEqual(show(parse("2 ^ -1")), "(2 ^ (-1))")

    def test_signs_pile_up(self):
        self.assertEqual(parse("-+-3"), ("negate", ("negate", ("number", "3"))))

    def test_parentheses(self):
        self.assertEqual(show(parse("(1 + 2) * 3")), "((1 + 2) * 3)")

    def test_calls(self):
        self.assertEqual(parse("f()"), ("call", "f", []))
        self.assertEqual(show(parse("max(1, 2 + 3, x)")), "max(1, (2 + 3), x)")

    def test_assignments_nest(self):
        self.assertEqual(show(parse("a = b = 1 + 2")), "a = b = (1 + 2)")

    def test_trees_of_names(self):
        self.assertEqual(parse("x - 1"), ("binary", "-", ("name", "x"), ("number", "1")))

    def test_what_is_missing_is_said(self):
        for text, position in (("1 +", 3), ("", 0), ("(1", 2), ("max(1 2)", 6), ("1 2", 2), ("f(,)", 2), ("1 = 2", 2)):
            with self.subTest(text), self.assertRaises(ParseError) as caught:
                parse(text)
            self.assertEqual((text, caught.exception.position), (text, position))

    def test_parse_errors_are_calc_errors(self):
        with self.assertRaises(CalcError):
            parse(")")
