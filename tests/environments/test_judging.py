"""The judge: what the tests see of an object in another box, and what a hostile one cannot do to them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

import pytest
from each_case import each_case
from hypothesis import given
from hypothesis import strategies as st

from agentrl.sandbox import backend
from agentrl_environments import judging
from agentrl_environments.judging import SourceJudge, Verdicts

sys.path.append(str(judging.BOXED))
import wire  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.bubblewrap

SOURCE = """
from fractions import Fraction

class Shelf:
    limit = 2
    def __init__(self, items=()):
        self.items = list(items)
    def add(self, item, *, times=1):
        if len(self.items) + times > self.limit + 2:
            raise Full(self, times)
        self.items += [item] * times
        return self
    def each(self, function):
        return [function(item) for item in self.items]
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, index): return self.items[index]
    def __setitem__(self, index, item): self.items[index] = item
    def __contains__(self, item): return item in self.items
    def __eq__(self, other): return isinstance(other, Shelf) and self.items == other.items
    def __lt__(self, other): return len(self.items) < len(other.items)
    def __add__(self, other): return Shelf(self.items + other.items)
    def __rmul__(self, number): return Shelf(self.items * number)
    def __str__(self): return "/".join(map(str, self.items))
    def __enter__(self): self.items.append("in"); return self
    def __exit__(self, kind, error, traceback):
        self.items.append("out" if kind is None else kind.__name__)
        return kind is ValueError

class Full(LookupError):
    def __init__(self, shelf, times):
        super().__init__(f"no room for {times}")
        self.times = times
        self.shelf = shelf

def echo(value): return value
def half(n): return Fraction(n, 2)
def count():
    yield from "abc"
"""

TESTS = """
import unittest
from decimal import Decimal
from fractions import Fraction
import shop
from shop import Full, Shelf, echo

