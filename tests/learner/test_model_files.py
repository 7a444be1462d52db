"""What belongs to a model's folder goes with it wherever it is copied."""

from __future__ import annotations

from pathlib import Path

from agentrl.learner.checkpoints.model_files import copy_description, describing

MODEL = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "qwen.tiktoken",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "additional_chat_templates/rag.jinja",
    "modeling_own.py",
    "README.md",
    "LICENSE",
}
OTHER = {
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.Q4.GGUF",
    "optimizer.pt",
    "training_args.bin",
    "state.json",
    "SHA256SUMS",
    ".gitattributes",
    ".cache/huggingface/download/config.json.metadata",
    "original/params.json",
    "original/consolidated.00.pth",
    "checkpoint-500/config.json",
    "checkpoint-500/model.safetensors",
    "checkpoint-500/trainer_state.json",
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
    "roles/judge/config.json",
    "roles/judge/model.safetensors",
    "onnx/model.onnx",
    "onnx/config.json",
}


def test_all_that_describes_a_model_is_copied_and_no_weights(tmp_path: Path) -> None:
    for name in MODEL | OTHER:
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_text(name)
    assert {str(path) for path in describing(tmp_path / "model")} == MODEL
    (tmp_path / "copy").mkdir()
    copy_description(tmp_path / "model", tmp_path / "copy", but={"config.json"})
    copied = {str(file.relative_to(tmp_path / "copy")): file.read_text() for file in (tmp_path / "copy").rglob("*.*")}
    assert copied == {name: name for name in MODEL - {"config.json", "LICENSE"}}
