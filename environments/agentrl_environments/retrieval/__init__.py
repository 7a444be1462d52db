"""Questions that only a small library can answer: search it, read, answer, and cite the text that says so."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal

from agentrl.env import EpisodeLimits, Grade, ToolEnv, tool
from agentrl.env.checks.oracles import Oracle, say, script
from agentrl.env.datasets import read_rows
from agentrl.errors import ConfigError, ToolError, UsageError
from agentrl_environments.retrieval.bm25 import Document, Index, excerpt

_HERE: Final = Path(__file__).parent
HELD_OUT: Final = frozenset({"tin-bat", "kolm-yard", "winter-post", "fish-hall", "the-patience", "marl-cheese"})
"""Texts that no training question is about."""

_QUESTION: Final = {"question": str, "answers": list, "sources": list}
UNCITED: Final = 0.5
"""The outcome of a right answer under a wrong citation."""


class Retrieval(ToolEnv):
    """`agentrl/Retrieval-v0`: answer a question about a world that is written down nowhere else.

    `split` chooses the questions: `train`, `held_out` (about texts that no training question is about) or `all`.
    `corpus` and `questions` are files of your own (`id`, `title`, `text`; `question`, `answers`, `sources`); a row of
    questions may also come as reset options. Outcome: 1 for an answer that is right and cites a text that holds it,
    0.5 for a right answer that does not, else 0."""

    system = (
        "Find the answer in the library. Submit it in as few words as you can, with the id of the text that holds it."
    )
    blocking = False
    replayable = True
    limits = EpisodeLimits(turns=8)

    def __init__(
        self,
        *,
        split: Literal["train", "held_out", "all"] = "train",
        results: int = 3,
        corpus: str | None = None,
        questions: str | None = None,
        **kwargs: Any,
    ) -> None:
        if split not in ("train", "held_out", "all"):
            raise UsageError(f"split = {split!r}: give 'train', 'held_out' or 'all'")
        corpus, questions = corpus or str(_HERE / "corpus.jsonl"), questions or str(_HERE / "questions.jsonl")
        self._index, question_rows = _index(corpus), _questions(questions)
        self.task_files = (Path(corpus), Path(questions))
        self._questions = [
            question_row
            for question_row in question_rows
            if split == "all" or _is_held_out(question_row) == (split == "held_out")
        ]
        if not self._questions:
            raise UsageError(f"split = {split!r}: no question is left; give 'all' for questions of your own")
        if not isinstance(results, int) or isinstance(results, bool) or results < 1:
            raise ConfigError("results", results, "give a whole number above 0")
        self._results = results
        super().__init__(**kwargs)

    def make_task(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if "question" in options:
            _must_have(options, "a question of the reset options", **_QUESTION)
            return options
        return self._questions[int(self.np_random.integers(len(self._questions)))]

    def prompt(self, task: Mapping[str, Any]) -> str:
        self._right, self._cited = False, False
        return str(task["question"])

    @tool(parallel=True)
    def search(self, query: str) -> str:
        """Find texts by words. Gives the id and title of each, and its sentence that fits best.

        Args:
            query: a few words that the text should hold
        """
        documents = self._index.find(query, self._results)
        return (
            "\n".join(f"[{document.id}] {document.title}: {excerpt(document, query)}" for document in documents)
            or "nothing found"
        )

    @tool(parallel=True)
    def read(self, id: str) -> str:
        """Read a whole text.

        Args:
            id: its id, as search gives it
        """
        if id not in self._index.documents:
            raise ToolError(f"there is no text {id!r}: use an id that search gave")
        return self._index.documents[id].text

    @tool
    def submit(self, answer: str, source: str) -> str:
        """Give the answer and end the episode.

        Args:
            answer: the answer in as few words as you can
            source: id of the text that holds it
        """
        self._right = plain(answer) in {plain(right_answer) for right_answer in self.task["answers"]}
        self._cited = source in self.task["sources"]
        self.finish()
        return "submitted"

    def grade(self) -> Grade:
        outcome = 0.0 if not self._right else 1.0 if self._cited else UNCITED
        return Grade(outcome=outcome, success=outcome == 1.0, info={"right": self._right, "cited": self._cited})

    def oracles(self) -> list[Oracle]:
        right_answer, right_source = self.task["answers"][0], self.task["sources"][0]
        wrong_source = next(
            document_id for document_id in self._index.documents if document_id not in self.task["sources"]
        )
        source_title = self._index.documents[right_source].title
        look_calls = (self.call("search", query=source_title), self.call("read", id=right_source))
        return [
            Oracle("gold", 1.0, script(*look_calls, self.call("submit", answer=right_answer, source=right_source))),
            Oracle("right, wrongly cited", UNCITED, say(self.call("submit", answer=right_answer, source=wrong_source))),
            Oracle("well cited, wrong", 0.0, say(self.call("submit", answer="nobody knows", source=right_source))),
            Oracle("no-op", 0.0, say("")),
        ]


def plain(answer: str) -> str:
    """An answer without case, punctuation and articles."""
    answer_words = re.findall(r"[^\W_]+", answer.casefold())
    return " ".join(answer_word for answer_word in answer_words if answer_word not in ("a", "an", "the"))


def _is_held_out(row: Mapping[str, Any]) -> bool:
    return row["sources"][0] in HELD_OUT


@functools.cache
def _index(path: str) -> Index:
    document_rows = read_rows(path)
    for row_number, document_row in enumerate(document_rows, 1):
        _must_have(document_row, f"{path}, row {row_number}", id=str | int, title=str, text=str)
    if repeated_ids := [
        document_id
        for document_id, id_count in Counter(str(document_row["id"]) for document_row in document_rows).items()
        if id_count > 1
    ]:
        raise UsageError(f"{path}: two texts have the id {repeated_ids[0]!r}: give each its own")
    return Index(
        Document(str(document_row["id"]), document_row["title"], document_row["text"]) for document_row in document_rows
    )


@functools.cache
def _questions(path: str) -> Sequence[Mapping[str, Any]]:
    question_rows = read_rows(path)
    for row_number, question_row in enumerate(question_rows, 1):
        _must_have(question_row, f"{path}, row {row_number}", **_QUESTION)
    return question_rows


def _must_have(row: Mapping[str, Any], where: str, **columns: type | UnionType) -> None:
    for column, kind in columns.items():
        if not isinstance(value := row.get(column), kind) or value == []:
            raise UsageError(f"{where}: {column} = {value!r}: give {'a list of texts' if kind is list else 'a text'}")
