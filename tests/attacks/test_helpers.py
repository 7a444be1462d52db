"""The attack suite's own parts: an attacker who could do everything, or nothing, would prove nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from attacks.other_user import OtherUser
from attacks.sockets import Listening, family, listening


@pytest.mark.other_user
def test_the_other_user_has_no_rights_of_ours(other_user: OtherUser) -> None:
    said = other_user.run("import os; print(os.getuid(), os.getgid(), os.getgroups(), sorted(os.environ))").stdout
    assert said.startswith(f"{other_user.uid} {other_user.gid} [] [")
    assert other_user.uid != os.getuid() and "HOME" not in said

    with other_user.folder() as place:
        (place / "open").write_text("for all")
        (place / "private").touch(0o600)
        read = "import sys; print(open(sys.argv[1]).read())"
        assert other_user.run(read, place / "open").stdout == "for all\n"
        assert "PermissionError" in other_user.run(read, place / "private").stderr
        assert "PermissionError" in other_user.run("import os, sys; os.unlink(sys.argv[1])", place / "open").stderr


@pytest.mark.other_user
def test_code_that_does_not_end_is_killed(other_user: OtherUser) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        other_user.run("import signal; signal.pause()", deadline_s=0.5)
    with other_user.running("print('up', flush=True); input()") as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
    assert process.returncode == -9


def test_sockets_of_a_process_and_of_its_children_are_listed(tmp_path: Path) -> None:
    code = """if True:
    import os, socket, sys
    held = [socket.create_server(("127.0.0.1", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6)]
    if os.fork() == 0:
        held[0].close(), held[1].close()
        held = [socket.socket(socket.AF_UNIX)]
        held[0].bind(sys.argv[1]), held[0].listen()
        os.write(1, b"child\\n")
    else:
        os.write(1, f"{held[0].getsockname()[1]} {held[1].getsockname()[1]}\\n".encode())
    input()
    """
    path = tmp_path / "a socket"
    process = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        lines = sorted([process.stdout.readline(), process.stdout.readline()])
        four, six = map(int, lines[0].split())
        parent, child = family(process.pid)
        assert listening([parent, child]) == [
            Listening(pid=parent, kind="tcp", host="127.0.0.1", port=four),
            Listening(pid=parent, kind="tcp", host="::1", port=six),
            Listening(pid=child, kind="unix", path=str(path)),
        ]
        process.communicate("\n\n")
    assert listening([process.pid]) == []


def test_a_connection_is_no_listening_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        mine = [one for one in listening([os.getpid()]) if one.port == server.getsockname()[1]]
        assert mine == [Listening(pid=os.getpid(), kind="tcp", host="127.0.0.1", port=server.getsockname()[1])]
