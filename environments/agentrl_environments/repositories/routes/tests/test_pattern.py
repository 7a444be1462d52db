import unittest

from routes import Pattern, PatternError, decode, encode, parse_query, write_query
from routes.query import split_url


class PatternTest(unittest.TestCase):
    def test_literals(self):
        self.assertEqual(Pattern("/a/b").match("/a/b"), {})
        for path in ("/a", "/a/b/c", "/a/c", "a/b", "/a/b/"):
            with self.subTest(path):
                self.assertIsNone(Pattern("/a/b").match(path))

    def test_root(self):
        self.assertEqual(Pattern("/").match("/"), {})
        self.assertIsNone(Pattern("/").match("/a"))

    def test_captures(self):
        self.assertEqual(Pattern("/users/<id>/<tab>").match("/users/7/x"), {"id": "7", "tab": "x"})

    def test_a_capture_is_not_empty(self):
        self.assertIsNone(Pattern("/users/<id>").match("/users/"))

    def test_whole_numbers(self):
        pattern = Pattern("/n/<int:n>")
        self.assertEqual(pattern.match("/n/042"), {"n": 42})
        for path in ("/n/x", "/n/-1", "/n/1.5", "/n/"):
            with self.subTest(path):
                self.assertIsNone(pattern.match(path))

    def test_words(self):
        self.assertEqual(Pattern("/<word:w>").match("/a-b_2"), {"w": "a-b_2"})
        self.assertIsNone(Pattern("/<word:w>").match("/a.b"))

    def test_paths(self):
        pattern = Pattern("/files/<path:rest>")
        self.assertEqual(pattern.match("/files/a/b.txt"), {"rest": "a/b.txt"})
        self.assertIsNone(pattern.match("/files/"))
        self.assertIsNone(pattern.match("/files"))

    def test_percent_signs_are_read(self):
        self.assertEqual(Pattern("/<name>").match("/a%2Fb%20c"), {"name": "a/b c"})
        self.assertEqual(Pattern("/a b").match("/a%20b"), {})

    def test_patterns_that_cannot_be_read(self):
        for text in ("a", "/<x", "/<float:x>", "/<1x>", "/a<x>", "/<x>/<x>", "/<path:p>/b", "/<>"):
            with self.subTest(text), self.assertRaises(PatternError):
                Pattern(text)

    def test_names(self):
        self.assertEqual(Pattern("/a/<int:x>/<path:y>").names(), ["x", "y"])

    def test_weights(self):
        patterns = ["/<path:p>", "/<x>", "/<word:x>", "/<int:x>", "/a"]
        weights = [Pattern(text).weight() for text in patterns]
        self.assertEqual(weights, sorted(weights))
        self.assertEqual(Pattern("/a/<int:x>").weight(), (4, 3))

    def test_build(self):
        pattern = Pattern("/u/<int:id>/<name>/<path:rest>")
        self.assertEqual(pattern.build({"id": 5, "name": "a/b c", "rest": "x/y z"}), "/u/5/a%2Fb%20c/x/y%20z")

    def test_build_checks_values(self):
        with self.assertRaisesRegex(PatternError, "id is missing"):
            Pattern("/<int:id>").build({})
        with self.assertRaisesRegex(PatternError, "id = x is no int"):
            Pattern("/<int:id>").build({"id": "x"})

    def test_what_was_built_matches(self):
        pattern, values = Pattern("/<a>/<word:b>"), {"a": "50% é?", "b": "x-1"}
        self.assertEqual(pattern.match(pattern.build(values)), values)


class QueryTest(unittest.TestCase):
    def test_encode(self):
        self.assertEqual(encode("a b/é~"), "a%20b%2F%C3%A9~")
        self.assertEqual(encode("a/b c", safe="/"), "a/b%20c")

    def test_decode(self):
        self.assertEqual(decode("a%20b%2f%C3%A9"), "a b/é")
        self.assertEqual(decode("100%"), "100%")
        self.assertEqual(decode("%zz%4"), "%zz%4")
        self.assertEqual(decode("%ff"), "\ufffd")

    def test_plus_signs(self):
        self.assertEqual([decode("a+b"), decode("a+b", plus=True)], ["a+b", "a b"])

    def test_parse_query(self):
        self.assertEqual(parse_query("a=1&b=x+y&a=2&c&=3&d="), {"a": ["1", "2"], "b": ["x y"], "c": [""], "d": [""]})
        self.assertEqual(parse_query(""), {})

    def test_values_may_hold_equal_signs(self):
        self.assertEqual(parse_query("a=b=c"), {"a": ["b=c"]})

    def test_write_query(self):
        self.assertEqual(write_query({"a": [1, "x y"], "b": None, "c&": "="}), "a=1&a=x%20y&c%26=%3D")

    def test_split_url(self):
        self.assertEqual(split_url("/a?b=1#c?d"), ("/a", "b=1", "c?d"))
        self.assertEqual(split_url("/a"), ("/a", "", ""))
