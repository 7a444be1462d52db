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
        all_documents = list(documents)
        self.documents = {document.id: document for document in all_documents}
        if len(self.documents) < len(all_documents):
            raise ValueError("two documents have the same id")
        self._counts = {document.id: Counter(words(f"{document.title} {document.text}")) for document in all_documents}
        self._lengths = {document_id: sum(word_counts.values()) for document_id, word_counts in self._counts.items()}
        self._mean = sum(self._lengths.values()) / max(len(all_documents), 1)
        self._holders = Counter(held_word for word_counts in self._counts.values() for held_word in word_counts)

    def find(self, query: str, most: int) -> list[Document]:
        """The `most` documents that fit best, best first; only those that hold a word of the query."""
        query_words = set(words(query))
        scores = {document_id: self._score(document_id, query_words) for document_id in self.documents}
        best_ids = sorted(
            (document_id for document_id, document_score in scores.items() if document_score > 0),
            key=lambda id: (-scores[id], id),
        )
        return [self.documents[document_id] for document_id in best_ids[:most]]

    def _score(self, id: str, query_words: Iterable[str]) -> float:
        word_counts, total_score = self._counts[id], 0.0
        length_norm = _K1 * (1 - _B + _B * self._lengths[id] / self._mean)
        for query_word in query_words:
            if word_count := word_counts[query_word]:
                holder_count = self._holders[query_word]
                word_rarity = math.log(1 + (len(self.documents) - holder_count + 0.5) / (holder_count + 0.5))
                total_score += word_rarity * word_count * (_K1 + 1) / (word_count + length_norm)
        return total_score


def words(text: str) -> list[str]:
    """The words of a text in lower case, the plural's s taken off."""
    return [_singular(text_word) for text_word in _WORD.findall(text.lower())]


def excerpt(document: Document, query: str) -> str:
    """The sentence that holds most words of the query, the first of such."""
    query_words = set(words(query))
    return max(sentences(document.text), key=lambda sentence: len(query_words & set(words(sentence))), default="")


def sentences(text: str) -> Sequence[str]:
    return [sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if sentence]


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
