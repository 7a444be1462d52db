"""Results of tools as the model reads them: JSON as a user expects, pictures as pictures, and no lost episode."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
from collections import Counter, OrderedDict
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
from each_case import each_case
from pydantic import BaseModel, ConfigDict, Field, RootModel, computed_field, field_serializer

import agentrl
from agentrl import notices
from agentrl.env import spaces
from agentrl.env.image_parts import image_part
from agentrl.env.tools.tool_results import as_result
from agentrl.errors import ToolError


class Model(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    x: Any = 1


class Account(BaseModel):
    name: str = "a"
    password: str = Field(default="secret", exclude=True)
    opened: datetime.date = datetime.date(2024, 5, 6)
    extra: Any = None

    @computed_field
    def label(self) -> str:
        return self.name.upper()

    @field_serializer("name")
    def quoted(self, name: str) -> str:
        return f"<{name}>"


class Numbers(RootModel[list[int]]):
    pass


ACCOUNT = {"name": "<a>", "opened": "2024-05-06", "extra": None, "label": "A"}


@dataclasses.dataclass
class Point:
    at: Any


class Color(enum.Enum):
    RED = "r"


class Word(enum.StrEnum):
    YES = "yes"


class Opaque:
    pass


class Broken:
    def __str__(self) -> str:
        raise ValueError


RESULTS: list[tuple[Any, Any]] = [
    ([Model()], [{"x": 1}]),
    (Account(), ACCOUNT),
    ([Account()], [ACCOUNT]),
    (Point(Account()), {"at": ACCOUNT}),
    ([Numbers([1, 2])], [[1, 2]]),
    ({"a": Account(extra=Opaque())}, {"a": {"name": "a", "opened": "2024-05-06", "extra": f"<{__name__}.Opaque>"}}),
    ({"m": Model(x=Point(Color.RED))}, {"m": {"x": {"at": "r"}}}),
    (Model(x=Opaque()), {"x": f"<{__name__}.Opaque>"}),
    (Point(np.int64(5)), {"at": 5}),
    (Color.RED, "r"),
    (np.float32(0.5), 0.5),
    ({"ok": np.bool_(False), "many": np.array([[1, 2]])}, {"ok": False, "many": [[1, 2]]}),
    ({3, 1, 2}, [1, 2, 3]),
    ({"b", 1, None}, [1, "b", None]),
    ({1: "a", None: "b", 0.5: "c"}, {"1": "a", "null": "b", "0.5": "c"}),
    ({np.int64(1): "a", (1, 2): "b", Color.RED: "c"}, {"1": "a", "(1, 2)": "b", "r": "c"}),
    ({datetime.date(2024, 5, 6): datetime.datetime(2024, 5, 6, 7)}, {"2024-05-06": "2024-05-06T07:00:00"}),
    ([b"caf\xc3\xa9 \xff", "\udcff"], ["café \\xff", "\\udcff"]),
    ([Decimal("1.50"), PurePosixPath("a/b")], ["1.50", "a/b"]),
    (OrderedDict(a=Counter("aab")), {"a": {"a": 2, "b": 1}}),
    ((at for at in range(3)), [0, 1, 2]),
    ({"a": 1}.items(), [["a", 1]]),
    ([Broken()], [f"<{__name__}.Broken>"]),
]


@each_case(("value", "expected"), RESULTS)
def test_a_result_is_the_json_that_a_user_expects(value: Any, expected: Any) -> None:
    content = as_result(value, "look").content
    content.encode()
    assert json.loads(content) == expected


def test_a_result_of_another_type_is_named_with_its_tool_and_a_text_stays_text() -> None:
    assert as_result(Word.YES).content == "yes"
    as_result(object(), "strange")
    assert any("'strange' returned a object" in kind for _, kind in notices.OF_PROCESS.totals())


def test_a_result_within_itself_or_without_an_end_is_cut() -> None:
    endless: list[Any] = []
    endless += [endless, endless]
    assert "nested too deeply" in as_result(endless).content
    assert len(as_result(iter(int, 1)).content) < 1_000_000


PIXELS = np.zeros((32, 32, 3), dtype=np.uint8)
PARTS = [{"type": "text", "text": "the page "}, image_part(PIXELS), {"type": "text", "text": "ends"}]


class Screen(agentrl.ToolEnv):
    observation_space = spaces.Messages(max_images=1)

    def prompt(self, task: Any) -> str:
        return "look"

    def grade(self) -> float:
        return 0.0

    @agentrl.tool
    def screenshot(self, broken: bool = False):
        """Look."""
        return [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}] if broken else PARTS


class Blind(Screen):
    observation_space = spaces.Messages()


def test_a_picture_is_shown_where_it_stood_or_refused_by_name() -> None:
    picture = PARTS[1]["image_url"]["url"]  # type: ignore[index]
    for dialect, before in (("hermes", ""), ("react", "Observation: "), ("json", "Result of screenshot: ")):
        env = Screen(tool_format=dialect)
        env.reset(seed=0)
        (answer,) = env.step(env.call("screenshot"))[0]
        assert answer["content"] == f"{before}the page ends"
        assert answer["images"] == [{"at": len(f"{before}the page "), "url": picture}]  # type: ignore[typeddict-item]
    (answer,) = env.step(env.call("screenshot", broken=True))[0]
    assert "nothing is fetched" in answer["content"] and "images" not in answer
    blind = Blind()
    blind.reset(seed=0)
    (answer,) = blind.step(blind.call("screenshot"))[0]
    assert "Messages(max_images=1)" in answer["content"] and "base64" not in answer["content"]
    with pytest.raises(ToolError, match="look returned a picture that cannot be shown"):
        as_result([{"type": "image_url", "image_url": {}}], "look")
