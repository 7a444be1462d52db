import unittest

from minimark import escape, inline_html, inline_text
from minimark.inline import is_safe, parse_inline


class InlineTest(unittest.TestCase):
    def test_plain_text(self):
        self.assertEqual(inline_html("a b"), "a b")
        self.assertEqual(inline_html(""), "")

    def test_emphasis(self):
        self.assertEqual(inline_html("*a* and _b_"), "<em>a</em> and <em>b</em>")

    def test_strong(self):
        self.assertEqual(inline_html("a **b c** d"), "a <strong>b c</strong> d")

    def test_marks_within_marks(self):
        self.assertEqual(inline_html("**a _b_ c**"), "<strong>a <em>b</em> c</strong>")

    def test_stars_that_mark_nothing(self):
        for text in ("2 * 3 * 4", "a*", "**", "** a**", "_ a_", "a _b", "*a *"):
            with self.subTest(text):
                self.assertEqual(inline_html(text), text)

    def test_code(self):
        self.assertEqual(inline_html("`a*b*` `<`"), "<code>a*b*</code> <code>&lt;</code>")
        self.assertEqual(inline_html("`a"), "`a")

    def test_links(self):
        self.assertEqual(inline_html("[a *b*](/c?d=1&e)"), '<a href="/c?d=1&amp;e">a <em>b</em></a>')

    def test_brackets_within_a_link(self):
        self.assertEqual(inline_html("[a [b]](c)"), '<a href="c">a [b]</a>')

    def test_brackets_that_are_no_link(self):
        for text in ("[a]", "[a] (b)", "[a](b", "[a"):
            with self.subTest(text):
                self.assertEqual(inline_html(text), text)

    def test_unsafe_links_become_text(self):
        self.assertEqual(inline_html("[x](javascript:alert)"), "x")

    def test_safety(self):
        for url in ("a/b", "#x", "/a:b", "?q=a:b", "http://a", "HTTPS://a", "mailto:a"):
            with self.subTest(url):
                self.assertIs(is_safe(url), True)
        for url in ("javascript:x", "data:x", " JavaScript:x"):
            with self.subTest(url):
                self.assertIs(is_safe(url), False)

    def test_backslashes(self):
        self.assertEqual(inline_html(r"\*a\* \[b\](c) \z \\"), r"*a* [b](c) \z " + "\\")

    def test_escape(self):
        self.assertEqual(escape('<a href="x">&'), "&lt;a href=&quot;x&quot;&gt;&amp;")

    def test_text_is_escaped(self):
        self.assertEqual(inline_html("a < b & *c > d*"), "a &lt; b &amp; <em>c &gt; d</em>")

    def test_without_marks(self):
        self.assertEqual(inline_text("**a** `b` [c _d_](e) < f"), "a b c d < f")

    def test_spans(self):
        spans = [("text", "a "), ("em", [("text", "b")]), ("link", [("code", "c")], "d")]
        self.assertEqual(parse_inline("a *b*[`c`]( d )"), spans)
