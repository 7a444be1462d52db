"""The tokens that are compared. They are the same in every process, so that a second look at a server meets the prefix
cache that the first one has filled. No torch."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from agentrl.errors import ModelError, UsageError
from agentrl.models.resolve import vocabulary
from agentrl.records import Message

SHALLOWEST = 256  # tokens of the first depth
SAMPLED = 32  # tokens that a server samples to show how it reports them
_BLOCK = 32  # tokens
_SPECIAL = 48  # special tokens that are looked at
_MEDIA = re.compile(r"image|video|audio|vision")

CONVERSATIONS: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "What is 2 + 2?"},),
    ({"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Name a color."}),
    (
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello! What can I do?"},
        {"role": "user", "content": "  Count to 3,\nplease. "},
    ),
)
TEXT = "The answer is 42."


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Tokens of a model: `ordinary` and `special` ones that a prompt may hold, and the texts of special ones."""

    ordinary: tuple[int, ...]
    special: tuple[int, ...]
    texts: dict[int, str]


def read_vocabulary(folder: Path) -> Vocabulary:
    """The tokens of a model folder; all of its rows are ordinary if it has no tokenizer. Raises ModelError."""
    row_count = vocabulary(folder)
    if row_count is None:
        raise ModelError(f"{folder / 'config.json'} does not say how many tokens the model has (vocab_size)")
    tokenizer_path = folder / "tokenizer.json"
    if not tokenizer_path.is_file():
        return Vocabulary(ordinary=tuple(range(row_count)), special=(), texts={})
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    except Exception as read_error:  # tokenizers raises bare Exception
        raise ModelError(f"cannot read {str(tokenizer_path)!r}: {read_error}") from read_error
    added_texts = {
        token_id: added_token.content for token_id, added_token in tokenizer.get_added_tokens_decoder().items()
    }
    # A server replaces the tokens of images by what it sees in them, and refuses a prompt that has them alone.
    media_ids = set(_media_tokens(json.loads((folder / "config.json").read_text())))
    media_ids |= {token_id for token_id, token_text in added_texts.items() if _MEDIA.search(token_text)}
    prompt_ids = sorted(
        token_id
        for token_id in tokenizer.get_vocab(with_added_tokens=True).values()
        if token_id < row_count and token_id not in media_ids
    )
    return Vocabulary(
        ordinary=tuple(token_id for token_id in prompt_ids if token_id not in added_texts) or tuple(prompt_ids),
        special=tuple(token_id for token_id in prompt_ids if token_id in added_texts)[:_SPECIAL],
        texts=added_texts,
    )


def _media_tokens(config: dict[str, Any]) -> list[int]:
    media_ids: list[int] = []
    for setting_name, setting_value in config.items():
        if isinstance(setting_value, dict):
            media_ids += _media_tokens(cast("dict[str, Any]", setting_value))
        elif (
            isinstance(setting_value, int)
            and setting_name.endswith(("_token_id", "_token_index"))
            and _MEDIA.search(setting_name)
        ):
            media_ids.append(setting_value)
    return media_ids


def depths(fits: int, most: int | None) -> list[int]:
    """Context lengths to look at, each twice the one before. Raises UsageError where there is no room for one."""
    free_tokens = min(fits, most or fits) - SAMPLED
    if free_tokens < 2 * _BLOCK:
        raise UsageError(f"a context of {free_tokens + SAMPLED} tokens is too short: {2 * _BLOCK + SAMPLED} are needed")
    # A context that holds `most` tokens as a power of two has no room for sampled ones behind it.
    context_lengths = [
        SHALLOWEST << doublings
        for doublings in range(32)
        if SHALLOWEST << doublings <= min(fits - SAMPLED, most or fits)
    ]
    return context_lengths or [free_tokens]


def draw(vocabulary: Vocabulary, length: int) -> tuple[int, ...]:
    """The probe: `length` ordinary tokens; a longer one begins with the shorter one."""
    rng = random.Random(f"agentrl canary {len(vocabulary.ordinary)}")
    probe_tokens: list[int] = []
    while len(probe_tokens) < length:
        # Random tokens use all of the embedding, but say little of far context. So every second block repeats an
        # earlier one: models copy, and a fault of positions or of the cache shows there.
        block_count = len(probe_tokens) // _BLOCK
        if block_count % 2:
            block_start = _BLOCK * rng.randrange(block_count)
            probe_tokens += probe_tokens[block_start : block_start + _BLOCK]
        else:
            probe_tokens += rng.choices(vocabulary.ordinary, k=_BLOCK)
    return tuple(probe_tokens[:length])


def draw_special(vocabulary: Vocabulary, length: int) -> tuple[int, ...]:
    """Special tokens, three ordinary ones behind each; empty for a model without any."""
    rng = random.Random("agentrl canary special")
    probe_tokens: list[int] = []
    for special_token in vocabulary.special:
        probe_tokens += [*rng.choices(vocabulary.ordinary, k=3), special_token]
    return tuple([*probe_tokens, *rng.choices(vocabulary.ordinary, k=3)][:length]) if probe_tokens else ()


def with_new_start(vocabulary: Vocabulary, tokens: Sequence[int]) -> tuple[int, ...]:
    """Put another first token before the others, which differs with every call: no cache holds this prefix."""
    first_token = random.SystemRandom().choice([token_id for token_id in vocabulary.ordinary if token_id != tokens[0]])
    return (first_token, *tokens[1:])
