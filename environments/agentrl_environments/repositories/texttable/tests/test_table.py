import unittest

from texttable import Table, parse
from texttable.parse import is_rule, split_row
from texttable.table import to_text


def fruit():
    table = Table(["fruit", "count", "price"])
    table.add("apple", 12, 0.5)
    table.add("fig", 3, 10.25)
    table.add("kiwi", None, 2.0)
    return table


class TableTest(unittest.TestCase):
    def test_render(self):
        shown = (
            "fruit  count  price\n-----  -----  -----\napple     12    0.5\nfig        3  10.25\nkiwi              2"
        )
        self.assertEqual(fruit().render(), shown)

    def test_render_with_bars(self):
        table = Table(["a", "b"])
        table.add("x", 1)
        table.add("yy", 10)
        self.assertEqual(table.render("bars"), "| a  |  b |\n| -- | -- |\n| x  |  1 |\n| yy | 10 |")

    def test_render_wraps(self):
        table = Table(["k", "text"])
        table.add("a", "one two three")
        table.add("b", "four")
        self.assertEqual(table.render(widest=7), "k  text\n-  -------\na  one two\n   three\nb  four")

    def test_footer(self):
        table = Table(["n", "v"])
        table.add("a", 5)
        self.assertEqual(table.render(footer=["s", 5]), "n  v\n-  -\na  5\n-  -\ns  5")

    def test_no_rows(self):
        self.assertEqual(Table(["a", "bc"]).render(), "a  bc\n-  --")

    def test_unknown_border(self):
        with self.assertRaises(KeyError):
            fruit().render("double")

    def test_missing_cells_are_empty(self):
        table = Table(["a", "b", "c"])
        table.add(1)
        self.assertEqual(table.rows, [["1", "", ""]])

    def test_too_many_cells(self):
        with self.assertRaisesRegex(ValueError, "3 cells in 2 columns"):
            Table(["a", "b"]).add(1, 2, 3)

    def test_column(self):
        self.assertEqual(fruit().column("price"), ["0.5", "10.25", "2"])
        with self.assertRaises(KeyError):
            fruit().column("weight")

    def test_sort_by_number(self):
        table = fruit()
        table.sort("price")
        self.assertEqual(table.column("fruit"), ["apple", "kiwi", "fig"])

    def test_sort_reversed(self):
        table = fruit()
        table.sort("price", reverse=True)
        self.assertEqual(table.column("fruit"), ["fig", "kiwi", "apple"])

    def test_sort_puts_numbers_before_text(self):
        table = Table(["v"])
        for cell in ("b", "10", "A", "9", "1,000", "50%"):
            table.add(cell)
        table.sort("v")
        self.assertEqual(table.column("v"), ["9", "10", "50%", "1,000", "A", "b"])

    def test_sort_keeps_equal_rows_in_order(self):
        table = Table(["k", "v"])
        for key, value in (("x", 2), ("y", 1), ("z", 2), ("w", 1)):
            table.add(key, value)
        table.sort("v")
        self.assertEqual(table.column("k"), ["y", "w", "x", "z"])

    def test_widths(self):
        self.assertEqual(fruit().widths(), [5, 5, 5])
        self.assertEqual(fruit().widths(widest=4), [4, 4, 4])

    def test_width_of_a_cell_with_lines(self):
        table = Table(["a"])
        table.add("one\nthree\nten")
        self.assertEqual(table.widths(), [5])

    def test_to_text(self):
        self.assertEqual([to_text(cell) for cell in (None, 3, 2.50, 3.0, 1.005, "x")], ["", "3", "2.5", "3", "1", "x"])
        self.assertEqual(to_text(100.0), "100")


class ParseTest(unittest.TestCase):
    def test_what_was_rendered_is_read(self):
        table = parse(fruit().render("bars"))
        self.assertEqual(table.header, ["fruit", "count", "price"])
        self.assertEqual(table.rows[2], ["kiwi", "", "2"])
        self.assertEqual(len(table.rows), 3)

    def test_escaped_bars(self):
        self.assertEqual(split_row(r"| a \| b | c\d |"), ["a | b", r"c\d"])

    def test_rules(self):
        self.assertIs(is_rule("| --- | :-: |"), True)
        self.assertIs(is_rule("| --- | |"), False)
        self.assertIs(is_rule("| a-b | --- |"), False)

    def test_short_rows_are_filled(self):
        self.assertEqual(parse("| a | b |\n\n| 1 |").rows, [["1", ""]])

    def test_no_table(self):
        for text in ("", "a | b", "| a |\n| b"):
            with self.subTest(text), self.assertRaises(ValueError):
                parse(text)
