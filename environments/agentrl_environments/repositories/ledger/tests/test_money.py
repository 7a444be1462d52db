import unittest

from ledger import allocate, format_cents, money, parse_cents


class ParseTest(unittest.TestCase):
    def test_whole_amounts(self):
        self.assertEqual([parse_cents("12"), parse_cents("0"), parse_cents(" 7 ")], [1200, 0, 700])

    def test_cents(self):
        self.assertEqual([parse_cents("3.50"), parse_cents("3.5"), parse_cents("0.05")], [350, 350, 5])

    def test_thousands(self):
        self.assertEqual(parse_cents("1,234,567.89"), 123456789)

    def test_negative_amounts(self):
        self.assertEqual([parse_cents("-3.50"), parse_cents("-0.01")], [-350, -1])

    def test_what_is_no_amount(self):
        for text in ("", "a", "1.", "1.234", "--1", ".5", "1.-5"):
            with self.subTest(text), self.assertRaises(ValueError):
                parse_cents(text)

    def test_format(self):
        self.assertEqual(
            [format_cents(cents) for cents in (0, 5, 1200, 123456789)], ["0.00", "0.05", "12.00", "1,234,567.89"]
        )

    def test_format_of_negative_amounts(self):
        self.assertEqual([format_cents(-5), format_cents(-1250)], ["-0.05", "-12.50"])

    def test_what_was_written_is_read(self):
        for cents in (-100001, -1, 0, 99, 100, 123456):
            self.assertEqual(parse_cents(format_cents(cents)), cents)


class AllocateTest(unittest.TestCase):
    def test_equal_weights(self):
        self.assertEqual(allocate(100, [1, 1, 1]), [34, 33, 33])

    def test_weights(self):
        self.assertEqual(allocate(1000, [3, 7]), [300, 700])

    def test_who_weighs_nothing_gets_nothing(self):
        self.assertEqual(allocate(101, [0, 1, 0, 1]), [0, 51, 0, 50])

    def test_nothing_is_lost(self):
        for amount in (0, 1, 99, 1001):
            self.assertEqual(sum(allocate(amount, [5, 3, 2, 1])), amount)

    def test_bad_weights(self):
        for weights in ([], [0, 0], [2, -1]):
            with self.subTest(weights), self.assertRaises(ValueError):
                allocate(100, weights)

    def test_interest(self):
        self.assertEqual(money.interest(100000, 250, 365), 2500)
        self.assertEqual(money.interest(100000, 250, 30), 205)
        self.assertEqual(money.interest(99, 100, 30), 0)
