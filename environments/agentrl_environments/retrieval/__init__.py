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
        self._index, rows = _index(corpus), _questions(questions)
        self.task_files = (Path(corpus), Path(questions))
        self._questions = [row for row in rows if split == "all" or _is_held_out(row) == (split == "held_out")]
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
        return "\n".join(f"[{each.id}] {each.title}: {excerpt(each, query)}" for each in documents) or "nothing found"

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
        self._right = plain(answer) in {plain(each) for each in self.task["answers"]}
        self._cited = source in self.task["sources"]
        self.finish()
        return "submitted"

    def grade(self) -> Grade:
        outcome = 0.0 if not self._right else 1.0 if self._cited else UNCITED
        return Grade(outcome=outcome, success=outcome == 1.0, info={"right": self._right, "cited": self._cited})

    def oracles(self) -> list[Oracle]:
        answer, source = self.task["answers"][0], self.task["sources"][0]
        other = next(id for id in self._index.documents if id not in self.task["sources"])
        title = self._index.documents[source].title
        look = (self.call("search", query=title), self.call("read", id=source))
        return [
            Oracle("gold", 1.0, script(*look, self.call("submit", answer=answer, source=source))),
            Oracle("right, wrongly cited", UNCITED, say(self.call("submit", answer=answer, source=other))),
            Oracle("well cited, wrong", 0.0, say(self.call("submit", answer="nobody knows", source=source))),
            Oracle("no-op", 0.0, say("")),
        ]


def plain(answer: str) -> str:
    """An answer without case, punctuation and articles."""
    tokens = re.findall(r"[^\W_]+", answer.casefold())
    return " ".join(word for word in tokens if word not in ("a", "an", "the"))


def _is_held_out(row: Mapping[str, Any]) -> bool:
    return row["sources"][0] in HELD_OUT


@functools.cache
def _index(path: str) -> Index:
    rows = read_rows(path)
    for number, row in enumerate(rows, 1):
        _must_have(row, f"{path}, row {number}", id=str | int, title=str, text=str)
    if twice := [id for id, count in Counter(str(row["id"]) for row in rows).items() if count > 1]:
        raise UsageError(f"{path}: two texts have the id {twice[0]!r}: give each its own")
    return Index(Document(str(row["id"]), row["title"], row["text"]) for row in rows)


@functools.cache
def _questions(path: str) -> Sequence[Mapping[str, Any]]:
    rows = read_rows(path)
    for number, row in enumerate(rows, 1):
        _must_have(row, f"{path}, row {number}", **_QUESTION)
    return rows


def _must_have(row: Mapping[str, Any], where: str, **columns: type | UnionType) -> None:
    for name, kind in columns.items():
        if not isinstance(value := row.get(name), kind) or value == []:
            raise UsageError(f"{where}: {name} = {value!r}: give {'a list of texts' if kind is list else 'a text'}")
