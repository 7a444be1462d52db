"""What of /usr a box sees: a made-up tree with an interpreter in /usr/local, and real boxes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from agentrl.protocols import SandboxSpec
from agentrl.sandbox.bubblewrap import shared_host
from agentrl.sandbox.bubblewrap.backend import Bubblewrap


def tree(usr: Path, *paths: str) -> None:
    for path in paths:
        (usr / path).parent.mkdir(parents=True, exist_ok=True)
        (usr / path).write_text("")


@pytest.fixture
def usr(tmp_path: Path) -> Path:
    tree(
        tmp_path,
        "bin/env",
        "src/linux/a.c",
        "local/bin/docker",
        "local/share/gold.txt",
        "lib/python3/dist-packages/x.py",
    )
    return tmp_path


def shown(usr: Path, packages: list[Path]) -> set[str]:
    without = shared_host.hidden(usr, packages)
    files = [path for path in usr.rglob("*") if path.is_file() or path.is_symlink()]
    return {str(path.relative_to(usr)) for path in files if not {path, *path.parents} & {*without}}


def test_nothing_of_local_and_src_is_shown(usr: Path) -> None:
    tree(usr, "bin/python3")
    assert shown(usr, []) == {"bin/env", "bin/python3", "lib/python3/dist-packages/x.py"}


def test_of_local_the_interpreter_is_shown_and_no_package(usr: Path) -> None:
    library = "local/lib/python3.11"
    tree(
        usr,
        "local/bin/python3.11",
        f"{library}/os.py",
        f"{library}/site-packages/agentrl/gold.py",
        "local/lib/other.so",
    )
    tree(usr, "local/lib/libpython3.11.so.1.0", "local/bin/pip")
    (usr / "local/bin/python3").symlink_to("python3.11")
    python = {"local/bin/python3", "local/bin/python3.11", f"{library}/os.py", "local/lib/libpython3.11.so.1.0"}
    assert shown(usr, []) == python | {"bin/env", "lib/python3/dist-packages/x.py"}


def test_packages_in_which_solutions_can_be_read_are_hidden(usr: Path) -> None:
    mine = usr / "lib/python3/dist-packages/agentrl"
    tree(usr, "lib/python3/dist-packages/agentrl/gold.py")
    assert shown(usr, [mine, Path("/elsewhere/agentrl")]) == {"bin/env", "lib/python3/dist-packages/x.py"}


def test_the_packages_of_environments_are_known() -> None:
    names = {path.name for path in shared_host._packages()}
    assert {"agentrl", "agentrl_environments", "agentrl_tools"} <= names


@pytest.fixture
async def backend() -> AsyncGenerator[Bubblewrap]:
    backend = Bubblewrap()
    yield backend
    await backend.aclose()


def a_shown_folder() -> Path:
    return next(path for path in sorted(Path("/usr/share").iterdir()) if path.is_dir() and any(path.iterdir()))


@pytest.mark.bubblewrap
@pytest.mark.parametrize("how", ["mounted", "in a namespace", "bound"])
async def test_a_box_sees_what_commands_need(how: str, backend: Bubblewrap, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of /usr/share stands for a package that holds solutions."""
    secret = a_shown_folder()
    own = shared_host.hidden()
    monkeypatch.setattr(shared_host, "hidden", lambda: [*own, secret])
    if how == "in a namespace":
        monkeypatch.setattr("os.geteuid", lambda: 12345)
    if how == "bound":
        monkeypatch.setattr(shared_host.Overlay, "mount", lambda *_: False)
    box = await backend.create(SandboxSpec())
    looks = f"find /usr/local /usr/src {secret} -mindepth 1 2>/dev/null; python3 -c 'print(1)'; mount | grep ' /usr '"
    found, *mounts = (await box.exec(["sh", "-c", looks])).stdout.decode().splitlines()
    assert found == "1", f"{found} is seen"
    assert any("type overlay" in mount for mount in mounts) is (how != "bound"), mounts
    limits = box.spec.limits
    files = await box.exec(["sh", "-c", "df --output=itotal /dev/shm | tail -1; echo x > /dev/shm/kept"])
    assert int(files.stdout) <= max(1024, limits.disk_bytes >> 12), "the number of files is not bounded"
    assert (await box.exec(["cat", "/dev/shm/kept"])).stdout == b"x\n"
    await box.restore(await box.snapshot())
    assert (await box.exec(["ls", "/dev/shm"])).stdout == b""
