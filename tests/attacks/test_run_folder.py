"""A run's folder is its owner's alone: transcripts, checkpoints, logs, and what the next start runs as code."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl.config import RunConfig, parse
from agentrl.run.run_folder import RunDir
from agentrl.run.scratch_space import ScratchSpace
from attacks.other_user import OtherUser

CONFIG: RunConfig = parse({"model": "agentrl/tiny-coder", "env": {"id": "agentrl/TinyCoder-v0"}})
LOOKS = """if True:
    import os, sys
    for place, _, files in os.walk(sys.argv[1], onerror=lambda error: print("refused", error.filename)):
        print("listed", place, files)
    for name in sys.argv[2:]:
        for mode in ("rb", "ab"):
            try:
                open(os.path.join(sys.argv[1], name), mode)
                print("opened", name, mode)
            except PermissionError:
                pass
"""


@contextmanager
def umask(mask: int) -> Generator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def seen_by(other: OtherUser, run: Path) -> list[str]:
    names = [str(path.relative_to(run)) for path in run.rglob("*")]
    assert {"config.json", "store.sqlite", "logs", "checkpoints"} <= {*names}
    return other.run(LOOKS, run, *names).stdout.splitlines()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.other_user
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("before", [None, 0o777, 0o755], ids=["new", "there and open", "there"])
def test_a_new_run_is_closed_to_others(other_user: OtherUser, mask: int, before: int | None) -> None:
    with other_user.folder() as place, umask(mask):
        out = place / "runs" / "first"
        if before is not None:
            out.mkdir(parents=True)
            out.chmod(before)
        run = RunDir.create(out, CONFIG)
        (run.logs / "engine-0.log").write_text("what it said")
        place.joinpath("runs").chmod(0o755)
        assert mode(out) == 0o700
        assert seen_by(other_user, out) == [f"refused {out}"]


@pytest.mark.other_user
def test_a_run_of_before_is_closed_when_it_goes_on_and_says_so(
    other_user: OtherUser, capsys: pytest.CaptureFixture[str]
) -> None:
    with other_user.folder() as place:
        run = RunDir.create(place / "run", CONFIG)
        run.path.chmod(0o755)
        assert f"listed {run.logs} []" in seen_by(other_user, run.path), "it was open"
        with run.lock():
            assert seen_by(other_user, run.path) == [f"refused {run.path}"]
        assert f"{run.path} was open to other users (mode 755): it is yours alone now" in capsys.readouterr().err
        with run.lock():
            assert capsys.readouterr().err == ""


PLANTS = """if True:
    import os, sys
    place, ours = sys.argv[1:]
    for name in ("pipe", "bytes"):
        folder = os.path.join(place, f"agentrl-{ours}-{name}")
        os.mkdir(folder)
    os.mkfifo(os.path.join(place, f"agentrl-{ours}-pipe", "owner"))
    open(os.path.join(place, f"agentrl-{ours}-bytes", "owner"), "wb").write(bytes([255]))
"""


@pytest.mark.other_user
def test_scratch_that_somebody_else_planted_holds_up_no_start(other_user: OtherUser) -> None:
    """Named as ours: one whose owner is said by a pipe, which nobody writes, and one that no text is in."""
    with other_user.folder() as place, umask(0o077):
        shared = place / "shm"
        shared.mkdir()
        shared.chmod(0o1777)
        done = other_user.run(PLANTS, shared, os.getuid())
        assert done.returncode == 0, done.stderr
        run = RunDir.create(place / "run", CONFIG.model_copy(update={"scratch_dir": str(shared)}))
        made = threading.Event()

        def starts() -> None:
            with run.lock() as lock, ScratchSpace(run).owned(lock):
                made.set()

        thread = threading.Thread(target=starts, daemon=True)
        thread.start()
        assert made.wait(60), "it waits for somebody else's pipe"
        thread.join(60)
        assert len([*shared.iterdir()]) == 2, "and removes nothing that is not its own"


def test_a_folder_that_cannot_be_closed_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may keep no modes, or the folder be another's."""
    run = RunDir.create(tmp_path / "run", CONFIG)
    run.path.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "chmod", lambda *_, **__: None)
        with run.lock():
            assert f"warning: other users of this machine can read {run.path} (mode 755)" in capsys.readouterr().err

    def refuses(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuses)
    with run.lock():
        assert f"warning: other users of this machine can read {run.path} (mode 755)" in capsys.readouterr().err
