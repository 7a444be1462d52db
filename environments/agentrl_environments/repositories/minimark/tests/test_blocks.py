import unittest

from minimark import outline, parse_blocks, plain_text, slug, table_of_contents, to_html
from minimark.blocks import heading, is_rule, marker


class BlocksTest(unittest.TestCase):
    def test_headings(self):
        self.assertEqual(heading("## A b ##"), (2, "A b"))
        for line in ("####### a", "#a", "a", "", " # a"):
            with self.subTest(line):
                self.assertIsNone(heading(line))

    def test_rules(self):
        for line, rule in (("---", True), ("* * *", True), ("--", False), ("--*", False), ("+++", False), ("", False)):
            with self.subTest(line):
                self.assertIs(is_rule(line), rule)

    def test_markers(self):
        self.assertEqual([marker(line) for line in ("- a", "12. a", "+ ")], [(False, 2), (True, 4), (False, 2)])
        self.assertEqual([marker(line) for line in ("-a", "1.a", "a. b", "1234567890. a", "")], [None] * 5)

    def test_paragraphs(self):
        self.assertEqual(parse_blocks("a\n b \n\n\nc"), [("paragraph", "a b"), ("paragraph", "c")])

    def test_a_heading_ends_a_paragraph(self):
        self.assertEqual(parse_blocks("a\n# b\nc"), [("paragraph", "a"), ("heading", 1, "b"), ("paragraph", "c")])

    def test_code(self):
        blocks = [("code", "py", "# a\n\n- b"), ("paragraph", "c")]
        self.assertEqual(parse_blocks("```py\n# a\n\n- b\n```\nc"), blocks)

    def test_code_without_an_end(self):
        self.assertEqual(parse_blocks("```\na"), [("code", "", "a")])

    def test_quotes(self):
        self.assertEqual(
            parse_blocks("> a\n>b\n> > c"), [("quote", [("paragraph", "a b"), ("quote", [("paragraph", "c")])])]
        )

    def test_lists(self):
        items = [[("paragraph", "a")], [("paragraph", "b")]]
        self.assertEqual(parse_blocks("- a\n- b"), [("list", False, items)])
        self.assertEqual(parse_blocks("1. a\n2. b"), [("list", True, items)])

    def test_an_empty_line_between_items(self):
        self.assertEqual(len(parse_blocks("- a\n\n- b\n\nc")), 2)

    def test_items_that_go_on(self):
        inside = [[("paragraph", "a b"), ("paragraph", "c")], [("paragraph", "d e")]]
        self.assertEqual(parse_blocks("- a\n  b\n\n  c\n- d\ne"), [("list", False, inside)])

    def test_lists_within_lists(self):
        inner = ("list", True, [[("paragraph", "b")]])
        self.assertEqual(
            parse_blocks("- a\n  1. b\n- c"), [("list", False, [[("paragraph", "a"), inner], [("paragraph", "c")]])]
        )

    def test_another_kind_of_list(self):
        self.assertEqual([block[1] for block in parse_blocks("- a\n1. b")], [False, True])

    def test_a_rule_ends_a_list(self):
        self.assertEqual([block[0] for block in parse_blocks("* a\n* * *\n* b")], ["list", "rule", "list"])

    def test_tabs_are_spaces(self):
        self.assertEqual(parse_blocks("1.\ta"), [("list", True, [[("paragraph", "a")]])])


class RenderTest(unittest.TestCase):
    def test_blocks(self):
        text = "# A *b*\n\nc\n\n---\n\n> d\n\n```x\n1 < 2\n```"
        lines = [
            "<h1>A <em>b</em></h1>",
            "<p>c</p>",
            "<hr>",
            "<blockquote><p>d</p></blockquote>",
            '<pre><code class="language-x">1 &lt; 2</code></pre>',
        ]
        self.assertEqual(to_html(text).split("\n"), lines)

    def test_items(self):
        self.assertEqual(
            to_html("- a\n  - b\n- c\n\n  d"), "<ul><li>a<ul><li>b</li></ul></li><li><p>c</p><p>d</p></li></ul>"
        )
        self.assertEqual(to_html("1. a"), "<ol><li>a</li></ol>")

    def test_ids(self):
        html = '<h1 id="a-b">A b</h1>\n<h2 id="a-b-2">A <em>b</em></h2>'
        self.assertEqual(to_html("# A b\n## A *b*", ids=True), html)

    def test_plain_text(self):
        text = "# A *b*\n\n> c\n>\n> d\n\n---\n1. e\n   - f\n2. `g`"
        self.assertEqual(plain_text(text), "A b\n\n> c\n>\n> d\n\n1. e\n   - f\n2. g")


class OutlineTest(unittest.TestCase):
    def test_slug(self):
        self.assertEqual([slug("A  b - C!"), slug("`x_y` *z*"), slug(" ?! ")], ["a-b-c", "x-y-z", ""])

    def test_outline(self):
        found = [(1, "A", "a"), (3, "B c", "b-c"), (2, "A", "a-2")]
        self.assertEqual(outline("# A\ntext\n### B *c*\n> # quoted\n\n## A"), found)

    def test_table_of_contents(self):
        text = "## A\n#### B\n## C d"
        self.assertEqual(table_of_contents(text), "- [A](#a)\n    - [B](#b)\n- [C d](#c-d)")
        self.assertEqual(table_of_contents(text, deepest=2), "- [A](#a)\n- [C d](#c-d)")
        self.assertEqual(table_of_contents("text"), "")
