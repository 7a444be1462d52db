"""Which parameters decay and which are Muon's, over all families of transformers, by the names of their authors."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import CohereConfig, GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.cohere.modeling_cohere import CohereForCausalLM

from agentrl.config import Train
from agentrl.learner.learner import Learner
from agentrl.learner.optimizers.optimizers import make
from agentrl.learner.optimizers.parameter_roles import roles_of

from .making import VOCAB, random_group, run_config

BESIDE = re.compile(r"bias|.*norm.*|A_log|D|dt_bias|.*pos_embed.*|time_mix_.*|probe|mask_emb|rel_pos_.", re.I)
"""Parameters that no author calls a matrix, or what holds them."""


def shrunk(config: Any) -> Any:
    """A configuration of two layers, of all its parts."""
    parts = [part for name, part in vars(config).items() if name.endswith("_config") and hasattr(part, "to_dict")]
    for part in (config, *parts):
        for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, min(2, getattr(part, name)))
    return config


def families() -> Iterator[nn.Module]:
    """A model of each family whose configuration makes one by itself, of tensors without numbers."""
    for kind, classes in cast("Any", MODEL_FOR_CAUSAL_LM_MAPPING).items():
        for made in classes if isinstance(classes, list | tuple) else [classes]:
            for prepared in (shrunk, lambda config: config):  # some have lists as long as their layers
                try:
                    with torch.device("meta"):
                        model = made(prepared(kind()))
                except Exception:
                    continue
                yield model
                break


@pytest.mark.medium
def test_decay_and_muon_are_for_the_matrices_of_linear_maps_in_every_family() -> None:
    seen = count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model in families():
            count += 1
            known = roles_of([model])
            for path, module in model.named_modules():
                for name, parameter in module.named_parameters(recurse=False):
                    if parameter.dim() < 2:
                        continue
                    seen += 1
                    where = f"{type(model).__name__}: {path}.{name} of {type(module).__name__}"
                    kind, held = type(module).__name__, id(parameter)
                    beside = bool(BESIDE.fullmatch(name)) or name.endswith("_bias")
                    if isinstance(module, nn.Embedding):
                        assert held in known.embeddings, where
                    elif isinstance(module, nn.Linear) or kind == "Conv1D" or kind.endswith("Experts"):
                        assert (held in known.others) == beside, where
                    elif beside or ("Norm" in kind and "Embedding" not in kind):
                        assert held in known.others, where
                    elif name.endswith(("weight", "proj")):
                        assert held not in known.others, where
    assert count > 130 and seen > 5000


def decayed(model: nn.Module, kind: str) -> tuple[set[str], set[str]]:
    """The names of parameters that a step without gradients makes smaller, and of those whose update is Muon's."""
    known, parameters = roles_of([model]), dict(model.named_parameters())
    head = {id(weight) for weight in model.get_output_embeddings().parameters()}  # type: ignore[operator]
    train = Train.model_validate({"optimizer": kind, "weight_decay": 0.5})
    own = list(parameters.values())
    optimizer = make(train, own, 0.1, outer=known.embeddings | head, vectors=known.others)
    parts = getattr(optimizer, "parts", [optimizer])
    names = {id(parameter): name for name, parameter in parameters.items()}
    muon = {
        id(one) for part in parts if type(part).__name__ == "Muon" for g in part.param_groups for one in g["params"]
    }
    decays = {names[id(one)] for g in optimizer.param_groups if g["weight_decay"] for one in g["params"]}
    return decays, {names[one] for one in muon}


SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 16}


def test_biases_of_experts_norms_of_heads_and_tables_of_positions_are_no_matrices() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    oss = GptOssForCausalLM(GptOssConfig(**SMALL, **heads, num_local_experts=4, num_experts_per_tok=2))
    decays, muon = decayed(oss, "muon")
    assert {name for name in decays if "experts" in name} == {
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    }
    attention = {f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qkvo"}
    assert muon == attention | {"model.layers.0.mlp.router.weight"}
    cohere = CohereForCausalLM(CohereConfig(**SMALL, num_attention_heads=4, use_qk_norm=True, pad_token_id=0))
    decays, _ = decayed(cohere, "adamw")
    assert cohere.model.layers[0].self_attn.q_norm.weight.dim() == 2
    assert not {name for name in decays if "norm" in name} and "model.layers.0.mlp.up_proj.weight" in decays
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=32))
    decays, muon = decayed(gpt2, "muon")
    block = {f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert muon == block and decays == block | {"transformer.wte.weight", "transformer.wpe.weight"}


@pytest.mark.parametrize("kind", ["sgd", "muon"])
def test_a_step_of_gpt_oss_does_not_decay_the_biases_of_its_experts(kind: str, tmp_path: Path) -> None:
    """Of a run with decay and one without, these end alike: both have the same gradients in the first step."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    oss = GptOssForCausalLM(GptOssConfig(**SMALL, **heads, num_local_experts=4, num_experts_per_tok=2))
    for name, parameter in oss.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    oss.save_pretrained(tmp_path)
    moved = dict[float, dict[str, torch.Tensor]]()
    for decay in (0.0, 0.5):
        train = Train.model_validate({"optimizer": kind, "lr": 0.1, "warmup_steps": 0, "weight_decay": decay})
        learner = Learner(run_config(train=train).learner, tmp_path)
        learner.step([random_group(1, 1)], step_of=lambda _: 0)
        moved[decay] = {name: one.detach().clone() for name, one in learner.model.module.named_parameters()}
    for name, tensor in moved[0.0].items():
        same = torch.allclose(moved[0.5][name], tensor, atol=1e-6, rtol=1e-4)
        assert same == (tensor.dim() == 1 or name.endswith("bias")), name
