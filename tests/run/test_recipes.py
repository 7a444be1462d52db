"""The recipes: each is a run file that can start, and trains two steps with a tiny model of its architecture."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from each_case import each_case
from typer.testing import CliRunner

from agentrl import config as configuration
from agentrl.cli.main import app
from agentrl.engine.embedded.architecture import read_architecture
from agentrl.errors import ModelError, UsageError
from agentrl.models import smollm2
from agentrl.offline import sft
from agentrl.offline import tiny_run as tiny_runs
from agentrl.offline.tiny_run import on_cpu, shrunk
from agentrl.run.run_folder import RunDir

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.parent.name for path in (ROOT / "examples" / "recipes").glob("*/run.toml"))
LONG = [pytest.mark.long]  # what they do, the two others do as well
AGENTS = sorted(path.stem.removesuffix("_warm") for path in (ROOT / "examples" / "laptop_agents").glob("*_warm.toml"))
NEEDS = {
    "coding_agent": [pytest.mark.bubblewrap],
    "moe_lora": [pytest.mark.vllm, *LONG],
    "gsm8k": LONG,
    "solver_verifier": LONG,
}


def test_every_recipe_says_what_it_needs_and_what_to_expect() -> None:
    assert len(RECIPES) == 5
    for name in RECIPES:
        page = (ROOT / "examples" / "recipes" / name / "README.md").read_text()
        assert "**Needs**" in page and "**Expected curve:** not run here" in page
        config = configuration.load(ROOT / "examples" / "recipes" / name / "run.toml")
        assert config.name == name


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_of_the_laptop_begins_with_its_warm_start(name: str) -> None:
    folder = ROOT / "examples" / "laptop_agents"
    warm, config = sft.load(folder / f"{name}_warm.toml"), configuration.load(folder / f"{name}.toml")
    assert config.model == f"runs/{warm.name}" and config.rollout.max_context <= warm.max_context
    head = (folder / f"{name}.toml").read_text().split("\nname =")[0]
    assert f"agentrl demos {config.env.id} " in head and f"agentrl sft examples/laptop_agents/{name}_warm.toml" in head
    (data,) = warm.data
    assert head.split("--out ")[1].split()[0] == str(Path(data).resolve().relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, [])) for name in RECIPES])
def test_two_steps_of_a_recipe_change_the_weights_of_a_tiny_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    file, out = f"examples/recipes/{name}/run.toml", tmp_path / "run"
    done = CliRunner().invoke(app, ["train", file, "--tiny", "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    run = RunDir.open(out)
    own, tiny = configuration.load(Path(file)), run.config()
    assert (tiny.env, tiny.algo, tiny.train.lora_rank) == (own.env, own.algo, own.train.lora_rank)
    assert json.loads((tmp_path / "run-model" / "config.json").read_text())["model_type"].startswith("qwen3")
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    trained = [row for row in steps if row.get("kind") == "train" or "grad_norm" in row]
    assert len(trained) == 2 and all(row["grad_norm"] > 0 for row in trained)
    errors = [row["canary_error"] for row in steps if "canary_error" in row]
    assert errors and max(errors) < 1e-3


def test_the_word_problems_are_those_that_the_script_makes_and_none_is_held_out_and_trained() -> None:
    folder = ROOT / "examples" / "recipes" / "gsm8k"
    script: dict[str, Any] = runpy.run_path(str(folder / "problems.py"))
    rewards: dict[str, Any] = runpy.run_path(str(folder / "rewards.py"))
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in script["files"]().items()}
    for name, made in rows.items():
        assert [json.loads(line) for line in (folder / name).read_text().splitlines()] == made
        assert all(rewards["correct"](None, row["answer"], row) == 1.0 for row in made)
        for row in made:  # each step is what Python computes
            for left, right in re.findall(r"([\d*/+ -]+) = (\d+)", row["answer"]):
                assert eval(left) == int(right)
    shown = [json.loads(line) for line in script["demonstrations"]().splitlines()]
    assert all(rewards["correct"](None, row["completion"], {"answer": row["completion"]}) == 1.0 for row in shown)
    asked = {row["prompt"].partition("\n")[0] for row in shown}
    assert len(asked) == len(shown) == 240 and all("end with ####" in row["prompt"] for row in shown)
    questions = [row["question"] for made in rows.values() for row in made]
    assert asked.isdisjoint(questions)
    assert len(set(questions)) == len(questions) == 544


@pytest.mark.smollm2
@each_case("name", RECIPES)
@each_case("dtype", ["bfloat16", "float32"])
def test_every_recipe_is_a_run_of_a_small_real_model_on_a_cpu(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_runs, "multiplies_bfloat16", lambda: dtype == "bfloat16")
    own = configuration.load(ROOT / "examples" / "recipes" / name / "run.toml")
    small = on_cpu(own)
    assert {small.model, *small.rollout.frozen_models()} <= {smollm2.ID, "frozen"}
    assert (small.engine.kind, small.train.device) == ("embedded", "cpu")
    assert small.engine.dtype == small.train.dtype == dtype
    assert small.rollout.group_size == 8 and small.rollout.max_context <= 1024
    assert (small.env, small.algo, small.rewards, small.train.steps) == (
        own.env,
        own.algo,
        own.rewards,
        own.train.steps,
    )
    assert all(given.n <= 64 for given in small.eval.sets)


def test_what_is_typed_wins_over_what_is_made_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm start or another dtype that is given must not be replaced without a word."""
    monkeypatch.setattr(tiny_runs, "_make", lambda model, folder: False)
    monkeypatch.setattr(tiny_runs, "model_dir", lambda model: tmp_path)
    monkeypatch.setattr(tiny_runs, "multiplies_bfloat16", lambda: False)
    typed = ["model=runs/warm", "train.dtype=bfloat16", "engine.max_batch=3", "rollout.group_size=4", "eval.every=7"]
    typed += ["buffer.groups_per_step=3", "algo.kind=ppo", "train.steps=9"]
    file = ROOT / "examples" / "recipes" / "gsm8k" / "run.toml"
    given = configuration.load(file, typed)
    small, tiny = on_cpu(given, typed), shrunk(given, tmp_path, typed)
    for run in (small, tiny):
        assert (run.train.dtype, run.train.steps, run.engine.max_batch) == ("bfloat16", 9, 3)
        assert (run.rollout.group_size, run.buffer.groups_per_step, run.eval.every) == (4, 3, 7)
        assert run.algo.kind == "ppo" and run.tasks == given.tasks
    assert (small.model, tiny.model) == ("runs/warm", str(tmp_path)), "of a model that is tried counts its architecture"
    assert on_cpu(given).model == smollm2.ID and on_cpu(given).train.dtype == "float32"


