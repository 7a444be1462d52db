import unittest

from jsonpatch import Pointer, PointerError, diff, find, make_merge, merge, pointer, summary

DOCUMENT = {"a": [1, {"b": 2}], "": 3, "x/y": 4, "m~n": 5, "0": "zero"}


class PointerTest(unittest.TestCase):
    def test_values(self):
        for text, value in (("/a/0", 1), ("/a/1/b", 2), ("/", 3), ("/x~1y", 4), ("/m~0n", 5), ("/0", "zero")):
            with self.subTest(text):
                self.assertEqual(Pointer(text).get(DOCUMENT), value)

    def test_the_whole_document(self):
        self.assertEqual(Pointer("").get([1]), [1])

    def test_what_leads_to_nothing(self):
        for text, place in (("/z", "/z"), ("/a/5/c", "/a/5"), ("/a/-", "/a/-"), ("/0/x", "/0/x")):
            with self.subTest(text), self.assertRaisesRegex(PointerError, f"nothing at {place}$"):
                Pointer(text).get(DOCUMENT)

    def test_positions(self):
        self.assertEqual([pointer.position("0", 3), pointer.position("12", 3), pointer.position("-", 3)], [0, 12, 3])
        for part in ("01", "-1", "a", "", "1.0"):
            with self.subTest(part), self.assertRaises(PointerError):
                pointer.position(part, 3)

    def test_a_pointer_starts_with_a_slash(self):
        with self.assertRaises(PointerError):
            Pointer("a")

    def test_escapes(self):
        self.assertEqual(pointer.escape("~1/~"), "~01~1~0")
        self.assertEqual(pointer.unescape("~01~1~0"), "~1/~")

    def test_of(self):
        self.assertEqual(Pointer.of(["a/b", 0, "~"]).text, "/a~1b/0/~0")
        self.assertEqual(Pointer.of([]).text, "")

    def test_parent(self):
        self.assertEqual(Pointer("/a/b/0").parent().text, "/a/b")
        with self.assertRaises(PointerError):
            Pointer("").parent()

    def test_holds(self):
        self.assertIs(Pointer("/a").holds(Pointer("/a/b")), True)
        self.assertIs(Pointer("/a").holds(Pointer("/a")), True)
        self.assertIs(Pointer("/a").holds(Pointer("/ab")), False)
        self.assertIs(Pointer("/a/b").holds(Pointer("/a")), False)

    def test_find(self):
        self.assertEqual(find({"a": 1, "b": [1, {"c": 1.0}], "d": True}, 1), ["/a", "/b/0", "/b/1/c"])
        self.assertEqual(find([[], [[]]], []), ["/0", "/1/0"])

    def test_same(self):
        self.assertIs(pointer.same({"a": [1, 2]}, {"a": [1.0, 2]}), True)
        self.assertIs(pointer.same(True, 1), False)
        self.assertIs(pointer.same([0], [False]), False)
        self.assertIs(pointer.same({"a": 1}, {"a": 1, "b": 2}), False)
        self.assertIs(pointer.same([1], [1, 2]), False)


class DiffTest(unittest.TestCase):
    def test_nothing(self):
        self.assertEqual(diff({"a": [1]}, {"a": [1.0]}), [])

    def test_names(self):
        patch = [
            {"op": "replace", "path": "/b/c", "value": 3},
            {"op": "remove", "path": "/d"},
            {"op": "add", "path": "/e~1", "value": None},
        ]
        self.assertEqual(diff({"a": 1, "b": {"c": 2}, "d": 4}, {"a": 1, "b": {"c": 3}, "e/": None}), patch)

    def test_a_list_that_grew_in_the_middle(self):
        self.assertEqual(
            diff([1, 2, 5], [1, 2, 3, 4, 5]),
            [
                {"op": "add", "path": "/2", "value": 3},
                {"op": "add", "path": "/3", "value": 4},
            ],
        )

    def test_a_list_that_shrank(self):
        self.assertEqual(diff([1, 2, 3, 4], [1, 4]), [{"op": "remove", "path": "/2"}, {"op": "remove", "path": "/1"}])

    def test_repeated_values(self):
        self.assertEqual(diff([1, 1, 1], [1, 1]), [{"op": "remove", "path": "/2"}])

    def test_values_in_a_list(self):
        self.assertEqual(diff([1, {"a": 2}, 3], [1, {"a": 4}, 3]), [{"op": "replace", "path": "/1/a", "value": 4}])

    def test_other_kinds(self):
        self.assertEqual(diff({"a": []}, {"a": {}}), [{"op": "replace", "path": "/a", "value": {}}])
        self.assertEqual(diff(1, True), [{"op": "replace", "path": "", "value": True}])

    def test_summary(self):
        patch = diff({"a": [1, 2], "b": 1, "c": {"d": 1}}, {"a": [1], "c": {"d": 2, "e": 3}})
        counts = {"remove": 2, "replace": 1, "add": 1}
        self.assertEqual(summary(patch), {"counts": counts, "touched": ["a", "b", "c"]})
        self.assertEqual(summary([]), {"counts": {}, "touched": []})


class MergeTest(unittest.TestCase):
    def test_merge(self):
        merged = merge(
            {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}, {"a": 5, "b": {"c": None, "f": 6}, "e": None, "z": None}
        )
        self.assertEqual(merged, {"a": 5, "b": {"d": 3, "f": 6}})

    def test_merge_keeps_the_original(self):
        document = {"a": {"b": 1}}
        merge(document, {"a": {"b": 2}})
        self.assertEqual(document, {"a": {"b": 1}})

    def test_what_is_no_dict_replaces(self):
        self.assertEqual(
            [merge({"a": 1}, [1]), merge(3, {"a": {"b": None}}), merge({"a": 1}, None)], [[1], {"a": {}}, None]
        )

    def test_make_merge(self):
        before, after = {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}, {"a": 1, "b": {"c": 2, "d": 5}, "f": [None]}
        patch = {"e": None, "b": {"d": 5}, "f": [None]}
        self.assertEqual(make_merge(before, after), patch)
        self.assertEqual(merge(before, patch), after)

    def test_nulls_cannot_be_written(self):
        for after in ({"a": None}, {"a": {"b": None}}):
            with self.subTest(after), self.assertRaises(ValueError):
                make_merge({}, after)
        self.assertEqual(make_merge({"a": None}, {"a": None}), {})
