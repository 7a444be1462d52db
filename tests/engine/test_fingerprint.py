"""Fingerprints: the same of tensors and of files, whatever dtype they travel in; another one for another step."""

from __future__ import annotations

from pathlib import Path

import torch
from each_case import each_case
from safetensors.torch import save_file

from agentrl.engine.weight_sync import fingerprints, weight_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "wide": torch.randn(5, 40),
        "square": torch.randn(16, 16),
        "vector": torch.randn(7),
        "thin": torch.randn(9, 3),
    }


@each_case("engine", DTYPES)
@each_case("file", DTYPES)
def test_a_file_has_those_of_its_tensors_in_the_engines_dtype(engine: str, file: str, tmp_path: Path) -> None:
    kept = {name: tensor.to(DTYPES[file]) for name, tensor in tensors().items()}
    save_file(kept, tmp_path / "w.safetensors")
    found = fingerprints.of_file(weight_file.open_bytes(tmp_path / "w.safetensors"), engine)
    expected = fingerprints.of_tensors({name: tensor.to(DTYPES[engine]) for name, tensor in kept.items()})
    assert found == {name: mark for name, mark in expected.items() if not name.endswith(" transposed")}
    assert fingerprints.differences(expected, found) == []


def test_the_smallest_change_of_a_value_that_counts_makes_another_one() -> None:
    before = tensors()
    after = {name: tensor.clone() for name, tensor in before.items()}
    column = fingerprints.columns(40)[3]
    after["wide"][2, column] = torch.nextafter(after["wide"][2, column], torch.tensor(9.0))
    after["vector"][6] = torch.nextafter(after["vector"][6], torch.tensor(9.0))
    wrong = fingerprints.differences(fingerprints.of_tensors(before), fingerprints.of_tensors(after))
    assert wrong == ["vector", "wide"]


def test_a_zero_that_lost_its_sign_in_an_engine_is_the_same() -> None:
    assert fingerprints.of_tensors({"a": torch.tensor([-0.0])}) == fingerprints.of_tensors({"a": torch.tensor([0.0])})


def test_what_stands_in_a_tensors_place_is_named() -> None:
    kept = tensors()
    expected = fingerprints.of_tensors(kept | {"other": torch.randn(5, 40)})
    found = fingerprints.of_tensors({"square": kept["square"].T, "other": kept["wide"], "unknown": kept["thin"]})
    assert fingerprints.differences(expected, found) == ["other (holds wide)", "square (holds its transpose)"]


def test_a_tied_output_layer_is_expected_to_hold_the_embedding() -> None:
    kept = tensors()
    expected = fingerprints.of_tensors({"model.embed_tokens.weight": kept["wide"]})
    assert fingerprints.differences(expected, fingerprints.of_tensors({"lm_head.weight": kept["wide"]})) == []
    wrong = fingerprints.differences(expected, fingerprints.of_tensors({"lm_head.weight": kept["wide"] + 1}))
    assert wrong == ["lm_head (tied to model.embed_tokens.weight)"]