@pytest.mark.parametrize("name", ["gsm8k", "tool_use"])
def test_a_warm_start_of_a_recipe_is_read_and_trains_a_small_model(name: str) -> None:
    file = ROOT / "examples" / "recipes" / name / "warm.toml"
    warm = sft.load(file)
    (data,) = warm.data
    head = file.read_text().partition("\nname =")[0]
    assert warm.model == smollm2.ID and Path(data).resolve() == ROOT / "runs" / f"{name}.jsonl"
    assert f"runs/{name}.jsonl" in head and f"agentrl sft examples/recipes/{name}/warm.toml" in head
    assert f"--small --set model=runs/{warm.name}" in head


def test_a_run_file_is_tried_or_learned_from_not_both() -> None:
    done = CliRunner().invoke(app, ["train", "examples/recipes/gsm8k/run.toml", "--tiny", "--small"])
    assert isinstance(done.exception, UsageError) and "leave out one of them" in str(done.exception)


def test_a_tiny_model_has_the_architecture_that_the_name_or_the_folder_tells(tmp_path: Path) -> None:
    run = {
        "env": {"id": "agentrl/Nim-v0"},
        "engine": {"kind": "vllm", "replicas": [[1]], "vllm": {"quantization": "fp8"}},
    }
    for name, qk_norm, bias in (("Qwen/Qwen3-4B", True, False), ("Qwen/Qwen2.5-7B-Instruct", False, True)):
        folder = tmp_path / name.rpartition("/")[2]
        tiny = shrunk(configuration.parse({**run, "model": name}), folder)
        found = read_architecture(folder)
        assert (found.qk_norm, found.qkv_bias, found.hidden) == (qk_norm, bias, 64)
        assert (tiny.engine.kind, tiny.engine.gpus, tiny.engine.vllm, tiny.train.steps) == ("embedded", [], {}, 2)
    more = folder / "additional_chat_templates"  # as transformers 5 saves a template beside the default one
    more.mkdir()
    (more / "tool_use.jinja").write_text((folder / "chat_template.jinja").read_text())
    again = shrunk(configuration.parse({**run, "model": str(folder)}), tmp_path / "again")
    assert read_architecture(Path(again.model)).qkv_bias
    assert (Path(again.model) / more.name / "tool_use.jinja").read_text() == (more / "tool_use.jinja").read_text()
    mixture = shrunk(configuration.parse({**run, "model": "Qwen/Qwen3-30B-A3B"}), tmp_path / "mixture")
    assert mixture.engine.kind == "vllm"
    with pytest.raises(ModelError, match="unheard"):
        shrunk(configuration.parse({**run, "model": "unheard"}), tmp_path / "none")


