"""The example of distillation trains, with a teacher that knows other things than its student."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.models.resolve import model_dir

FILE = Path(__file__).resolve().parents[2] / "examples" / "distil.toml"
SMALL = (
    *("train.steps=3", "train.warmup_steps=0", "buffer.groups_per_step=4", "rollout.max_running=16"),
    'eval.sets=[{name="held_out",kwargs={split="held_out"},n=4}]',
)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.bubblewrap
def test_the_example_of_distillation_trains_by_its_teacher_alone(tmp_path: Path) -> None:
    teacher = Path(shutil.copytree(model_dir("agentrl/tiny-coder"), tmp_path / "teacher"))
    (weights,) = teacher.glob("*.safetensors")
    generator = torch.Generator().manual_seed(0)
    other = {k: v + 0.3 * v.std() * torch.randn(v.shape, generator=generator) for k, v in load_file(weights).items()}
    save_file(other, weights, metadata={"format": "pt"})
    settings = [word for one in (*SMALL, f"algo.teacher={teacher}") for word in ("--set", one)]
    result = CliRunner().invoke(app, ["train", str(FILE), "--out", str(tmp_path / "run"), *settings])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [(row["group_count"], row["episodes"], row["updated"]) for row in steps] == [(4, 4, True)] * 3
    assert [row["algorithm"]["untaught"] for row in steps] == [0.0] * 3
    assert all(row["algorithm"]["kl_teacher"] > 0.05 for row in steps)
