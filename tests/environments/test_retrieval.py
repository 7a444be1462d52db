"""Retrieval: the shipped questions can be answered from the shipped texts, search ranks as BM25 does by hand, and
answer and citation are both needed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from each_case import each_case

import agentrl
from agentrl.env.datasets import read_rows
from agentrl.errors import UsageError
from agentrl_environments import retrieval
from agentrl_environments.retrieval import HELD_OUT, Retrieval, plain
from agentrl_environments.retrieval.bm25 import Document, Index, excerpt, words

FOLDER = Path(retrieval.__file__).parent
CORPUS = {row["id"]: row for row in read_rows(str(FOLDER / "corpus.jsonl"))}
QUESTIONS = read_rows(str(FOLDER / "questions.jsonl"))


def test_every_answer_stands_in_every_text_it_may_cite() -> None:
    assert len(CORPUS) == 24 and len(QUESTIONS) == 57
    assert len({row["question"] for row in QUESTIONS}) == 57
    for row in QUESTIONS:
        for source in row["sources"]:
            text = plain(f"{CORPUS[source]['title']} {CORPUS[source]['text']}")
            assert f" {plain(row['answers'][0])} " in f" {text} ", row
            assert not (source in HELD_OUT and row["sources"][0] not in HELD_OUT), "a training question cites it"


def test_searching_the_question_itself_finds_a_source_for_nearly_all_that_need_one_text() -> None:
    index = Index(Document(**row) for row in CORPUS.values())
    found = [bool({doc.id for doc in index.find(row["question"], 3)} & set(row["sources"])) for row in QUESTIONS]
    assert sum(found[:46]) >= 44
    assert sum(found[46:]) < 11, "the last ones ask for a second search"


def test_scores_are_those_of_the_formula() -> None:
    """Three texts of two words and one of four; `red` is in two of them, once and twice."""
    texts = ["red fox", "red red fish soup", "blue sky", "old oak"]
    index = Index(Document(str(n), "", text) for n, text in enumerate(texts))
    rarity = math.log(1 + (4 - 2 + 0.5) / (2 + 0.5))
    short = rarity * 1 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / 2.5))
    long = rarity * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 4 / 2.5))
    assert index._score("0", ["red"]) == pytest.approx(short)
    assert index._score("1", ["red"]) == pytest.approx(long)
    assert [doc.id for doc in index.find("RED?", 5)] == ["1", "0"]
    assert long > short
    assert index.find("nowhere", 5) == []
    with pytest.raises(ValueError, match="same id"):
        Index([Document("a", "", ""), Document("a", "", "")])


def test_words_and_excerpts() -> None:
    assert words("The Sheep's bells, 4 glasses; mass") == ["the", "sheep", "s", "bell", "4", "glasse", "mass"]
    document = Document("x", "T", "Nothing here. The bell rang twice! A bell.")
    assert excerpt(document, "when rang the bells") == "The bell rang twice!"
    assert excerpt(Document("x", "T", ""), "bell") == ""


@each_case(
    ("answer", "source", "outcome"),
    [
        ("Ilva Brandt", "harbour-light", 1.0),
        (" ilva  BRANDT. ", "harbour-light", 1.0),
        ("Ilva Brandt", "fish-hall", 0.5),
        ("Ilva", "harbour-light", 0.0),
        ("Ilva Brandt and others", "harbour-light", 0.0),
        ("", "harbour-light", 0.0),
    ],
)
def test_answer_and_citation(answer: str, source: str, outcome: float) -> None:
    env = Retrieval()
    env.reset(options=QUESTIONS[0])
    *_, terminated, truncated, info = env.step(env.call("submit", answer=answer, source=source))
    assert terminated and not truncated
    assert (info["outcome"], info["success"]) == (outcome, outcome == 1.0)


def test_a_played_episode() -> None:
    env = Retrieval()
    messages, _ = env.reset(options=QUESTIONS[0])
    assert messages[-1]["content"] == "Who built the harbour light of Ostrey?"
    messages, *_ = env.step(env.call("search", query="harbour light built") + env.call("read", id="gone"))
    assert messages[0]["content"].startswith("[harbour-light] The harbour light of Ostrey: The harbour light of Ostrey")
    assert messages[0]["content"].count("\n") == 2
    assert messages[1]["content"] == "error: there is no text 'gone': use an id that search gave"
    messages, *_ = env.step(env.call("read", id="harbour-light") + env.call("search", query="zzz"))
    assert messages[0]["content"] == CORPUS["harbour-light"]["text"]
    assert messages[1]["content"] == "nothing found"


def test_splits_share_no_text() -> None:
    asked: dict[str, set[str]] = {}
    for split in ("train", "held_out", "all"):
        env = Retrieval(split=split)
        asked[split] = {env.reset(seed=seed)[0][-1]["content"] for seed in range(600)}
    assert not asked["train"] & asked["held_out"]
    assert asked["train"] | asked["held_out"] == asked["all"] == {row["question"] for row in QUESTIONS}
    with pytest.raises(UsageError, match="split = 'test': give 'train', 'held_out' or 'all'"):
        Retrieval(split="test")  # type: ignore[arg-type]


def test_a_library_of_ones_own(tmp_path: Path) -> None:
    def write(name: str, *rows: dict[str, Any]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    corpus = write("c.jsonl", {"id": "a", "title": "A", "text": "Water is wet."}, {"id": "b", "title": "B", "text": ""})
    questions = write("q.jsonl", {"question": "How is water?", "answers": ["wet"], "sources": ["a"]})
    env = Retrieval(corpus=corpus, questions=questions, split="all")
    env.reset(seed=0)
    assert env.step(env.call("submit", answer="wet", source="a"))[4]["outcome"] == 1.0
    with pytest.raises(UsageError, match="no question is left"):
        Retrieval(corpus=corpus, questions=questions, split="held_out")


def test_the_checker_finds_nothing() -> None:
    assert agentrl.check_env(Retrieval)