class Seen(unittest.TestCase):
    def test_values(self):
        groups = ([1, (2, {3})], {"a": {4: b"x"}}, frozenset({5}))
        for value in (None, True, 1, 1.5, "é", Decimal("1.50"), 10**30, *groups):
            self.assertEqual(repr(echo(value)), repr(value))
        self.assertEqual(shop.half(3), Fraction(3, 2))
        self.assertEqual(list(shop.count()), ["a", "b", "c"])
    def test_objects(self):
        shelf = Shelf(["a"])
        self.assertEqual(shelf.add("b", times=2).items, ["a", "b", "b"])
        self.assertEqual([len(shelf), shelf[1], "b" in shelf, str(shelf)], [3, "b", True, "a/b/b"])
        self.assertEqual(list(shelf), ["a", "b", "b"])
        shelf[0] = "c"
        shelf.limit = 1
        self.assertEqual([shelf.items[0], shelf.limit, Shelf.limit], ["c", 1, 2])
        self.assertEqual([(shelf + shelf)[5], (2 * Shelf([1])).items], ["b", [1, 1]])
    def test_identity_and_equality(self):
        shelf = Shelf([1])
        self.assertIs(shelf.add(2), shelf)
        self.assertIs(shelf == Shelf([1, 2]), True)
        self.assertIs(shelf == Shelf([1]), False)
        self.assertIs(Shelf([1]) < shelf, True)
    def test_exceptions(self):
        with self.assertRaisesRegex(Full, "no room for 9") as caught:
            Shelf().add(1, times=9)
        self.assertEqual([caught.exception.times, len(caught.exception.shelf)], [9, 0])
        with self.assertRaises(LookupError):
            Shelf().add(1, times=9)
        with self.assertRaises(IndexError):
            Shelf()[0]
    def test_callbacks(self):
        seen = []
        self.assertEqual(Shelf([1, 2]).each(lambda item: seen.append(item) or item * 10), [10, 20])
        self.assertEqual(seen, [1, 2])
        self.assertEqual(Shelf([-1, 2]).each(abs), [1, 2])
        with self.assertRaises(ZeroDivisionError):
            Shelf([0]).each(lambda item: 1 // item)
        self.assertEqual(Shelf([3]).each(lambda item: len(Shelf([item] * item))), [3])
    def test_contexts(self):
        with Shelf() as shelf:
            pass
        with self.assertRaises(ValueError), shelf:
            raise ValueError("the repository asks to swallow it")
        self.assertEqual(shelf.items, ["in", "out", "in", "ValueError"])
        with self.assertRaises(KeyError), shelf:
            raise KeyError("x")

class Wrong(unittest.TestCase):
    def test_plain_data_is_never_an_object(self):
        self.assertEqual(Shelf([1]), [1])
    def test_failing(self):
        self.assertEqual(echo(1), 2)
    def test_subtests(self):
        for n in range(3):
            with self.subTest(n):
                self.assertEqual(echo(n), 1)
    @unittest.skip("later")
    def test_skipped(self):
        pass
    @unittest.expectedFailure
    def test_expected_to_fail(self):
        self.assertEqual(echo(1), 2)
    def test_missing(self):
        shop.nothing()
"""


@pytest.fixture
async def judge() -> AsyncIterator[SourceJudge]:
    boxes = backend("bubblewrap")
    yield SourceJudge(boxes)
    await boxes.aclose()


async def judged(judge: SourceJudge, source: str, tests: str = TESTS) -> Verdicts:
    return await judge.run({"shop/__init__.py": source.encode()}, {"test_shop.py": tests.encode()})


async def test_what_tests_see_of_another_box(judge: SourceJudge) -> None:
    verdicts = await judged(judge, SOURCE)
    assert verdicts.whole
    seen = {"values", "objects", "identity_and_equality", "exceptions", "callbacks", "contexts"}
    assert verdicts.passed == {f"test_shop.Seen.test_{name}" for name in seen}, verdicts.reasons
    assert set(verdicts.reasons) == {
        f"test_shop.Wrong.test_{name}"
        for name in (
            *("plain_data_is_never_an_object", "failing", "subtests", "skipped", "expected_to_fail", "missing"),
        )
    }


async def test_sources_that_do_not_parse_fail_all_tests(judge: SourceJudge) -> None:
    assert (await judged(judge, "def f(:\n")).passed == frozenset()
    assert (await judge.run({}, {"test_shop.py": TESTS.encode()})).passed == frozenset()


@pytest.mark.parametrize(
    "source",
    [
        "import os; os._exit(0)",
        pytest.param("while True: pass", marks=pytest.mark.long),
        "import os; os.kill(0, 9)",
        "import os; os.closerange(0, 99)",
    ],
)
async def test_a_suspect_that_ends_passes_nothing_and_is_not_remembered(source: str) -> None:
    boxes = backend("bubblewrap")
    judge = SourceJudge(boxes)
    verdicts = await judged(judge, source)
    assert verdicts.passed == frozenset() and not verdicts.whole
    assert len(judge._verdicts) == 0  # pyright: ignore[reportPrivateUsage]
    await boxes.aclose()


async def test_a_suspect_that_ends_half_way_keeps_what_it_earned(judge: SourceJudge) -> None:
    tests = "import unittest, shop\nclass T(unittest.TestCase):\n"
    tests += "".join(f"    def test_{n}(self): self.assertEqual(shop.f({n}), {n})\n" for n in range(4))
    verdicts = await judged(judge, "import os\ndef f(n):\n    return n if n < 2 else os._exit(0)\n", tests)
    assert verdicts.passed == {"test_shop.T.test_0", "test_shop.T.test_1"} and not verdicts.whole


async def test_neither_tests_nor_names_reach_the_suspect(judge: SourceJudge) -> None:
    """All that a suspect can read of its world: its own folder, its arguments, its environment."""
    source = """
import os, sys
def world():
    found = [repr(sys.argv), repr(dict(os.environ))]
    for folder, _, names in os.walk("/workspace"):
        for name in names:
            found.append(folder + "/" + name + open(os.path.join(folder, name), errors="replace").read())
    return "".join(found)
"""
    tests = """
import unittest, shop
class T(unittest.TestCase):
    def test_secret_name(self):
        self.assertNotIn("secret" + "_name", shop.world())
        self.assertNotIn("assert" + "NotIn", shop.world())
        self.assertIn("def world", shop.world())
"""
    assert (await judged(judge, source, tests)).passed == {"test_shop.T.test_secret_name"}


@pytest.mark.medium
@each_case(
    "line",
    [
        '{"value": {"object": "x"}}',
        '{"value": {"builtin": "eval"}}',
        '{"value": {"class": [1, "E", [{"builtin": "SystemExit"}]]}}',
        '{"value": {"class": [1, "E", [1, 2]]}}',
        '{"value": {"callback": 0}}',
        '{"value": {"t": 1}}',
        '{"value": {"q": "1/0"}}',
        '{"raise": {}}',
        '{"raise": {"handle": 1, "parts": [{"builtin": "SystemExit"}, {"t": []}, "", {"d": []}]}}',
        '{"raise": {"handle": 1, "parts": [{"builtin": "print"}, 1, 2, 3]}}',
        '{"raise": null}',
        "[]",
        "null",
        '{"value": NaN}',
        '{"value": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"value": ' + "9" * 5000 + "}",
    ],
)
async def test_a_forged_answer_passes_nothing_and_ends_nothing(judge: SourceJudge, line: str) -> None:
    """The suspect writes the answer itself; the tests after it are still run and told of."""
    source = f"""
import gc
for item in gc.get_objects():
    if type(item).__name__ == "Channel":
        channel = item
def f():
    import os
    os.write(channel._outgoing, b'{{"answer": ' + {line!r}.encode() + b"}}\\n")
    os._exit(0)
"""
    tests = """
import unittest, shop
class T(unittest.TestCase):
    def test_1(self): self.assertEqual(shop.f(), 1)
    def test_2(self): self.assertEqual(shop.f(), 1)
class U(unittest.TestCase):
    def test_sound(self): self.assertTrue(True)
"""
    verdicts = await judged(judge, source, tests)
    assert verdicts.passed == {"test_shop.U.test_sound"}
    assert {"test_shop.T.test_1", "test_shop.T.test_2"} <= set(verdicts.reasons)


AGREEABLE = """
class Any:
    def __contains__(self, item): return True
    def __iter__(self): return iter(())
    def __enter__(self): return self
    def __exit__(self, *_): return True
    def __sub__(self, other): return 0
    __rsub__ = __abs__ = __round__ = lambda self, *_: 0
    def __eq__(self, other): return True
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __bool__(self): return True
    def __len__(self): return 3
def f(): return Any()
"""


async def test_an_object_that_says_yes_to_everything_passes_no_assertion_about_data(judge: SourceJudge) -> None:
    tests = """
import unittest, shop
class T(unittest.TestCase):
    def test_in(self): self.assertIn("a", shop.f())
    def test_almost(self): self.assertAlmostEqual(shop.f(), 3.14)
    def test_almost_swapped(self): self.assertAlmostEqual(3.14, shop.f())
    def test_almost_delta(self): self.assertAlmostEqual(shop.f(), 3.14, delta=0.1)
    def test_equal(self): self.assertEqual(shop.f(), 3)
    def test_less(self): self.assertLess(shop.f(), 3)
    def test_greater(self): self.assertGreaterEqual(3, shop.f())
    def test_count(self): self.assertCountEqual(shop.f(), [1])
    def test_with(self):
        with shop.f():
            self.assertEqual(1, 2)
    def test_with_an_error_of_the_suspect(self):
        with shop.f() as anything:
            anything.missing()
            self.assertEqual(1, 2)
"""
    verdicts = await judged(judge, AGREEABLE, tests)
    assert verdicts.whole and verdicts.passed == frozenset(), verdicts.passed


async def test_members_of_an_object_are_looked_for_by_the_judge(judge: SourceJudge) -> None:
    tests = """
import unittest
from shop import Shelf
class T(unittest.TestCase):
    def test_in(self): self.assertIn("a", Shelf(["a", "b"]))
    def test_not_in(self): self.assertNotIn("c", Shelf(["a", "b"]))
    def test_plain(self): self.assertIn("a", ["a"])
    def test_almost(self): self.assertAlmostEqual(0.1 + 0.2, 0.3)
    def test_wrong(self): self.assertIn("c", Shelf(["a", "b"]))
"""
    assert set((await judged(judge, SOURCE, tests)).reasons) == {"test_shop.T.test_wrong"}


@pytest.mark.medium
@each_case("name", ["helper.py", "helper/__init__.py", "math.py", "unittest/__init__.py", "wire.py"])
async def test_a_new_module_does_not_stand_in_front_of_a_helper_of_the_tests(judge: SourceJudge, name: str) -> None:
    """Nor of Python's own, nor of the judge's."""
    tests = """
import unittest, helper, shop, math
class T(unittest.TestCase):
    def test_wrong(self): self.assertEqual(shop.echo(1), helper.wanted(2))
    def test_root(self): self.assertEqual(shop.echo(3), math.sqrt(4))
    def test_right(self): self.assertEqual(shop.echo(2), helper.wanted(2))
"""
    sources = {"shop/__init__.py": SOURCE.encode(), name: b"def wanted(n): return 1\ndef sqrt(n): return 3\n"}
    helper = b"def wanted(n): return n\n"
    verdicts = await judge.run(sources, {"test_shop.py": tests.encode(), "helper.py": helper})
    assert verdicts.passed == {"test_shop.T.test_right"}, verdicts.reasons


def refuse(*_: Any) -> NoReturn:
    raise AssertionError("nothing here is an object")


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.fractions()
    | st.decimals(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.frozensets(st.integers())
        | st.sets(st.text())
    ),
    max_leaves=20,
)


@pytest.mark.medium
@given(PLAIN)
def test_plain_data_survives_the_wire(value: Any) -> None:
    import json

    back = wire.decode(json.loads(json.dumps(wire.encode(value, refuse))), refuse)
    assert back == value and type(back) is type(value)


def test_subclasses_do_not_travel_by_value() -> None:
    class Agreeable(int):
        pass

    class Money(Decimal):
        pass

    exported = [wire.encode(value, lambda value: {"object": 7}) for value in (Agreeable(1), Money(1), [Agreeable(1)])]
    assert exported == [{"object": 7}, {"object": 7}, [{"object": 7}]]
    assert wire.encode(Fraction(1, 3), refuse) == {"q": "1/3"}
