"""What `docs/how-to/cluster.md` tells a new user to type is typed, word for word, in namespaces of their own: its
ports, its processes and its temporary files are nobody else's, so that even `ray stop` finds only what the page has
started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from store.server import programs

ROOT = Path(__file__).resolve().parents[2]
SECTION = "## Try it on one machine"
BLOCK = re.compile(r"^```(?:sh|text)\n(.*?)^```$", re.M | re.S)
DEADLINE_S = 500

AS_POSTGRES = "setpriv --reuid=postgres --regid=postgres --clear-groups" if os.geteuid() == 0 else ""
SUDO = f'#!/bin/sh\n[ "$1 $2" = \'-u postgres\' ] || exit 64\nshift 2\nPGUSER=postgres exec {AS_POSTGRES} "$@"\n'
"""Nobody types a password here: it becomes the user that Debian's package makes, and nothing else."""

INSTALLED = """
mkdir /run/postgresql /run/data
chown {user} /run/postgresql /run/data
cd /
{become} {programs}/initdb -D /run/data -U postgres --auth-local=trust --auth-host=scram-sha-256 -N -E UTF8
{become} {programs}/pg_ctl -D /run/data -w -l /run/data/log -o '-k /run/postgresql -c fsync=off' start
cd {folder}
"""
"""A server as `apt-get install postgresql` leaves it: at its usual port and socket, with a password over TCP."""


def typed() -> str:
    """The blocks of the section, as they stand on the page."""
    page = (ROOT / "docs" / "how-to" / "cluster.md").read_text()
    section = page.partition(f"{SECTION}\n")[2].partition("\n## ")[0]
    return "".join(BLOCK.findall(section))


def test_the_page_starts_two_nodes_and_the_run_that_is_there() -> None:
    """What follows is of use only if these lines are found; pages change."""
    lines = typed().splitlines()
    assert [line.split("ray ")[1].split()[:2] for line in lines if " ray start" in line] == [
        ["start", "--head"],
        ["start", "--address=127.0.0.1:6379"],
    ]
    assert any(line.startswith("agentrl train examples/cluster/run.toml ") for line in lines)
    assert lines[-1] == "ray stop"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.ray
@pytest.mark.postgres
@pytest.mark.bubblewrap
def test_a_new_user_who_types_what_the_page_says_has_a_run_on_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    sudo = tmp_path / "bin" / "sudo"
    sudo.parent.mkdir()
    sudo.write_text(SUDO)
    sudo.chmod(0o755)
    user = "postgres" if AS_POSTGRES else str(os.geteuid())
    server = INSTALLED.format(become=AS_POSTGRES, user=user, programs=programs(), folder=tmp_path)
    script = f"set -eu\n{server}\n{typed()}\n! pgrep -x 'raylet|gcs_server'\n"
    path = os.pathsep.join((str(sudo.parent), str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {"PATH": path, "HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [*_alone(tmp_path), "bash", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 8, "a run of eight steps"
    address = (tmp_path / "runs/first/store.address").read_text()
    assert "postgresql://agentrl@127.0.0.1/agentrl" in address, "the store is the page's server"


def _alone(folder: Path) -> list[str]:
    """What runs a command with a network, processes and temporary files of its own; of this machine it may write only
    `folder`."""
    names = ("pid", "net", "ipc", "uts")
    found = ["bwrap", *(f"--unshare-{name}" for name in names), "--hostname", "localhost", "--die-with-parent"]
    found += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for place in ("/tmp", "/dev/shm", "/run"):
        found += ["--tmpfs", place]
    found += ["--bind", str(folder), str(folder), "--chdir", str(folder)]
    return [*found, *(["--cap-add", "ALL"] if os.geteuid() == 0 else [])]
