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
        module = _hollow(folder, attention)
        if ranks.size > 1:
            ranks.spread(module)
        return module
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()

    def loaded(attention: str) -> tuple[Any, dict[str, Any]]:
        with _spread(ranks) as options:
            return _kind(folder).from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation=_attending(folder, attention),
                local_files_only=True,
                output_loading_info=True,
                **options,
            )

    try:
        try:
            module, info = loaded(attention)
        except KeyError as error:  # an old kind, which has a class for each attention that it knows
            if error.args != (attention,):
                raise
            module, info = loaded("eager")
    except ConfigError:  # the model cannot be cut so
        raise
    except Exception as error:  # transformers raises many kinds for a broken folder; the user must fix each
        reason = first_line(error)
        raise ModelError(f"cannot load the model in {str(folder)!r}: {reason}") from error
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"the weights in {str(folder)!r} lack {len(missing)} tensors, first {missing[0]!r}")
    # transformers unties such a model and trains the file's head; engines tie it and drop that head. Learner and
    # engine would compute two models from one folder.
    _check_tied(module, folder)
    _check_tokens(module, folder)
    # Logits of all nodes would be [N, V]: for 64k nodes and a vocabulary of 150,000 that is 39 GB in float32.
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise ModelError(f"{type(module).__name__} in {str(folder)!r} cannot compute logits of chosen positions only")
    return module


def _kind(folder: Path) -> Any:
    """transformers' class for the model: with a head for text, after images if it reads them."""
    return AutoModelForCausalLM if read_vision(folder) is None else AutoModelForImageTextToText


def _attending(folder: Path, attention: str) -> str | dict[str, str]:
    """Which parts of a model attend by a function of this name: the decoder."""
    return attention if read_vision(folder) is None else {"text_config": attention, "vision_config": "sdpa"}


def _check_tied(module: Any, folder: Path) -> None:
    """Raises ModelError if a file holds numbers of its own for a tensor that config.json ties to another: engines drop
    them."""
    config = module.config.get_text_config()
    if not getattr(config, "tie_word_embeddings", module.config.tie_word_embeddings):
        return
    tied = getattr(module, "_tied_weights_keys", None)  # transformers unties a model whose file has both
    tied = cast("dict[str, str]", tied) if isinstance(tied, dict) else {}
    files = {name: file for file in folder.glob("*.safetensors") for name in _names(file)}
    for name, source in tied.items():
        if name in files and source in files and not torch.equal(*(_tensor(files[key], key) for key in (name, source))):
            hint = "give config.json tie_word_embeddings = false, or remove the tensor"
            raise ModelError(f"{str(folder)!r} ties {name!r} to {source!r}, and its file has another {name!r}: {hint}")


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name)


def _check_tokens(module: Any, folder: Path) -> None:
    """Raises ModelError if the tokenizer has a token that the embedding has no row for and that a conversation needs;
    warns of others."""
    file, rows = folder / "tokenizer.json", module.get_input_embeddings().num_embeddings
    if not file.is_file():
        return
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer.get("model", {}).get("vocab", {})
    pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], token_id) for token_id, entry in enumerate(vocab))
    pairs = [*pairs, *((added["content"], added["id"]) for added in tokenizer.get("added_tokens", ()))]
    beyond = sorted({(token_id, token) for token, token_id in pairs if token_id >= rows})
    if not beyond:
        return
    templates = [*folder.glob("chat_template*"), *folder.glob("additional_chat_templates/*.jinja")]
    texts = [path.read_text() for path in templates if path.is_file()]
    described = folder / "tokenizer_config.json"
    facts = json.loads(described.read_text()) if described.is_file() else {}
    texts += [json.dumps(facts.get(key, ""), ensure_ascii=False) for key in ("chat_template", "eos_token")]
    needed = next(((token_id, token) for token_id, token in beyond if any(token in text for text in texts)), None)
    token_id, token = needed or beyond[0]
    problem = (
        f"the tokenizer in {str(folder)!r} has {len(beyond)} tokens beyond the model's {rows}, such as {token!r} "
        f"({token_id})"
    )
    if needed:
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
    """The model of a config.json, of tensors that have no numbers."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        attends = _attending(folder, attention)
        return _kind(folder).from_config(config, dtype=torch.float32, attn_implementation=attends)
    except Exception as error:  # of many kinds; the user must fix each
        reason = first_line(error)
        raise ModelError(f"cannot make the model that {str(folder / 'config.json')!r} describes: {reason}") from error
