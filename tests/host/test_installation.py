"""Commands that install more of this agentrl name its checkout or wheel, never the bare name on the public index."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.host import installation

ROOT = Path(__file__).parents[2]


def test_the_command_installs_from_this_checkout() -> None:
    assert installation.install_command("train", "ray") == f"pip install '{ROOT}[train,ray]'"


def test_a_command_of_an_installed_wheel_names_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return '{"url": "file:///srv/agentrl_kit-0.1.0-py3-none-any.whl", "archive_info": {}}'

    monkeypatch.setattr(installation, "_PACKAGE", tmp_path / "site-packages/agentrl")
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: Distribution())
    installation._source.cache_clear()  # pyright: ignore[reportPrivateUsage]
    try:
        assert installation.install_command("train") == "pip install '/srv/agentrl_kit-0.1.0-py3-none-any.whl[train]'"
    finally:
        installation._source.cache_clear()  # pyright: ignore[reportPrivateUsage]


def test_files_of_the_other_project_are_named(tmp_path: Path) -> None:
    package = tmp_path / "site-packages/agentrl"
    (package / "agents").mkdir(parents=True)
    assert installation.other_project(package) == ""
    (package / "agents/deep_q_network.py").write_text("")
    assert installation.other_project(package).startswith(str(tmp_path))


def test_import_refuses_to_run_on_them(tmp_path: Path) -> None:
    code = "from agentrl.host import installation as i\n"  # the package is loaded: run its body again
    code += "i.other_project = lambda *_: '/site/AgentRL'\nimport importlib, agentrl\nimportlib.reload(agentrl)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "ImportError: files of another project named agentrl are installed here (/site/AgentRL)" in done.stderr


def test_nothing_that_we_show_installs_by_the_bare_name() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    shown = [file for file in files if file.endswith((".py", ".md", ".in", ".toml", ".sh", ".ipynb", "Dockerfile"))]
    bare = re.compile(r"""pip install[^\n]*['" ]agentrl(-kit)?(\[|['"\s]|$)|dependencies = \["agentrl\b(?!-kit)""")
    found = [
        file
        for file in shown
        if not file.startswith(("tests/", "CHANGELOG")) and bare.search((ROOT / file).read_text())
    ]
    assert found == []
