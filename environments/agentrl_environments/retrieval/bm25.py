"""Texts, and finding them by words: BM25 (Robertson and Zaragoza 2009). It knows no question and no policy."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_WORD = re.compile(r"[^\W_]+")
_K1, _B = 1.2, 0.75


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a corpus; `id` is what an answer cites."""

    id: str
    title: str
    text: str


class Index:
    """Documents by words. Raises ValueError for two documents of one id."""

    def __init__(self, documents: Iterable[Document]) -> None:
        listed = list(documents)
        self.documents = {document.id: document for document in listed}
        if len(self.documents) < len(listed):
            raise ValueError("two documents have the same id")
        self._counts = {document.id: Counter(words(f"{document.title} {document.text}")) for document in listed}
        self._lengths = {id: sum(counts.values()) for id, counts in self._counts.items()}
        self._mean = sum(self._lengths.values()) / max(len(listed), 1)
        self._holders = Counter(word for counts in self._counts.values() for word in counts)

    def find(self, query: str, most: int) -> list[Document]:
        """The `most` documents that fit best, best first; only those that hold a word of the query."""
        query_words = set(words(query))
        scores = {id: self._score(id, query_words) for id in self.documents}
        best = sorted((id for id, score in scores.items() if score > 0), key=lambda id: (-scores[id], id))
        return [self.documents[id] for id in best[:most]]

    def _score(self, id: str, query_words: Iterable[str]) -> float:
        counts, score = self._counts[id], 0.0
        norm = _K1 * (1 - _B + _B * self._lengths[id] / self._mean)
        for word in query_words:
            if n := counts[word]:
                holders = self._holders[word]
                rarity = math.log(1 + (len(self.documents) - holders + 0.5) / (holders + 0.5))
                score += rarity * n * (_K1 + 1) / (n + norm)
        return score


def words(text: str) -> list[str]:
    """The words of a text in lower case, the plural's s taken off."""
    return [_singular(word) for word in _WORD.findall(text.lower())]


def excerpt(document: Document, query: str) -> str:
    """The sentence that holds most words of the query, the first of such."""
    query_words = set(words(query))
    return max(sentences(document.text), key=lambda sentence: len(query_words & set(words(sentence))), default="")


def sentences(text: str) -> Sequence[str]:
    return [sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if sentence]


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
