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
    training_words = [_words(task_text.text) for task_text in training]
    held_out_words = [_words(task_text.text) for task_text in held_out]
    shared_front, shared_back = _shared([*training_words, *held_out_words])
    shingles = [_shingles(text_words[shared_front : len(text_words) - shared_back]) for text_words in held_out_words]
    shingle_counts = Counter(shingle for text_shingles in shingles for shingle in text_shingles)
    held_out_index = {
        (tuple(text_words), _plain(task_text.answer)): text_index
        for text_index, (text_words, task_text) in enumerate(zip(held_out_words, held_out, strict=True))
    }
    by_shingle = defaultdict[tuple[str, ...], list[int]](list)
    for text_index, text_shingles in enumerate(shingles):
        for shingle in _rarest(text_shingles, shingle_counts):
            by_shingle[shingle].append(text_index)
    findings: dict[int, list[Finding]] = {}
    for training_index, (text_words, training_task) in enumerate(zip(training_words, training, strict=True)):
        if (same_index := held_out_index.get((tuple(text_words), _plain(training_task.answer)))) is not None:
            findings[training_index] = [
                Finding("in-held-out", f"it is {held_out[same_index].task} of the held-out tasks")
            ]
            continue
        our_shingles = _shingles(text_words[shared_front : len(text_words) - shared_back])
        near_indices = {
            text_index
            for shingle in _rarest(our_shingles, shingle_counts)
            for text_index in by_shingle.get(shingle, ())
        }
        for text_index in sorted(near_indices):
            similarity = len(our_shingles & shingles[text_index]) / len(our_shingles | shingles[text_index])
            same_answer = _plain(training_task.answer) == _plain(held_out[text_index].answer)
            if similarity >= _NEAR and same_answer and _numbers(text_words) == _numbers(held_out_words[text_index]):
                near_task = held_out[text_index].task
                likeness = f"{similarity:.0%} of its words in a row are those of {near_task} of the held-out tasks"
                findings[training_index] = [Finding("near-held-out", likeness)]
                break
    return findings


def answer_in_prompt(texts: Sequence[TaskText]) -> dict[int, list[Finding]]:
    """The tasks, by their index, whose prompt gives the answer away: it announces it, or holds a long one. What all
    prompts begin or end with, such as worked examples, gives no task away."""
    prompt_words = [_words(task_text.text) for task_text in texts]
    shared_front, shared_back = _shared(prompt_words)
    inner_prompts = [f" {' '.join(prompt[shared_front : len(prompt) - shared_back])} " for prompt in prompt_words]
    answer_texts = [" ".join(_words(task_text.answer)) for task_text in texts]
    choices = {answer_text for answer_text in answer_texts if answer_text}
    announced = {
        task_index
        for task_index, (prompt, answer_text) in enumerate(zip(inner_prompts, answer_texts, strict=True))
        if answer_text and _announces(prompt, answer_text, choices)
    }
    containing = {
        task_index
        for task_index, (prompt, answer_text) in enumerate(zip(inner_prompts, answer_texts, strict=True))
        if len(answer_text) >= _LONG and f" {answer_text} " in prompt
    }
    giving_indices = announced | containing if len(containing) <= max(1.0, _USUAL * len(texts)) else announced
    return {
        task_index: [
            Finding("answer-in-prompt", f"the prompt has the answer {texts[task_index].answer.strip()[:80]!r}")
        ]
        for task_index in sorted(giving_indices)
    }


def _announces(prompt: str, answer: str, choices: Collection[str]) -> bool:
    """Whether a prompt says what the answer is. One that lists what may be answered (answer yes or no) says nothing."""
    for answer_match in re.finditer(rf" (?:answer|solution|result) (?:is )?{re.escape(answer)} ", prompt):
        following = prompt[answer_match.end() :].partition(" ")[0]
        if following != "or" and following not in choices:
            return True
    return False


def most_frequent_answer(texts: Sequence[TaskText]) -> tuple[str, float]:
    """The answer that most tasks have, and the share of tasks that chance wins: one in the number of different
    answers. Empty where no answers are known, or no two tasks have the same."""
    answer_counts = Counter(known_answer for task_text in texts if (known_answer := _plain(task_text.answer)))
    if not answer_counts or max(answer_counts.values()) < 2:
        return "", 0.0
    plain_answer = answer_counts.most_common(1)[0][0]
    written_answer = next(task_text.answer for task_text in texts if _plain(task_text.answer) == plain_answer)
    return written_answer, 1 / len(answer_counts)


def other_answers(texts: Sequence[TaskText], index: int, most: int) -> list[str]:
    """At most `most` different answers of other tasks, the next ones in order, none of which is that of the task."""
    seen_answers = {_plain(texts[index].answer)}
    other_texts: list[str] = []
    for task_text in (*texts[index + 1 :], *texts[:index]):
        if len(other_texts) < most and (plain_answer := _plain(task_text.answer)) and plain_answer not in seen_answers:
            seen_answers.add(plain_answer)
            other_texts.append(task_text.answer)
    return other_texts


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", _plain(text))


def _numbers(words: Sequence[str]) -> Counter[str]:
    return Counter(text_word for text_word in words if any(map(str.isdigit, text_word)))


def _shingles(words: Sequence[str]) -> frozenset[tuple[str, ...]]:
    if len(words) < _LEAST_WORDS:
        return frozenset()
    return frozenset(
        tuple(words[start_index : start_index + _SHINGLE]) for start_index in range(len(words) - _SHINGLE + 1)
    )


def _rarest(shingles: frozenset[tuple[str, ...]], counts: Counter[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """So many of the rarest shingles that two texts as near as `_NEAR` share one of them (the prefix filter of Bayardo
    et al. 2007), in an order that is the same for all texts."""
    ordered_shingles = sorted(shingles, key=lambda shingle: (counts[shingle], shingle))
    return ordered_shingles[: len(ordered_shingles) - int(_NEAR * len(ordered_shingles) - 1e-9)]


def _shared(texts: Sequence[Sequence[str]]) -> tuple[int, int]:
    """How many words at the beginning and at the end all texts share; 0 where there are no two different texts."""
    different = {tuple(text_words) for text_words in texts}
    if len(different) < 2:
        return 0, 0
    shortest = min(map(len, different))
    shared_front = next(_unlike(different, range(shortest)), shortest)
    shared_back = next((~position for position in _unlike(different, range(-1, -shortest - 1, -1))), shortest)
    return shared_front, min(shared_back, shortest - shared_front)


def _unlike(texts: set[tuple[str, ...]], places: Sequence[int]) -> Iterator[int]:
    return (position for position in places if len({text_words[position] for text_words in texts}) > 1)
