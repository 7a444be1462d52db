"""`agentrl export RUN --hf DIR`: transformers, and PEFT, read from it exactly what was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.config import RunConfig, Train
from agentrl.errors import RunFailed, UsageError
from agentrl.learner.learner import Learner
from agentrl.models.resolve import model_dir
from agentrl.offline import export_model
from agentrl.offline.export_model import export
from agentrl.records import Message
from agentrl.run.run_folder import RunDir
from tests.learner.making import VOCAB, mixture, random_group, run_config, tiny_qwen3

STEP_OF = {1: 0, 2: 0}.__getitem__
IDS = torch.tensor([[(7 * i) % VOCAB for i in range(20)]])


def trained(run: Path, model: Path, *, steps: int = 1, config: RunConfig | None = None, **train: Any) -> Learner:
    """A run's folder with a checkpoint of each step, and the learner that wrote them."""
    settings = Train.model_validate({"warmup_steps": 0, "lr": 1e-2, "keep_checkpoints": 9, **train})
    config = (config or run_config(train=settings, seed=3)).model_copy(update={"model": str(model)})
    folder = RunDir.create(run, config)
    learner = Learner(config.learner, model)
    for step in range(steps):
        learner.step([random_group(id, seed=10 * step + id) for id in range(3)], step_of=STEP_OF)
        learner.save(folder.checkpoints)
    return learner


@torch.no_grad()
def logits(folder: Path, **options: Any) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()(IDS).logits


@torch.no_grad()
def logits_of(learner: Learner, model: Path, dtype: torch.dtype) -> torch.Tensor:
    """Those of the trained tensors in a model that transformers made, as it would compute in `dtype`."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain.load_state_dict(learner.model.module.state_dict())
    for parameter in plain.parameters():  # the frequencies of its rotations are no weights
        parameter.data = parameter.data.to(dtype)
    return plain.eval()(IDS).logits


def typed(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.strip()


@pytest.mark.medium
@each_case("kind", ["tied", "untied", "mixture"])
@each_case("dtype", ["float32", "bfloat16"])
def test_transformers_reads_the_trained_weights(kind: str, dtype: str, tmp_path: Path) -> None:
    model = mixture(tmp_path / "model") if kind == "mixture" else tiny_qwen3(tmp_path / "model", tie=kind == "tied")
    learner = trained(tmp_path / "run", model)
    said = typed("export", tmp_path / "run", "--hf", tmp_path / "out", "--dtype", dtype)
    assert said == f"{tmp_path / 'out'}: a model in {dtype}, 1 file of weights of step 1"
    exact = getattr(torch, dtype)
    found = logits(tmp_path / "out")  # in the dtype that its configuration says
    assert found.dtype == exact
    assert torch.equal(found, logits_of(learner, model, exact))
    assert not torch.equal(found, logits(model, dtype=exact)), "it was not trained"
    assert (tmp_path / "out" / "generation_config.json").is_file()


def test_its_dtype_is_by_default_that_of_the_model_and_its_files_are_of_a_size(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    (model / "tokenizer.json").write_text("{}")
    learner = trained(tmp_path / "run", model)
    said = export(tmp_path / "run", tmp_path / "out", most=4000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and f"a model in bfloat16, {len(files)} files of weights" in said
    assert torch.equal(logits(tmp_path / "out"), logits_of(learner, model, torch.bfloat16))
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not {"state.json", "optimizer.pt"} & {path.name for path in (tmp_path / "out").iterdir()}


def test_an_adapter_is_written_for_peft_or_merged(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model")
    learner = trained(tmp_path / "run", model, lora_rank=2)
    said = typed("export", tmp_path / "run", "--hf", tmp_path / "adapter")
    assert said.endswith(f"an adapter over {model} (--merge writes a whole model) of step 1")
    found = logits(tmp_path / "adapter")  # transformers finds the model below by itself
    learner.model.module.set_attn_implementation("sdpa")
    with torch.no_grad():
        torch.testing.assert_close(found, learner.model.module.eval()(IDS).logits, atol=1e-6, rtol=0)
    assert not torch.allclose(found, logits(model), atol=1e-4)
    typed("export", tmp_path / "run", "--hf", tmp_path / "merged", "--merge")
    torch.testing.assert_close(logits(tmp_path / "merged"), found, atol=5e-5, rtol=0)
    with pytest.raises(UsageError, match="add --merge"):
        export(tmp_path / "run", tmp_path / "half", dtype="bfloat16")


def test_a_step_can_be_chosen_and_one_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model")
    learner = trained(tmp_path / "run", model, steps=2)
    typed("export", tmp_path / "run", "--hf", tmp_path / "first", "--step", 1)
    typed("export", tmp_path / "run", "--hf", tmp_path / "last")
    assert torch.equal(logits(tmp_path / "last"), logits_of(learner, model, torch.float32))
    assert not torch.equal(logits(tmp_path / "first"), logits(tmp_path / "last"))
    with pytest.raises(UsageError, match=r"--step 7: .* has checkpoints of 1, 2"):
        export(tmp_path / "run", tmp_path / "third", step=7)


def test_it_writes_over_nothing_and_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_qwen3(tmp_path / "model")
    trained(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(UsageError, match="is there already: give a new folder"):
        export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(UsageError, match="holds no checkpoint"):
        export(model, tmp_path / "other")

    def torn(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    def dropped(*_: object, **__: object) -> None:
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000001")
        raise FileNotFoundError

    for broken, said in ((torn, "No space left"), (dropped, "has dropped .*: type the same again")):
        monkeypatch.setattr(export_model, "save_file", broken)
        with pytest.raises(RunFailed, match=said):
            export(tmp_path / "run", tmp_path / "other")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "out", "run"]


def test_an_export_asks_with_the_prompts_that_the_model_was_trained_with_or_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder as transformers 5 saves it: the template that writes tools has a folder of its own."""
    model = tiny_qwen3(tmp_path / "model", vocab=600)
    theirs = model_dir("agentrl/tiny-coder")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(theirs / name, model / name)
    (model / "additional_chat_templates").mkdir()
    shutil.copyfile(theirs / "chat_template.jinja", model / "additional_chat_templates" / "tool_use.jinja")
    turn = "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    asks = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    plain = f"{{%- for message in messages -%}}{turn}{{%- endfor -%}}{asks}"
    (model / "chat_template.jinja").write_text(plain)
    trained(tmp_path / "run", model)
    tools = [
        {
            "type": "function",
            "function": {"name": "look", "description": "looks", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    messages: list[Message] = [{"role": "user", "content": "q"}]
    prompts = dict[str, Any]()
    for kind, folder in (("whole", tmp_path / "whole"), ("adapter", tmp_path / "adapter")):
        if kind == "adapter":
            trained(tmp_path / "run-adapter", model, lora_rank=2)
        export(tmp_path / ("run" if kind == "whole" else "run-adapter"), folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts[kind] = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    original = AutoTokenizer.from_pretrained(model)
    expected = original.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert prompts == {"whole": expected, "adapter": expected} and "look" in expected
    copy = export_model.copy_description

    def too_short(source: Path, target: Path, **given: Any) -> None:
        copy(source, target, **given)
        shutil.rmtree(target / "additional_chat_templates")

    monkeypatch.setattr(export_model, "copy_description", too_short)
    with pytest.raises(RunFailed, match="the export would ask the model with other prompts than it was trained with"):
        export(tmp_path / "run", tmp_path / "third")
    assert not (tmp_path / "third").exists()
