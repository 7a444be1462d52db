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
    rows = vocabulary(folder)
    if rows is None:
        raise ModelError(f"{folder / 'config.json'} does not say how many tokens the model has (vocab_size)")
    path = folder / "tokenizer.json"
    if not path.is_file():
        return Vocabulary(ordinary=tuple(range(rows)), special=(), texts={})
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"cannot read {str(path)!r}: {error}") from error
    added = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
    # A server replaces the tokens of images by what it sees in them, and refuses a prompt that has them alone.
    media = set(_media_tokens(json.loads((folder / "config.json").read_text())))
    media |= {id for id, text in added.items() if _MEDIA.search(text)}
    ids = sorted(id for id in tokenizer.get_vocab(with_added_tokens=True).values() if id < rows and id not in media)
    return Vocabulary(
        ordinary=tuple(id for id in ids if id not in added) or tuple(ids),
        special=tuple(id for id in ids if id in added)[:_SPECIAL],
        texts=added,
    )


def _media_tokens(config: dict[str, Any]) -> list[int]:
    ids: list[int] = []
    for name, value in config.items():
        if isinstance(value, dict):
            ids += _media_tokens(cast("dict[str, Any]", value))
        elif isinstance(value, int) and name.endswith(("_token_id", "_token_index")) and _MEDIA.search(name):
            ids.append(value)
    return ids


def depths(fits: int, most: int | None) -> list[int]:
    """Context lengths to look at, each twice the one before. Raises UsageError where there is no room for one."""
    room = min(fits, most or fits) - SAMPLED
    if room < 2 * _BLOCK:
        raise UsageError(f"a context of {room + SAMPLED} tokens is too short: {2 * _BLOCK + SAMPLED} are needed")
    # A context that holds `most` tokens as a power of two has no room for sampled ones behind it.
    lengths = [SHALLOWEST << step for step in range(32) if SHALLOWEST << step <= min(fits - SAMPLED, most or fits)]
    return lengths or [room]


def draw(vocabulary: Vocabulary, length: int) -> tuple[int, ...]:
    """The probe: `length` ordinary tokens; a longer one begins with the shorter one."""
    rng = random.Random(f"agentrl canary {len(vocabulary.ordinary)}")
    tokens: list[int] = []
    while len(tokens) < length:
        # Random tokens use all of the embedding, but say little of far context. So every second block repeats an
        # earlier one: models copy, and a fault of positions or of the cache shows there.
        blocks = len(tokens) // _BLOCK
        if blocks % 2:
            start = _BLOCK * rng.randrange(blocks)
            tokens += tokens[start : start + _BLOCK]
        else:
            tokens += rng.choices(vocabulary.ordinary, k=_BLOCK)
    return tuple(tokens[:length])


def draw_special(vocabulary: Vocabulary, length: int) -> tuple[int, ...]:
    """Special tokens, three ordinary ones behind each; empty for a model without any."""
    rng = random.Random("agentrl canary special")
    tokens: list[int] = []
    for special in vocabulary.special:
        tokens += [*rng.choices(vocabulary.ordinary, k=3), special]
    return tuple([*tokens, *rng.choices(vocabulary.ordinary, k=3)][:length]) if tokens else ()


def with_new_start(vocabulary: Vocabulary, tokens: Sequence[int]) -> tuple[int, ...]:
    """Put another first token before the others, which differs with every call: no cache holds this prefix."""
    first = random.SystemRandom().choice([id for id in vocabulary.ordinary if id != tokens[0]])
    return (first, *tokens[1:])
