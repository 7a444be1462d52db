import unittest

from texttable import align, shorten, wrap


class WrapTest(unittest.TestCase):
    def test_breaks_at_spaces(self):
        self.assertEqual(wrap("the quick brown fox", 10), ["the quick", "brown fox"])

    def test_a_line_may_be_full(self):
        self.assertEqual(wrap("ab cd ef", 5), ["ab cd", "ef"])

    def test_long_words_are_cut(self):
        self.assertEqual(wrap("a abcdefgh b", 3), ["a", "abc", "def", "gh", "b"])

    def test_words_follow_the_rest_of_a_cut_word(self):
        self.assertEqual(wrap("abcd e", 3), ["abc", "d e"])

    def test_line_breaks_stay(self):
        self.assertEqual(wrap("one\n\ntwo three", 5), ["one", "", "two", "three"])

    def test_an_empty_text_is_one_line(self):
        self.assertEqual(wrap("", 5), [""])

    def test_spaces_are_collapsed(self):
        self.assertEqual(wrap("  a   b ", 10), ["a b"])

    def test_width_must_be_positive(self):
        with self.assertRaises(ValueError):
            wrap("a", 0)
        self.assertEqual(wrap("ab", 1), ["a", "b"])


class ShortenTest(unittest.TestCase):
    def test_what_fits_stays(self):
        self.assertEqual(shorten("hello", 5), "hello")

    def test_what_does_not_is_marked(self):
        self.assertEqual(shorten("hello world", 8), "hello...")

    def test_no_space_before_the_mark(self):
        self.assertEqual(shorten("hello world", 9), "hello...")

    def test_another_mark(self):
        self.assertEqual(shorten("hello world", 6, mark="~"), "hello~")

    def test_hardly_any_room(self):
        self.assertEqual(shorten("hello", 2), "..")


class AlignTest(unittest.TestCase):
    def test_pad(self):
        self.assertEqual(align.pad("ab", 5), "ab   ")
        self.assertEqual(align.pad("ab", 5, "right"), "   ab")
        self.assertEqual(align.pad("ab", 5, "center"), " ab  ")

    def test_pad_of_what_is_wide_already(self):
        self.assertEqual(align.pad("abc", 2, "right"), "abc")

    def test_unknown_alignment(self):
        with self.assertRaisesRegex(ValueError, "'middle'"):
            align.pad("a", 3, "middle")

    def test_numbers(self):
        for text in ("1", "-1.5", "+12", "1,234", "12,345,678.9", "50%", " 7 "):
            with self.subTest(text):
                self.assertIs(align.is_number(text), True)

    def test_no_numbers(self):
        for text in ("", "a", "1.", "1.2.3", "1,23", "1234,567", "-", "1 2", ".5"):
            with self.subTest(text):
                self.assertIs(align.is_number(text), False)

    def test_natural(self):
        self.assertEqual(align.natural(["1", "", "2.5"]), "right")
        self.assertEqual(align.natural(["1", "x"]), "left")
        self.assertEqual(align.natural(["", " "]), "left")
