"""Checks of a whole set by its words: held-out tasks among the training ones, answers in prompts, a common answer.

Tasks made from one template differ in their numbers alone and are no duplicates, so two texts are near only if their
numbers are the same, and their answers, too. Words that all tasks share (an instruction at the end) are left out.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from agentrl.env.checks.tasks.verdicts import Finding, TaskText

_NEAR: Final = 0.7  # Jaccard similarity of shingles from which on two texts are near
_SHINGLE: Final = 3  # words
_LEAST_WORDS: Final = 8  # of a text that may be near another: shorter ones are compared whole
_LONG: Final = 24  # characters of an answer that no prompt holds by chance
_USUAL: Final = 0.2  # of the tasks: if so many prompts hold their answer, the set is meant so (a passage, choices)


def in_held_out(training: Sequence[TaskText], held_out: Sequence[TaskText]) -> dict[int, list[Finding]]:
    """The training tasks, by their index, that are held-out ones too, or nearly."""
    ours, theirs = [_words(each.text) for each in training], [_words(each.text) for each in held_out]
    front, back = _shared([*ours, *theirs])
    shingles = [_shingles(words[front : len(words) - back]) for words in theirs]
    counts = Counter(shingle for each in shingles for shingle in each)
    held_out_index = {
        (tuple(words), _plain(each.answer)): index
        for index, (words, each) in enumerate(zip(theirs, held_out, strict=True))
    }
    by_shingle = defaultdict[tuple[str, ...], list[int]](list)
    for index, each in enumerate(shingles):
        for shingle in _rarest(each, counts):
            by_shingle[shingle].append(index)
    findings: dict[int, list[Finding]] = {}
    for number, (words, task) in enumerate(zip(ours, training, strict=True)):
        if (same := held_out_index.get((tuple(words), _plain(task.answer)))) is not None:
            findings[number] = [Finding("in-held-out", f"it is {held_out[same].task} of the held-out tasks")]
            continue
        our_shingles = _shingles(words[front : len(words) - back])
        near = {index for shingle in _rarest(our_shingles, counts) for index in by_shingle.get(shingle, ())}
        for index in sorted(near):
            share = len(our_shingles & shingles[index]) / len(our_shingles | shingles[index])
            same_answer = _plain(task.answer) == _plain(held_out[index].answer)
            if share >= _NEAR and same_answer and _numbers(words) == _numbers(theirs[index]):
                alike = f"{share:.0%} of its words in a row are those of {held_out[index].task} of the held-out tasks"
                findings[number] = [Finding("near-held-out", alike)]
                break
    return findings


def answer_in_prompt(texts: Sequence[TaskText]) -> dict[int, list[Finding]]:
    """The tasks, by their index, whose prompt gives the answer away: it announces it, or holds a long one. What all
    prompts begin or end with, such as worked examples, gives no task away."""
    prompts = [_words(each.text) for each in texts]
    front, back = _shared(prompts)
    inner = [f" {' '.join(prompt[front : len(prompt) - back])} " for prompt in prompts]
    answers = [" ".join(_words(each.answer)) for each in texts]
    choices = {answer for answer in answers if answer}
    announced = {
        index
        for index, (prompt, answer) in enumerate(zip(inner, answers, strict=True))
        if answer and _announces(prompt, answer, choices)
    }
    containing = {
        index
        for index, (prompt, answer) in enumerate(zip(inner, answers, strict=True))
        if len(answer) >= _LONG and f" {answer} " in prompt
    }
    giving = announced | containing if len(containing) <= max(1.0, _USUAL * len(texts)) else announced
    return {
        index: [Finding("answer-in-prompt", f"the prompt has the answer {texts[index].answer.strip()[:80]!r}")]
        for index in sorted(giving)
    }


def _announces(prompt: str, answer: str, choices: Collection[str]) -> bool:
    """Whether a prompt says what the answer is. One that lists what may be answered (answer yes or no) says nothing."""
    for match in re.finditer(rf" (?:answer|solution|result) (?:is )?{re.escape(answer)} ", prompt):
        following = prompt[match.end() :].partition(" ")[0]
        if following != "or" and following not in choices:
            return True
    return False


def most_frequent_answer(texts: Sequence[TaskText]) -> tuple[str, float]:
    """The answer that most tasks have, and the share of tasks that chance wins: one in the number of different
    answers. Empty where no answers are known, or no two tasks have the same."""
    counts = Counter(answer for each in texts if (answer := _plain(each.answer)))
    if not counts or max(counts.values()) < 2:
        return "", 0.0
    plain = counts.most_common(1)[0][0]
    return next(each.answer for each in texts if _plain(each.answer) == plain), 1 / len(counts)


def other_answers(texts: Sequence[TaskText], index: int, most: int) -> list[str]:
    """At most `most` different answers of other tasks, the next ones in order, none of which is that of the task."""
    seen = {_plain(texts[index].answer)}
    others: list[str] = []
    for each in (*texts[index + 1 :], *texts[:index]):
        if len(others) < most and (plain := _plain(each.answer)) and plain not in seen:
            seen.add(plain)
            others.append(each.answer)
    return others


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", _plain(text))


def _numbers(words: Sequence[str]) -> Counter[str]:
    return Counter(word for word in words if any(map(str.isdigit, word)))


def _shingles(words: Sequence[str]) -> frozenset[tuple[str, ...]]:
    if len(words) < _LEAST_WORDS:
        return frozenset()
    return frozenset(tuple(words[start : start + _SHINGLE]) for start in range(len(words) - _SHINGLE + 1))


def _rarest(shingles: frozenset[tuple[str, ...]], counts: Counter[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """So many of the rarest shingles that two texts as near as `_NEAR` share one of them (the prefix filter of Bayardo
    et al. 2007), in an order that is the same for all texts."""
    ordered = sorted(shingles, key=lambda shingle: (counts[shingle], shingle))
    return ordered[: len(ordered) - int(_NEAR * len(ordered) - 1e-9)]


def _shared(texts: Sequence[Sequence[str]]) -> tuple[int, int]:
    """How many words at the beginning and at the end all texts share; 0 where there are no two different texts."""
    different = {tuple(words) for words in texts}
    if len(different) < 2:
        return 0, 0
    shortest = min(map(len, different))
    front = next(_unlike(different, range(shortest)), shortest)
    back = next((~place for place in _unlike(different, range(-1, -shortest - 1, -1))), shortest)
    return front, min(back, shortest - front)


def _unlike(texts: set[tuple[str, ...]], places: Sequence[int]) -> Iterator[int]:
    return (place for place in places if len({words[place] for words in texts}) > 1)
