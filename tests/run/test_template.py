"""Arguments of the chat template: a whole run, its evaluations and what goes on from it render with the same ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import parse
from agentrl.errors import ConfigError, ModelError
from agentrl.models.resolve import model_dir, renderer_of
from agentrl.offline import sft
from agentrl.run import resume_overrides, trainer
from agentrl.run.run_folder import RunDir
from agentrl.run.trainer import Trainer
from agentrl.store import RunStore

from .envs import Vowels

MARK = "{% if quiet %}{{ '<think></think>' }}{% endif %}"
SMALL: dict[str, Any] = {
    "rollout": {"group_size": 2, "max_running": 4, "max_tokens_per_turn": 4, "template": {"quiet": True}},
    "engine": {"max_batch": 8, "kv_cache_mb": 64},
    "buffer": {"groups_per_step": 1, "skip_without_signal": False},
    "train": {"steps": 1},
    "eval": {"sets": [{"name": "held_out", "n": 1}]},
}


@pytest.fixture
def thoughtful(tmp_path: Path) -> Path:
    """A model whose chat template reads the argument `quiet`."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir("agentrl/tiny-coder"), folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + MARK)
    return folder


@pytest.mark.long
def test_a_run_and_its_evaluations_render_with_its_arguments_and_keep_them(thoughtful: Path, tmp_path: Path) -> None:
    Trainer(model=thoughtful, env=Vowels, config=SMALL, out=tmp_path / "run").train()
    run = RunDir.open(tmp_path / "run")
    renderer = renderer_of(run.config())
    marked = renderer.tokens("<think></think>")
    with RunStore.read(run.store_path) as store:
        for purpose in ("train", "eval:held_out:before", "eval:held_out:after"):
            turns = [turn for episode in store.reads.trajectories(purpose) for turn in episode.turns]
            assert len(turns) > 2
            assert all(turn.prompt_ids[-len(marked) :] == marked for turn in turns), purpose
    with pytest.raises(ConfigError, match=r"rollout\.template = {'quiet': False}: a run that goes on keeps it"):
        resume_overrides.change(run, ["rollout.template.quiet=false"])


@pytest.mark.medium
def test_demonstrations_are_rendered_with_the_arguments_of_their_file(thoughtful: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "2 + 2?", "completion": "<think></think>4"}\n')
    (thoughtful / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + MARK + "{% endif %}"
    )
    given = {"model": str(thoughtful), "data": [str(data)], "train": {"steps": 1, "tokens_per_batch": 4096}}
    said: dict[bool, list[str]] = {}
    for quiet in (False, True):
        training = sft._Training(sft.parse({**given, "template": {"quiet": quiet}}), tmp_path / f"{quiet}")
        renderer = renderer_of(parse({"model": str(thoughtful), "env": {"id": "e"}}))
        said[quiet] = [renderer.decode(turn.token_ids) for turn in training._data[0].turns]
    assert said == {False: ["<think></think>4"], True: ["4"]}


@pytest.mark.parametrize(
    ("template", "error", "says"),
    [
        ({"quite": True}, ModelError, r"reads no argument 'quite' .*: give quiet$"),
        ({"tools": []}, ConfigError, r"template = \['tools'\]: an episode says these itself"),
        ({"day": {1, 2}}, ConfigError, r"takes what JSON can say"),
    ],
)
def test_arguments_that_would_do_nothing_or_harm_are_refused_before_anything_starts(
    template: Any, error: type[Exception], says: str, thoughtful: Path
) -> None:
    with pytest.raises(error, match=says):
        document = {"model": str(thoughtful), "env": {"id": "agentrl/CodeRepair-v0"}, "rollout": {"template": template}}
        trainer.check_startable(parse(document))
