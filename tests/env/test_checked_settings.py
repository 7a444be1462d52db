"""A setting of a wrong kind is named where it is given: field, value and mend, and no episode begins with it."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from agentrl.env import EpisodeLimits, ToolEnv
from agentrl.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value", "mend"),
    [
        ("structural_retries", "2", "whole number from 0"),
        ("content_retries", -1, "whole number from 0"),
        ("content_retries", 2.0, "whole number from 0"),
        ("structural_retries", True, "whole number from 0"),
        ("structural_penalty", math.nan, "finite number from 0"),
        ("structural_penalty", math.inf, "finite number from 0"),
        ("content_penalty", "0.5", "finite number from 0"),
        ("content_penalty", -1.0, "finite number from 0"),
        ("content_penalty", True, "finite number from 0"),
        ("mask_structural", "false", "true or false"),
        ("mask_content", 1, "true or false"),
    ],
)
def test_a_parse_policy_names_what_is_wrong_with_it(field: str, value: Any, mend: str) -> None:
    class Env(ToolEnv):
        def prompt(self, task: Any) -> str:
            return "Go."

        def grade(self) -> float:
            return 0.0

    with pytest.raises(ConfigError, match=rf"^parse_policy\.{field} = {re.escape(repr(value))}: give .*{mend}"):
        Env(parse_policy={field: value})
    Env(parse_policy={"structural_retries": 0, "content_penalty": 1, "mask_content": True})


@pytest.mark.parametrize("value", [True, math.nan, 0, -1, "8"])
def test_limits_are_numbers_above_0(value: Any) -> None:
    for name in ("turns", "tokens", "seconds", "tool_seconds"):
        with pytest.raises(ConfigError, match=rf"^limits\.{name} = "):
            EpisodeLimits(**{name: value})
