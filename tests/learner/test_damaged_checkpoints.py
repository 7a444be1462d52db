"""A checkpoint whose bytes changed is refused or set aside: its weights would train on without a word."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from agentrl import notices
from agentrl.errors import ModelError, RunFailed
from agentrl.learner.checkpoints.digests import fault, write
from agentrl.learner.checkpoints.folders import name_of, newest
from agentrl.learner.checkpoints.intact import newest_intact
from agentrl.learner.learner import Learner
from agentrl.models.resolve import model_dir
from agentrl.offline.export_model import export

from .making import random_group, run_config


@pytest.fixture(scope="module")
def saved(qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model that has a tokenizer's file and another, in a folder."""
    model = tmp_path_factory.mktemp("model")
    shutil.copytree(qwen3_dir, model, dirs_exist_ok=True)
    (model / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    learner = Learner(run_config().learner, model)
    learner.step([random_group(1, 1)], step_of=lambda _: 0)
    return learner.save(tmp_path_factory.mktemp("checkpoints"))


def flipped(file: Path) -> None:
    """Invert 64 bytes in the middle."""
    data = bytearray(file.read_bytes())
    middle = max(0, len(data) // 2 - 32)
    data[middle : middle + 64] = bytes(255 - byte for byte in data[middle : middle + 64])
    file.write_bytes(bytes(data))


def test_the_digests_are_those_that_sha256sum_checks(saved: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=saved, check=True)
    listed = {line.split(None, 1)[1] for line in (saved / "SHA256SUMS").read_text().splitlines()}
    there = {str(file.relative_to(saved)) for file in saved.rglob("*") if file.is_file()}
    assert listed == there - {"SHA256SUMS"} and {"model.safetensors", "optimizer.pt", "state.json"} < listed


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "tokenizer_config.json", "SHA256SUMS"])
@pytest.mark.parametrize(
    "harm", [flipped, lambda file: file.write_bytes(b""), Path.unlink], ids=["bits", "empty", "gone"]
)
def test_a_learner_loads_no_damaged_checkpoint(saved: Path, name: str, harm, qwen3_dir: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = Path(shutil.copytree(saved, tmp_path / saved.name))
    learner = Learner(run_config().learner, qwen3_dir)
    learner.load(folder)
    before = learner.hashes()
    harm(folder / name)
    if name == "SHA256SUMS" and not (folder / name).exists():
        notices.OF_PROCESS.forget()
        assert fault(folder) is None  # nothing to compare with, as in a folder that somebody else wrote
        assert [count.place for count in notices.OF_PROCESS.totals().values()] == [str(folder)]
        return
    with pytest.raises(ModelError, match=rf"is damaged: {name}") as refused:
        learner.load(folder)
    assert "\n" not in str(refused.value)
    assert learner.hashes() == before


def test_a_file_that_came_to_a_checkpoint_later_is_named(saved: Path, tmp_path: Path) -> None:
    """A chat template, say, of which no digest is known."""
    notices.OF_PROCESS.forget()
    folder = Path(shutil.copytree(saved, tmp_path / saved.name))
    (folder / "additional_chat_templates").mkdir()
    (added := folder / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    assert fault(folder) is None
    assert [count.place for count in notices.OF_PROCESS.totals().values()] == [str(added)]


def test_a_run_whose_newest_checkpoint_lost_its_state_is_not_measured_at_an_older_one(
    saved: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        shutil.copytree(saved, run / "checkpoints" / name_of(step))
    (run / "checkpoints" / name_of(2) / "state.json").unlink()
    for use in (lambda: model_dir(str(run)), lambda: export(run, tmp_path / "hf")):
        with pytest.raises(ModelError, match=r"step-00000002' is damaged: state.json is missing"):
            use()


def test_damaged_checkpoints_are_set_aside_and_the_one_before_is_used(tmp_path: Path) -> None:
    assert newest_intact(tmp_path) == (None, "")
    for step in (1, 2, 3, 4):
        folder = tmp_path / name_of(step)
        folder.mkdir()
        (folder / "weights").write_text(f"weights of {step}")
        (folder / "state.json").write_text(json.dumps({"step": step}))
        write(folder)
    assert newest_intact(tmp_path) == (tmp_path / name_of(4), "")
    (tmp_path / name_of(4) / "weights").write_text("weights of 5")
    (tmp_path / name_of(3) / "state.json").unlink()
    (tmp_path / f"damaged-{name_of(4)}").mkdir()  # of an earlier day
    intact, line = newest_intact(tmp_path)
    assert intact == newest(tmp_path) == tmp_path / name_of(2)
    assert f"{name_of(4)} is damaged (weights does not hold the bytes that were written)" in line
    assert f"called damaged-{name_of(4)}-1 now" in line
    assert f"{name_of(3)} is damaged (state.json is missing)" in line
    assert (tmp_path / f"damaged-{name_of(4)}-1" / "weights").read_text() == "weights of 5"
    for step in (1, 2):
        (tmp_path / name_of(step) / "weights").unlink()
    with pytest.raises(RunFailed, match=rf"{name_of(2)}/weights is missing: move .* away to begin again"):
        newest_intact(tmp_path)
    assert newest(tmp_path) == tmp_path / name_of(2)  # a person decides
