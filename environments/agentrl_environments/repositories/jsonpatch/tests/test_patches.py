import unittest

from jsonpatch import PatchError, PointerError, TestFailed, apply, diff, invert


def one(document, **operation):
    origin = operation.pop("origin", None)
    if origin is not None:
        operation["from"] = origin
    return apply(document, [operation])


class ApplyTest(unittest.TestCase):
    def test_add_to_a_dict(self):
        self.assertEqual(one({"a": 1}, op="add", path="/b", value=[2]), {"a": 1, "b": [2]})
        self.assertEqual(one({"a": 1}, op="add", path="/a", value=2), {"a": 2})

    def test_add_to_a_list(self):
        self.assertEqual(one([1, 3], op="add", path="/1", value=2), [1, 2, 3])
        self.assertEqual(one([1], op="add", path="/-", value=2), [1, 2])
        self.assertEqual(one([1], op="add", path="/1", value=2), [1, 2])

    def test_add_behind_the_end(self):
        with self.assertRaisesRegex(PointerError, "/2 lies behind the end"):
            one([1], op="add", path="/2", value=2)

    def test_add_to_nothing(self):
        with self.assertRaises(PointerError):
            one({"a": 1}, op="add", path="/b/c", value=2)
        with self.assertRaisesRegex(PointerError, "nothing can be added at /a/b"):
            one({"a": 1}, op="add", path="/a/b", value=2)

    def test_add_the_document(self):
        self.assertEqual(one({"a": 1}, op="add", path="", value=3), 3)

    def test_remove(self):
        self.assertEqual(one({"a": 1, "b": 2}, op="remove", path="/a"), {"b": 2})
        self.assertEqual(one([1, 2, 3], op="remove", path="/1"), [1, 3])
        self.assertIsNone(one([1], op="remove", path=""))

    def test_remove_what_is_not_there(self):
        for path in ("/b", "/a/0", "/a/-"):
            with self.subTest(path), self.assertRaises(PointerError):
                one({"a": []}, op="remove", path=path)

    def test_replace(self):
        self.assertEqual(one({"a": [1, 2]}, op="replace", path="/a/1", value=3), {"a": [1, 3]})
        self.assertEqual(one({"a": 1}, op="replace", path="/a", value=None), {"a": None})
        self.assertEqual(one(1, op="replace", path="", value=2), 2)

    def test_replace_what_is_not_there(self):
        with self.assertRaises(PointerError):
            one({}, op="replace", path="/a", value=1)

    def test_move(self):
        self.assertEqual(one({"a": {"b": 1}, "c": {}}, op="move", origin="/a/b", path="/c/d"), {"a": {}, "c": {"d": 1}})
        self.assertEqual(one([1, 2, 3], op="move", origin="/0", path="/2"), [2, 3, 1])

    def test_move_into_itself(self):
        with self.assertRaisesRegex(PatchError, "into itself"):
            one({"a": {"b": 1}}, op="move", origin="/a", path="/a/c")
        self.assertEqual(one({"a": 1}, op="move", origin="/a", path="/a"), {"a": 1})

    def test_copy(self):
        self.assertEqual(one({"a": [1]}, op="copy", origin="/a", path="/b"), {"a": [1], "b": [1]})

    def test_copies_do_not_share(self):
        patch = [{"op": "copy", "from": "/a", "path": "/b"}, {"op": "add", "path": "/b/-", "value": 2}]
        self.assertEqual(apply({"a": [1]}, patch), {"a": [1], "b": [1, 2]})

    def test_test(self):
        self.assertEqual(one({"a": 1}, op="test", path="/a", value=1.0), {"a": 1})
        with self.assertRaisesRegex(TestFailed, "another value at /a"):
            one({"a": 1}, op="test", path="/a", value=True)

    def test_operations_that_cannot_be_read(self):
        for operation in (
            {"op": "jump", "path": ""},
            {"path": "/a"},
            {"op": "add", "path": "/a"},
            {"op": "move", "path": ""},
        ):
            with self.subTest(operation), self.assertRaises(PatchError):
                apply({}, [operation])

    def test_the_original_stays(self):
        document = {"a": [1]}
        apply(document, [{"op": "add", "path": "/a/-", "value": 2}])
        self.assertEqual(document, {"a": [1]})

    def test_operations_follow_each_other(self):
        patch = [
            {"op": "add", "path": "/a", "value": []},
            {"op": "add", "path": "/a/0", "value": 2},
            {"op": "test", "path": "/a/0", "value": 2},
            {"op": "replace", "path": "/a/0", "value": 3},
        ]
        self.assertEqual(apply({}, patch), {"a": [3]})


class RoundTripTest(unittest.TestCase):
    PAIRS = (
        ({}, {"a": 1}),
        ({"a": [1, 2, 3], "b": {"c": 1}}, {"a": [3], "b": {"d": [1]}}),
        ([1, [2, 3], 4], [[2], 4, 5, 6]),
        ({"x/y": 1, "~": [True]}, {"x/y": [1], "~": [1]}),
        ([], {"a": None}),
    )

    def test_a_difference_leads_from_one_to_the_other(self):
        for before, after in self.PAIRS:
            with self.subTest(before):
                self.assertEqual(repr(apply(before, diff(before, after))), repr(after))

    def test_an_inverse_leads_back(self):
        for before, after in self.PAIRS:
            with self.subTest(before):
                patch = diff(before, after)
                self.assertEqual(apply(after, invert(before, patch)), before)

    def test_inverse_operations(self):
        patch = [{"op": "add", "path": "/a/-", "value": 1}, {"op": "test", "path": "", "value": {"a": [0, 1]}}]
        self.assertEqual(invert({"a": [0]}, patch), [{"op": "remove", "path": "/a/1"}])
        self.assertEqual(
            invert({"a": 1}, [{"op": "add", "path": "/a", "value": 2}]),
            [
                {"op": "replace", "path": "/a", "value": 1},
            ],
        )

    def test_what_has_no_inverse(self):
        with self.assertRaisesRegex(PatchError, "cannot invert copy"):
            invert({"a": 1}, [{"op": "copy", "from": "/a", "path": "/b"}])
