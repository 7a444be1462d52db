"""A warning of ours is one line; those of other packages are left as Python shows them."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import warnings, agentrl
from agentrl.host.user_warnings import AgentRLWarning, warn
for _ in range(2):
    warn("the box has no walls")
warnings.warn("of another package")
warnings.simplefilter("error", AgentRLWarning)
try:
    warn("now an error")
except AgentRLWarning as error:
    print(error)
"""


def test_ours_is_one_line_once_and_can_be_made_an_error() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    first, *others = done.stderr.splitlines()
    assert first == "agentrl: warning: the box has no walls"
    assert "no walls" not in "".join(others) and "UserWarning: of another package" in others[0]
    assert done.stdout == "now an error\n"
