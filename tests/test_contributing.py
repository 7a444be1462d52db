"""The recipes of CONTRIBUTING.md: a package with an environment, a sandbox, an algorithm and a tracker trains."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest

from agentrl.scaffold import new_env
from tests.test_docs import BLOCKS, ROOT
from tests.test_scaffold import run

PAGE = ROOT / "CONTRIBUTING.md"
RECIPES = [block for block in BLOCKS if block.document == PAGE]
LINKED = {ROOT / path for path in re.findall(r"\]\((docs/[^)#]+)", PAGE.read_text())}
CLASSES = [block.body for block in BLOCKS if block.language == "python" and block.document in LINKED]


@pytest.mark.slow  # a run of two steps
def test_one_run_uses_every_part_that_the_package_offers(tmp_path: Path) -> None:
    """The package is built and unpacked as an installer would; the settings are those of the recipes' commands."""
    package, site = tmp_path / "my_package", tmp_path / "site"
    new_env("my_package", package)
    offers = [block.body for block in RECIPES if block.note == "pyproject"]
    with (package / "pyproject.toml").open("a") as file:
        file.write("\n".join(["", *offers]))
    for module, name in re.findall(r'"my_package\.(\w+):(\w+)"', "\n".join(offers)):
        (body,) = [body for body in CLASSES if f"class {name}(" in body]
        (package / "my_package" / f"{module}.py").write_text(body)
    run(package, "-c", f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})")
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)

    commands = "\n".join(block.body for block in RECIPES if block.language == "sh")
    changes = re.findall(r"--set '?((?:env|algo|trackers)\..+?)'? --overwrite", commands)
    assert len(changes) == len(offers) == 3
    train = ["-c", "from agentrl.cli.main import main; main()", "train", package / "run.toml", "--tiny"]
    words = [word for each in changes for word in ("--set", each)]
    printed = run(tmp_path, *train, "--out", "run", *words, path=site)
    assert re.findall(r"^([12]) -?\d\S*$", printed, re.M) == ["1", "2"]  # what the tracker prints
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["env"]["id"], config["algo"]["kind"]) == ("my_package/MyPackage-v0", "optimist")
    assert config["env"]["kwargs"]["box"] == {"sandbox": "unshared"}
