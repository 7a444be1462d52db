"""A Hugging Face folder becomes a module, of which each rank reads only its shards.

Never knows packs, adapters, or in what numbers are held: they are float32 here.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import inspect
import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from torch._guards import detect_fake_mode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from agentrl.errors import ConfigError, ModelError, first_line
from agentrl.host.user_warnings import warn
from agentrl.learner.parallel.ranks import Ranks
from agentrl.tokens.vision import read_vision


def load(folder: Path, ranks: Ranks, attention: str) -> Any:
    """The model of a folder, with the attention that transformers knows under this name. Raises ModelError, in one
    line, for a folder that cannot be trained; ConfigError for a model that the ranks cannot cut."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"no model in {str(folder)!r}: it holds no config.json")
    if detect_fake_mode() is not None:
        loaded_module = _hollow(folder, attention)
        if ranks.size > 1:
            ranks.spread(loaded_module)
        return loaded_module
    had_progress_bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()

    def loaded(attention: str) -> tuple[Any, dict[str, Any]]:
        with _spread(ranks) as rank_options:
            return _kind(folder).from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation=_attending(folder, attention),
                local_files_only=True,
                output_loading_info=True,
                **rank_options,
            )

    try:
        try:
            loaded_module, loading_info = loaded(attention)
        except KeyError as load_error:  # an old kind, which has a class for each attention that it knows
            if load_error.args != (attention,):
                raise
            loaded_module, loading_info = loaded("eager")
    except ConfigError:  # the model cannot be cut so
        raise
    except Exception as load_error:  # transformers raises many kinds for a broken folder; the user must fix each
        reason = first_line(load_error)
        raise ModelError(f"cannot load the model in {str(folder)!r}: {reason}") from load_error
    finally:
        if had_progress_bars:
            transformers.utils.logging.enable_progress_bar()
    if missing_names := sorted(loading_info["missing_keys"]):
        raise ModelError(
            f"the weights in {str(folder)!r} lack {len(missing_names)} tensors, first {missing_names[0]!r}"
        )
    # transformers unties such a model and trains the file's head; engines tie it and drop that head. Learner and
    # engine would compute two models from one folder.
    _check_tied(loaded_module, folder)
    _check_tokens(loaded_module, folder)
    # Logits of all nodes would be [N, V]: for 64k nodes and a vocabulary of 150,000 that is 39 GB in float32.
    if "logits_to_keep" not in inspect.signature(loaded_module.forward).parameters:
        raise ModelError(
            f"{type(loaded_module).__name__} in {str(folder)!r} cannot compute logits of chosen positions only"
        )
    return loaded_module


def _kind(folder: Path) -> Any:
    """transformers' class for the model: with a head for text, after images if it reads them."""
    return AutoModelForCausalLM if read_vision(folder) is None else AutoModelForImageTextToText


def _attending(folder: Path, attention: str) -> str | dict[str, str]:
    """Which parts of a model attend by a function of this name: the decoder."""
    return attention if read_vision(folder) is None else {"text_config": attention, "vision_config": "sdpa"}


def _check_tied(module: Any, folder: Path) -> None:
    """Raises ModelError if a file holds numbers of its own for a tensor that config.json ties to another: engines drop
    them."""
    text_config = module.config.get_text_config()
    if not getattr(text_config, "tie_word_embeddings", module.config.tie_word_embeddings):
        return
    tied_names = getattr(module, "_tied_weights_keys", None)  # transformers unties a model whose file has both
    tied_names = cast("dict[str, str]", tied_names) if isinstance(tied_names, dict) else {}
    file_by_name = {
        tied_name: weight_file for weight_file in folder.glob("*.safetensors") for tied_name in _names(weight_file)
    }
    for tied_name, source_name in tied_names.items():
        if (
            tied_name in file_by_name
            and source_name in file_by_name
            and not torch.equal(
                *(_tensor(file_by_name[tensor_name], tensor_name) for tensor_name in (tied_name, source_name))
            )
        ):
            correction = "give config.json tie_word_embeddings = false, or remove the tensor"
            problem = f"{str(folder)!r} ties {tied_name!r} to {source_name!r}, and its file has another {tied_name!r}"
            raise ModelError(f"{problem}: {correction}")


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as open_tensors:
        return list(open_tensors.keys())


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as open_tensors:
        return open_tensors.get_tensor(name)


