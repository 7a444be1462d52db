"""A child process that answers requests."""

from __future__ import annotations

import sys

import pytest

from agentrl.env.child_processes import Child
from agentrl.errors import EnvError

CLOSES_ITS_OUTPUT = """
import os, sys
print("{}", flush=True)
sys.stdin.readline()
os.close(1)
sys.stdin.read()
"""


def test_a_child_that_closes_its_output_and_lives_on_is_ended() -> None:
    child = Child([sys.executable, "-c", CLOSES_ITS_OUTPUT], "the judge")
    with pytest.raises(EnvError, match="the process of the judge ended with status -9"):
        child.ask({"do": "judge"}, 60.0)
    assert not child.lives
