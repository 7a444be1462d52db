import unittest
from fractions import Fraction

from iniconf import SyntaxFault, lines, loads, parse_value, values


class LinesTest(unittest.TestCase):
    def test_settings_know_section_and_line(self):
        text = "a = 1\n\n[server]\nhost = here\n[server.log]\nlevel=2"
        found = [("", "a", "1", 1), ("server", "host", "here", 4), ("server.log", "level", "2", 6)]
        self.assertEqual(lines.settings(text), found)

    def test_comments_end_a_line(self):
        self.assertEqual(lines.strip_comment("a = 1 # one"), "a = 1")
        self.assertEqual(lines.strip_comment("  ; all of it"), "")

    def test_quotes_protect_comment_signs(self):
        self.assertEqual(lines.strip_comment("a = '#1' # one"), "a = '#1'")
        self.assertEqual(lines.strip_comment('a = "it\'s; ok" ; yes'), 'a = "it\'s; ok"')

    def test_long_lines_go_on(self):
        self.assertEqual(lines.join_lines("a = 1, \\\n   2\nb"), [(1, "a = 1, 2"), (3, "b")])
        self.assertEqual(lines.join_lines("x\na \\"), [(1, "x"), (2, "a ")])

    def test_names(self):
        for text, good in (("a", True), ("a-b_2", True), ("a.b", True), ("2a", False), ("", False), ("a..b", False)):
            with self.subTest(text):
                self.assertIs(lines.is_name(text), good)

    def test_faults_name_their_line(self):
        for text, line in (("a = 1\nb", 2), ("[a", 1), ("\n[2]", 2), ("a.b = 1", 1), ("x = 1\n\n= 2", 3)):
            with self.subTest(text), self.assertRaises(SyntaxFault) as caught:
                loads(text)
            self.assertEqual((text, caught.exception.line), (text, line))

    def test_the_value_may_hold_equal_signs(self):
        self.assertEqual(lines.settings("a = b = c"), [("", "a", "b = c", 1)])


class ValuesTest(unittest.TestCase):
    def test_numbers(self):
        self.assertEqual([parse_value(raw) for raw in ("1", "-20", "1_000", "0x1f", "+3")], [1, -20, 1000, 31, 3])

    def test_decimals(self):
        self.assertEqual([repr(parse_value(raw)) for raw in ("1.5", "-0.25", "2.0")], ["1.5", "-0.25", "2.0"])

    def test_what_is_almost_a_number_is_text(self):
        self.assertEqual([parse_value(raw) for raw in ("1.", "1.2.3", "a1", "-")], ["1.", "1.2.3", "a1", "-"])

    def test_words(self):
        self.assertEqual([parse_value(raw) for raw in ("true", "Yes", "on")], [True, True, True])
        self.assertEqual([parse_value(raw) for raw in ("false", "NO", "off", "none")], [False, False, False, None])

    def test_quotes_keep_text(self):
        self.assertEqual([parse_value(raw) for raw in ('"1"', "'true'", '" a "', '""')], ["1", "true", " a ", ""])

    def test_escapes(self):
        self.assertEqual(parse_value(r'"a\tb\n\"c\"\\"'), 'a\tb\n"c"\\')

    def test_bad_quotes(self):
        for raw in ('"a', "'a\"", r'"\x"', '"a"b"', '"'):
            with self.subTest(raw), self.assertRaises(ValueError):
                parse_value(raw)

    def test_lists(self):
        self.assertEqual(parse_value("[1, two, 'a, b', [3, 4],]"), [1, "two", "a, b", [3, 4]])
        self.assertEqual(parse_value("[]"), [])

    def test_a_list_must_end(self):
        with self.assertRaises(ValueError):
            parse_value("[1, 2")

    def test_durations(self):
        self.assertEqual(values.parse_duration("1h30m"), 5400)
        self.assertEqual(values.parse_duration("250ms"), Fraction(1, 4))
        self.assertEqual(values.parse_duration("2d1s"), 172801)

    def test_bad_durations(self):
        for raw in ("", "5", "h", "5x", "1h5", "0s"):
            with self.subTest(raw), self.assertRaises(ValueError):
                values.parse_duration(raw)