CLUSTER = {
    "launcher": "ray",
    "store": "postgresql://agentrl@db.example/agentrl",
    "engine": {"gpus": 1},
    "learner": {"gpus": 1},
    "controller": {"engines": [4, 7], "ranks": [1, 2, 4]},
}
VLLM, CUDA = {"kind": "vllm", "dtype": "bfloat16"}, {"device": "cuda", "dtype": "bfloat16"}


@each_case(
    "sections",
    [
        {
            "cluster": CLUSTER,
            "engine": VLLM | {"replicas": 6},
            "train": CUDA | {"parallel": {"ranks": 2}},
            "rollout": {"workers": 8},
        },
        {"engine": VLLM, "train": CUDA | {"weights": "bfloat16_alone"}},
        {"engine": VLLM | {"colocated": True}, "train": CUDA},
        {"engine": {"weights_url": "s3://bucket/x", "sync": "delta"}},
        {"rollout": {"pivot": {"k": 4}}, "algo": {"scale": "leave_one_out_by_source"}},
    ],
)
def test_a_file_for_many_machines_is_tried_on_this_one(
    sections: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_runs, "_make", lambda model, folder: False)
    given = configuration.parse({"model": "m", "env": {"id": "e"}, **sections})
    tiny = shrunk(given, tmp_path)
    assert (tiny.cluster.launcher, tiny.cluster.store, tiny.rollout.workers) == ("local", None, 1)
    assert (tiny.engine.replicas, tiny.engine.urls, tiny.train.parallel.ranks, tiny.train.device) == (1, [], 1, "cpu")
    assert tiny.engine.kind == "embedded" and tiny.engine.weights_url is None
    assert tiny.algo == given.algo and tiny.train.lora_rank == given.train.lora_rank


def test_other_models_are_the_tiny_one_and_what_only_gpus_compute_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_runs, "_make", lambda model, folder: False)
    large = "Qwen/Qwen3-32B"
    run = {
        "model": "Qwen/Qwen3-4B",
        "env": {"id": "agentrl/Nim-v0"},
        "rollout": {"roles": {"judge": large, "first": "frozen", "guest": "http://host:1"}},
        "engine": VLLM,
        "train": CUDA | {"attention": "flex"},
        "algo": {"kind": "distil", "teacher": large},
        "roles": [{"name": "other", "model": large, "algo": {"kind": "distil", "teacher": large}}],
        "rewards": [{"source": "long", "kind": "overlong", "margin_tokens": 32}],
    }
    tiny = shrunk(configuration.parse(run), tmp_path)
    made = str(tmp_path)
    assert (tiny.model, tiny.role_models) == (made, {"other": made})
    assert tiny.rollout.roles == {"judge": made, "first": "frozen", "guest": "http://host:1"}
    assert [algo.slots.frozen for algo in tiny.algorithms.values()] == [{"teacher": made}] * 2
    assert tiny.train.attention == "auto", "flex has no gradients on a CPU"
    assert [one.margin_tokens for one in tiny.rewards] == [1, None]
