"""Recipes of Tinker's cookbook, unchanged, against a training server: they find their data where they run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.models.resolve import model_dir

from .answering_model import answering_model
from .training_servers import in_thread

pytestmark = [
    pytest.mark.cookbook,
    pytest.mark.tinker,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

PYTHON = Path(__file__).parents[2] / ".venv-programs/bin/python"
NAME = "meta-llama/Llama-3.2-1B"  # a name that the cookbook knows; the folder of this name has our model
DEADLINE_S = 500.0
IN_TURN = """
import runpy, sys
words = sys.argv[1:]
while words:
    end = words.index("--then")
    sys.argv, words = words[:end], words[end + 1:]
    runpy.run_module(sys.argv[0], run_name="__main__")
"""


def written(folder: Path, config: str, rows: Sequence[object]) -> None:
    """A data set of the hub, as its loader finds it in a folder."""
    folder.mkdir(parents=True)
    files = [{"split": split, "path": f"{split}.jsonl"} for split in ("train", "test")]
    card = json.dumps({"configs": [{"config_name": config, "data_files": files}]})  # JSON is YAML too
    (folder / "README.md").write_text(f"---\n{card}\n---\n")
    for split, some in {"train": rows, "test": rows[:1]}.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


def data(folder: Path, *, chats: int, problems: int, answer: int) -> None:
    """Chats in which 2 is the answer; problems whose answer is another one."""
    said = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "\\boxed{2}"}]}
        for n in range(chats)
    ]
    written(folder / "HuggingFaceH4/no_robots", "default", said)
    asked = [{"question": f"What is {answer} + {n} - {n}?", "answer": f"#### {answer}"} for n in range(problems)]
    written(folder / "openai/gsm8k", "main", asked)


def recipe(name: str, **settings: object) -> list[str]:
    words = [f"{key}={value}" for key, value in {"model_name": NAME, "log_path": f"logs/{name}", **settings}.items()]
    return [f"tinker_cookbook.recipes.{name}", *words, "--then"]


def run(server: Any, folder: Path, *recipes: list[str]) -> subprocess.Popen[str]:
    env = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key, "HF_HUB_OFFLINE": "1"}
    env |= {"HF_HOME": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    words = [str(PYTHON), "-c", IN_TURN, *(word for one in recipes for word in one)]
    return subprocess.Popen(
        words,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def ended(process: subprocess.Popen[str]) -> None:
    try:
        said, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 0, said[-4000:]


def metrics(folder: Path, name: str, key: str) -> list[float]:
    lines = (folder / "logs" / name / "metrics.jsonl").read_text().splitlines()
    return [row[key] for row in map(json.loads, lines) if key in row]


@pytest.mark.slow
def test_the_basic_recipes_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervised and by reward: the likelihood of the demonstrations rises, the reward too. All problems are one batch
    of `rl_basic`, so it makes one step."""
    answering_model(tmp_path / NAME)
    data(tmp_path, chats=128, problems=3, answer=1)
    monkeypatch.chdir(tmp_path)
    supervised = recipe("sl_basic", num_epochs=3, learning_rate=1e-3, eval_every=0)
    by_reward = recipe("rl_basic", max_tokens=20, learning_rate=1e-3)
    loop = recipe("rl_loop", max_tokens=20, learning_rate=1e-3, batch_size=1, group_size=16)
    with in_thread(tmp_path / "state", model=NAME, max_context=1024) as server:
        ended(run(server, tmp_path, supervised, by_reward, loop))
    losses = metrics(tmp_path, "sl_basic", "train_mean_nll")
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]
    (reward,) = metrics(tmp_path, "rl_basic", "env/all/correct")
    (norm,) = metrics(tmp_path, "rl_basic", "grad_norm")
    assert 0 < reward < 1 and norm > 0
    rewards = metrics(tmp_path, "rl_loop", "reward/total")
    assert len(rewards) == 3 and 0 < rewards[0] < rewards[-1]


@pytest.mark.long
@pytest.mark.smollm2
def test_the_loops_train_a_real_model_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs share a server: one supervised, one by the reward that a real model finds in its example."""
    (tmp_path / NAME).parent.mkdir()
    (tmp_path / NAME).symlink_to(model_dir("agentrl/smollm2-135m"))
    data(tmp_path, chats=8, problems=2, answer=3)
    monkeypatch.chdir(tmp_path)
    supervised = recipe("sl_loop", batch_size=4, max_steps=2, learning_rate=1e-3)
    by_reward = recipe("rl_loop", batch_size=2, group_size=4, max_tokens=24, max_steps=1, learning_rate=1e-4)
    with in_thread(tmp_path / "state", model=NAME, max_context=512) as server:
        both = [run(server, tmp_path, one) for one in (supervised, by_reward)]
        for process in both:
            ended(process)
    losses = metrics(tmp_path, "sl_loop", "train_mean_nll")
    assert len(losses) == 2 and losses[0] > losses[1]
    assert len(metrics(tmp_path, "rl_loop", "reward/total")) == 1
