"""What the scripts of a container's box do, in each shell that an image may have, beside a `/proc` of our own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from agentrl.sandbox.docker.shell_scripts import MARK, SWEEP_OTHERS

SHELLS = {"dash": ["dash"], "bash": ["bash"], "busybox": ["busybox", "sh"]}
PROCESSES = {  # environment and arguments
    1: (f"A=1\0{MARK}=spared\0", "sleep\x005\0"),
    2: (f"{MARK}=ended\0", "sleep\x006\0"),
    3: ("", "cat\0"),  # `env -i`
    4: ("", ""),  # in the middle of `execve`
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_sweep_spares_a_process_in_the_middle_of_execve_until_its_last_pass(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    for pid, (environ, arguments) in PROCESSES.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_text(environ)
        (tmp_path / str(pid) / "cmdline").write_text(arguments)
    script = SWEEP_OTHERS.format(pattern=f"{MARK}=spared").replace("/proc", str(tmp_path))
    script = 'kill() { echo "pass $pass: $2"; }\n' + script
    done = subprocess.run([*SHELLS[shell], "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:-1] == [
        *(f"pass {number}: {pid}" for number in (1, 2) for pid in (2, 3)),
        *(f"pass 3: {pid}" for pid in (2, 3, 4)),
    ]
    assert done.stderr == ""