def _check_tokens(module: Any, folder: Path) -> None:
    """Raises ModelError if the tokenizer has a token that the embedding has no row for and that a conversation needs;
    warns of others."""
    tokenizer_file, embedding_rows = folder / "tokenizer.json", module.get_input_embeddings().num_embeddings
    if not tokenizer_file.is_file():
        return
    tokenizer = json.loads(tokenizer_file.read_text())
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    token_pairs = (
        vocabulary.items()
        if isinstance(vocabulary, dict)
        else ((vocab_entry[0], token_id) for token_id, vocab_entry in enumerate(vocabulary))
    )
    token_pairs = [
        *token_pairs,
        *((added_token["content"], added_token["id"]) for added_token in tokenizer.get("added_tokens", ())),
    ]
    tokens_beyond = sorted(
        {(token_id, token_text) for token_text, token_id in token_pairs if token_id >= embedding_rows}
    )
    if not tokens_beyond:
        return
    templates = [*folder.glob("chat_template*"), *folder.glob("additional_chat_templates/*.jinja")]
    template_texts = [template_path.read_text() for template_path in templates if template_path.is_file()]
    settings_file = folder / "tokenizer_config.json"
    tokenizer_settings = json.loads(settings_file.read_text()) if settings_file.is_file() else {}
    template_texts += [
        json.dumps(tokenizer_settings.get(setting_name, ""), ensure_ascii=False)
        for setting_name in ("chat_template", "eos_token")
    ]
    needed_token = next(
        (
            (token_id, token_text)
            for token_id, token_text in tokens_beyond
            if any(token_text in template_text for template_text in template_texts)
        ),
        None,
    )
    token_id, token_text = needed_token or tokens_beyond[0]
    problem = (
        f"the tokenizer in {str(folder)!r} has {len(tokens_beyond)} tokens beyond the model's {embedding_rows}, "
        f"such as {token_text!r} ({token_id})"
    )
    if needed_token:
        raise ModelError(f"{problem}, which its conversations need: resize the model's embeddings to the tokenizer")
    warn(f"{problem}: a prompt that holds one cannot be computed")


@contextmanager
def _spread(ranks: Ranks) -> Generator[dict[str, Any]]:
    """Inside, transformers reads only this rank's shards of the weights, if these arguments are passed to it: it cuts a
    model that is to be distributed after it was made on the meta device, before a weight is read."""
    if ranks.size == 1:
        yield {}
        return

    def laid(_: object, model: Any, *__: object) -> Any:
        ranks.spread(model)
        return model

    # The one place between "made on the meta device" and "weights are read": cut there, no rank ever holds more than
    # its shard, which is why several ranks are taken at all.
    with patch.object(PreTrainedModel, "maybe_distribute_model", classmethod(laid)):
        yield {"distributed_config": DistributedConfig()}


def _hollow(folder: Path, attention: str) -> Any:
    """The model that a config.json describes, made under FakeTensorMode: no weight is read, and its tensors have shapes
    but no numbers. Raises ModelError."""
    try:
        model_config = AutoConfig.from_pretrained(folder, local_files_only=True)
        attention_names = _attending(folder, attention)
        return _kind(folder).from_config(model_config, dtype=torch.float32, attn_implementation=attention_names)
    except Exception as model_error:  # of many kinds; the user must fix each
        reason = first_line(model_error)
        raise ModelError(
            f"cannot make the model that {str(folder / 'config.json')!r} describes: {reason}"
        ) from model_error
