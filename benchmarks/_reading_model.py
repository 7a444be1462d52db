"""Makes the model of the compaction benchmark: a tiny Qwen3 that reads on, and writes the notes of a forgetful reader.

    python benchmarks/_reading_model.py --out reader

It is warm-started on parts of episodes of `agentrl/Reading-v0` as a context holds them: behind the opening, behind
notes or behind dropped pages; up to a request for notes or to the question. The reader of these parts forgets each fact
at each notes with probability `FORGETS`, and guesses if a fact is not in its context. So reinforcement has to find out
that notes should keep everything; how to find an answer, the model knows. Owns the parts and their tokens: fixed texts
are a token each, so that an episode is short. The model, and how it is trained, are those of
`examples/make_tiny_locksmith.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agentrl.records import Message, Step
from agentrl.rollout import compaction
from agentrl_environments.reading import LETTERS, OPENING, WORDS, fact, question

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

from make_tiny_locksmith import make_model, make_tokenizer, train

FACTS, PAGES, PAGE_WORDS = 6, 18, 8
REQUEST = "notes"
FORGETS = 0.25
STEPS = 2500
_START: tuple[Message, ...] = ({"role": "user", "content": OPENING},)
_WINDOW = 3  # pages


def last_pages(messages: Sequence[Message]) -> list[Message]:
    """Truncation: the opening, and the last pages that a context holds, or these and the question."""
    pages = [at for at, message in enumerate(messages) if message["role"] == "user" and at]
    asked = messages[-1]["content"].startswith(question(0)[:-1])
    first = pages[-_WINDOW - asked] if len(pages) > _WINDOW + asked else pages[0]
    begin: Message = {"role": "user", "content": f"{OPENING}\n{messages[first]['content']}"}
    return [begin, *messages[first + 1 :]] if first > pages[0] or len(messages) > 2 * _WINDOW else list(messages)


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """One part of an episode, as a context holds it."""
    digits = [rng.randrange(10) for _ in range(FACTS)]
    asked = rng.randrange(FACTS)
    begins = rng.choice(["opening", "notes", "notes", "notes", "dropped"])
    ends = rng.choice(["request", "request", "question", "both"])
    seen = 0 if begins == "opening" else rng.randrange(FACTS + 1)  # facts before the part
    known = [at for at in range(seen) if rng.random() < rng.choice([0.3, 0.7, 1.0])] if begins == "notes" else []
    pages, seen = _pages(rng, digits, seen)
    was_asked = begins == "notes" and rng.random() < 0.15  # the notes were asked for behind the question
    messages: list[dict[str, str]] = []

    def add(role: str, content: str) -> None:
        messages.append({"role": role, "content": content})

    opening = OPENING
    if begins == "notes":
        written = notes(digits, known, asked if was_asked else None)
        (message,) = compaction.noted(_START, Step(observation=()), written).history or ()
        opening = message["content"]
    if begins == "dropped":
        (text, found), *pages = pages
        opening, known = f"{OPENING}\n{text}", found
    add("user", opening)
    if was_asked:
        add("assistant", answer(digits, known, asked, rng))
        return messages
    for at, (text, found) in enumerate(pages):
        add("assistant", "next")
        known = [*known, *found]
        last = at == len(pages) - 1
        add("user", f"{text}\n\n{REQUEST}" if last and ends == "request" else text)
    if ends != "request" or not pages:
        add("assistant", "next")
        add("user", question(asked) if ends == "question" else f"{question(asked)}\n\n{REQUEST}")
    if ends == "question":
        add("assistant", answer(digits, known, asked, rng))
    else:
        kept = [at for at in known if rng.random() > FORGETS]
        add("assistant", notes(digits, kept, asked if question(asked) in messages[-1]["content"] else None))
    return messages


def _pages(rng: random.Random, digits: list[int], seen: int) -> tuple[list[tuple[str, list[int]]], int]:
    """One to three pages behind the first `seen` facts, with the facts on each; and how many facts were seen then."""
    found: list[tuple[str, list[int]]] = []
    for _ in range(rng.randint(1, 3)):
        words, own = rng.choices(WORDS, k=PAGE_WORDS), list[int]()
        if seen < FACTS and rng.random() < 0.35:
            words.insert(rng.randrange(PAGE_WORDS + 1), fact(seen, digits[seen]))
            own, seen = [seen], seen + 1
        found.append((" ".join(words), own))
    return found, seen


def notes(digits: list[int], kept: list[int], asked: int | None) -> str:
    """The facts that are kept, in order, and the question if it was asked."""
    return " ".join([*(fact(at, digits[at]) for at in kept), *([] if asked is None else [question(asked)])])


def answer(digits: list[int], known: list[int], asked: int, rng: random.Random) -> str:
    return str(digits[asked] if asked in known else rng.randrange(10))


def tokenizer() -> Any:
    """Bytes and their merges, with a token for each word with its space, letter of a fact, and fixed text."""
    made = make_tokenizer(conversation)
    (empty,) = compaction.noted(_START, Step(observation=()), "").history or ()
    fixed = [OPENING, empty["content"].removeprefix(OPENING), f"\n\n{REQUEST}", question(0)[:-1]]
    made.add_tokens([*fixed, *(f" {word}" for word in dict.fromkeys(WORDS)), *(f" {at}" for at in LETTERS[:FACTS])])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for model and tokenizer")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    make(arguments.out, arguments.steps)


def make(folder: Path, steps: int = STEPS) -> None:
    """The same model at each call."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = tokenizer()
    model = make_model(tokens, len(tokens))
    train(model, tokens, steps, random.Random(0), conversation)
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    path = folder / "config.json"  # `rope_theta` once more, where readers of older configurations look for it
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 10_000.0}, indent=2) + "\n")


if __name__ == "__main__":
    main()
