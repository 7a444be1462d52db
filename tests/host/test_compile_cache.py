from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from agentrl.host import compile_cache


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folder lies that all processes of this user have; nothing is there yet."""
    monkeypatch.delenv(compile_cache.VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"torchinductor_{os.getuid()}"


def test_all_processes_of_a_user_have_one_folder_that_is_theirs(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [compile_cache.place(Path("/else")) for _ in range(2)] == [str(shared)] * 2
    assert shared.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv(compile_cache.VARIABLE, "/named/by/its/user")
    assert compile_cache.place() == "/named/by/its/user"


@pytest.mark.parametrize("who", ["anybody", "a link", "somebody else"])
def test_a_folder_that_others_can_lay_code_in_is_not_used(who: str, shared: Path, tmp_path: Path) -> None:
    """Its name is known, so whoever is first on the machine can make it."""
    if who == "a link":
        (tmp_path / "theirs").mkdir()
        shared.symlink_to(tmp_path / "theirs")
    else:
        shared.mkdir()
        shared.chmod(0o777 if who == "anybody" else 0o755)
        if who == "somebody else":
            if os.getuid():
                pytest.skip("only root gives folders away")
            os.chown(shared, 61_000, 61_000)
    plugin = tmp_path / "plugin"
    assert compile_cache.place(plugin) == str(plugin)
    own = Path(compile_cache.place())
    assert own.parent == tmp_path and own != shared and own.stat().st_mode & 0o777 == 0o700
