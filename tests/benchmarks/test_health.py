"""Every fault that can be injected is named, by its own name and no other; a healthy run hears nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from _health_runs import FAULTS, Fault, MadeRun, broken, healthy
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.config import apply_override, parse
from agentrl.run.health.examine import CHECKS
from agentrl.run.health.run_facts import RECENT, facts_of
from agentrl.run.run_folder import RunDir
from tests.test_docs import wrong_agentrl


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MadeRun]:
    made = healthy(tmp_path_factory.mktemp("health") / "before", 11)
    yield made
    made.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named_within_three_steps_by_its_own_name_alone(
    fault: Fault, before: MadeRun, tmp_path: Path
) -> None:
    with broken(before, tmp_path / "run", fault) as made:
        for _ in range(RECENT):
            made.step()
        (advice,) = made.advice()
    assert advice.name == fault.named
    assert fault.shows in advice.evidence
    assert advice.cause and advice.evidence and any(letter.isdigit() for letter in advice.evidence)
    config = RunDir(tmp_path / "run").config()
    for setting in advice.settings:  # what it says can be typed
        document = config.model_dump(mode="json", exclude_none=True)
        apply_override(document, setting)
        parse(document)
    assert advice.settings or advice.commands
    for line in advice.typed("runs/mine"):
        program, *words = line.replace("run.toml", "examples/tiny_coder.toml").split()
        assert program == "agentrl" and wrong_agentrl(words) == "", line


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_hears_nothing(seed: int, tmp_path: Path) -> None:
    made = healthy(tmp_path / "run", seed)
    assert made.advice() == []
    for _ in range(6):
        made.step()
    assert made.advice() == []
    made.close()


def test_each_check_has_its_fault_and_hides_only_what_comes_after_it() -> None:
    names = [check.__name__ for check in CHECKS]
    assert sorted({fault.named for fault in FAULTS} | {"disk_full"}) == sorted(names)
    page = (Path(__file__).parents[2] / "docs" / "reference" / "health.md").read_text()
    rows = [line[2:].split(": ")[0] for line in page.splitlines() if line.startswith("- `")]
    described = [name for row in rows for name in row.split(", ")]
    assert sorted(name.strip(" `") for name in described) == sorted(names)
    for at, hides in enumerate(CHECKS.values()):
        assert set(hides) <= set(names[at + 1 :]), names[at]


def test_the_command_says_what_to_type_and_its_exit_code_counts(before: MadeRun, tmp_path: Path) -> None:
    (fault,) = (one for one in FAULTS if one.named == "turns_cut")
    path = tmp_path / "run"
    with broken(before, path, fault) as made:
        for _ in range(RECENT):
            made.step()
    shown = CliRunner().invoke(app, ["health", str(path)])
    assert shown.exit_code == 1
    assert shown.stdout.splitlines() == [
        "turns_cut: most turns are cut before the model has ended them",
        "    100%, 100%, 100% of the turns; at most 64 tokens",
        f"    $ agentrl train run.toml --out {path}-2 --set rollout.max_tokens_per_turn=128",
    ]
    document = json.loads(CliRunner().invoke(app, ["health", str(path), "--json"]).stdout)
    assert (document["step"], document["healthy"], len(document["advice"])) == (9, False, 1)
    assert document["advice"][0]["settings"] == ["rollout.max_tokens_per_turn=128"]


def test_a_full_disk_is_named_though_nobody_can_write_so(before: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    path = before.run.path
    assert CliRunner().invoke(app, ["health", str(path)]).exit_code == 0
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000})())
    assert facts_of(RunDir(path)).disk.startswith("no space left on the disk")
    shown = CliRunner().invoke(app, ["health", str(path)])
    assert shown.exit_code == 1 and "disk_full: the disk of the run is full" in shown.stdout
