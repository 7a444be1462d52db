"""Free memory goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
from pathlib import Path
from agentrl.host.free_memory import give_back

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

blocks = [bytearray(64_000) for _ in range(5_000)]  # small enough to come from the heap
last, blocks = blocks[-1], None  # which holds the heap's end where it is
before = held()
give_back()
print(before - held())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc keeps less, or none")
def test_what_was_freed_below_something_held_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 250  # of 305 MB
