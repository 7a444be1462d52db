"""The whole look at a server: its answers first, then what the folder says, then the verdict.

The server's answers come first, so that nothing waits on a connection while the folder's model computes for minutes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import trio

from agentrl.canary import probe, sampling, verdict
from agentrl.canary.local_model import ADAPTER, SCHEMES, LocalModel, text_tokens
from agentrl.canary.probe import Vocabulary
from agentrl.canary.sampling import rms
from agentrl.canary.server import Sample, ServedTokens, Server, Way, connect
from agentrl.canary.verdict import Depth, Fault, Hypothesis, minus
from agentrl.engine.rendering.renderer import Renderer
from agentrl.engine.weight_sync.canary import Dtype
from agentrl.errors import EngineError, EngineTimeout, EngineUnavailable, ModelError

_DIAGNOSED = 1024  # tokens, at most, on which hypotheses are compared
_TEMPERATURE = 2.0  # of the request that shows whether log-probs follow it
_SHOWN = 6  # parts named in a line
_CONNECTING = 16  # tokens of the probe that finds out what the server is
_LOST = -9998.0  # and below: how servers write the log-prob of a token that was cut away, or a NaN

Mode = Literal["raw", "processed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The server to look at, and the folder that it should compute. `expected_mode` makes a fault of the other way to
    report the log-probs of sampled tokens."""

    url: str
    model: Path
    adapter: Path | None = None
    candidates: Sequence[Path] = ()
    name: str | None = None
    key: str | None = None
    dtype: Dtype | None = None
    expected_mode: Mode | None = None
    max_depth: int | None = None
    deadline_s: float = 120.0


@dataclass(slots=True, kw_only=True)
class Report:
    """The result of a look at a server. `unknown` are questions that stay open, one line each; without faults they make
    it uncertain."""

    way: Way
    name: str | None
    dtype: Dtype
    mode: Mode | None = None
    depths: list[Depth] = field(default_factory=list[Depth])
    faults: list[Fault] = field(default_factory=list[Fault])
    remarks: list[str] = field(default_factory=list[str])
    unknown: list[str] = field(default_factory=list[str])

    def document(self, subject: Subject) -> dict[str, Any]:
        """The report as `--json` prints it."""
        return {
            "url": subject.url,
            "model": str(subject.model),
            "adapter": None if subject.adapter is None else str(subject.adapter),
            "name": self.name,
            "way": self.way,
            "dtype": self.dtype,
            "healthy": False if self.faults else None if self.unknown else True,
            "faults": [fault.document() for fault in self.faults],
            "depths": [asdict(row) for row in self.depths],
            "logprobs": self.mode,
            "remarks": self.remarks,
            "unknown": self.unknown,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    way: Way
    name: str | None
    scores: dict[int, tuple[float, ...]]  # by depth
    special_tokens: tuple[int, ...]
    special: tuple[float, ...]
    base: tuple[float, ...] | None  # of the model below the adapter, at the diagnosed depth
    cached: Sample | None
    fresh: Sample | None
    tempered: Sample | None
    chats: list[tuple[tuple[int, ...], ServedTokens | str]]
    text: ServedTokens | None


def examine(subject: Subject, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Compare a server with a model folder. Raises UsageError for a server or folder that cannot be compared,
    EngineUnavailable and EngineTimeout for a server that is not there, or does not answer in time."""
    vocabulary = probe.read_vocabulary(subject.model)
    answers = trio.run(_ask, subject, vocabulary, progress)
    dtype = subject.dtype or _dtype_of(subject.model)
    report = Report(way=answers.way, name=answers.name, dtype=dtype)
    _judge_tokens(subject, vocabulary, answers, report)
    if any(map(math.isnan, answers.special)) or any(any(map(math.isnan, s)) for s in answers.scores.values()):
        report.faults.insert(0, Fault("not_numbers", "a log-prob of the probe is NaN"))
        return report
    _Comparison(subject, vocabulary, answers, report, progress).judge()
    return report


def _dtype_of(folder: Path) -> Dtype:
    config = json.loads((folder / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return name if name in ("float32", "float16", "bfloat16") else "bfloat16"


def _diagnosed(depths: Sequence[int]) -> int:
    return max([depth for depth in depths if depth <= _DIAGNOSED], default=depths[0])


# --- what the server says ---------------------------------------------------------------------------------------------


async def _ask(subject: Subject, vocabulary: Vocabulary, progress: Callable[[str], None]) -> _Answers:
    server = await connect(
        subject.url,
        key=subject.key,
        name=subject.name,
        adapted=subject.adapter is not None,
        deadline_s=subject.deadline_s,
        probe=probe.draw(vocabulary, _CONNECTING),
    )
    async with aclosing(server.client):
        limits = [fits for fits in (server.fits, _positions(subject.model)) if fits is not None]
        depths = probe.depths(min(limits, default=probe.SHALLOWEST + probe.SAMPLED), subject.max_depth)
        tokens, special = probe.draw(vocabulary, depths[-1]), probe.draw_special(vocabulary, depths[0])
        diagnosed, name = _diagnosed(depths), server.name
        progress(f"{server.url}: {server.way}, {name or 'its only model'}, contexts up to {depths[-1]} tokens")
        # Before anything is scored: what the cache holds of the probe is then from an earlier look at the server, and
        # perhaps from earlier weights.
        cached = await server.sample(tokens[:diagnosed], name, count=probe.SAMPLED)
        fresh_prompt = probe.with_new_start(vocabulary, tokens[: depths[0]])
        fresh = await server.sample(fresh_prompt, name, count=probe.SAMPLED)
        tempered = await server.sample(fresh_prompt, name, count=probe.SAMPLED, temperature=_TEMPERATURE)
        scores = {depth: await server.score(tokens[:depth], name) for depth in depths}
        return _Answers(
            way=server.way,
            name=name,
            scores=scores,
            special_tokens=special,
            special=await server.score(special, name) if special else (),
            base=await server.score(tokens[:diagnosed], server.base) if server.base is not None else None,
            cached=cached,
            fresh=fresh,
            tempered=tempered,
            chats=await _chats(server, subject.model),
            text=await server.text_tokens(probe.TEXT, server.base or name),
        )


async def _chats(server: Server, folder: Path) -> list[tuple[tuple[int, ...], ServedTokens | str]]:
    """The folder's tokens of each conversation with the server's, or the words of its refusal."""
    try:
        renderer = Renderer(folder)
    except ModelError:  # it has no template
        return []
    chats: list[tuple[tuple[int, ...], ServedTokens | str]] = []
    for messages in probe.CONVERSATIONS:
        try:
            ours = renderer.start(messages)
        except ModelError:  # the template takes no such message
            continue
        try:
            served = await server.chat_tokens(messages, server.base or server.name)
        except (EngineUnavailable, EngineTimeout):
            raise
        except EngineError as error:
            chats.append((ours, error.reason))
            continue
        if served is not None:
            chats.append((ours, served))
    return chats


def _positions(folder: Path) -> int | None:
    config = json.loads((folder / "config.json").read_text())
    positions = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


# --- the verdict ------------------------------------------------------------------------------------------------------


def _judge_tokens(subject: Subject, vocabulary: Vocabulary, answers: _Answers, report: Report) -> None:
    refused = [words for _, words in answers.chats if isinstance(words, str)]
    pairs = [(ours, served) for ours, served in answers.chats if not isinstance(served, str)]
    if refused:
        words = f"the server refuses {len(refused)} of {len(answers.chats)} conversations that the folder's renders"
        report.faults.append(Fault("chat_template", f"{words}: {refused[0][:120]}"))
    elif not pairs:
        report.remarks.append("chat template: not compared (the folder has none, or the server has no chats)")
    elif fault := verdict.token_fault(pairs, vocabulary.special, "chat_template"):
        report.faults.append(fault)
    elif all(served.ids is None for _, served in pairs):
        report.remarks.append("chat template: only numbers of tokens were compared, since the server names no ids")
    if answers.text is None:
        return
    ours = text_tokens(subject.model, probe.TEXT)
    if ours is not None and (fault := verdict.token_fault([(ours, answers.text)], vocabulary.special, "tokenizer")):
        report.faults.append(fault)


class _Comparison:
    """Log-probs of the server beside the folder's."""

    def __init__(
        self,
        subject: Subject,
        vocabulary: Vocabulary,
        answers: _Answers,
        report: Report,
        progress: Callable[[str], None],
    ) -> None:
        self._subject, self._vocabulary, self._answers, self._report = subject, vocabulary, answers, report
        self._progress = progress
        self._dtype: Dtype = report.dtype
        self._depths = sorted(answers.scores)
        self._tokens = probe.draw(vocabulary, self._depths[-1])
        self._diagnosed = _diagnosed(self._depths)

    def judge(self) -> None:
        """Fill the report."""
        subject, special = self._subject, self._answers.special_tokens
        passes = [self._tokens[:depth] for depth in self._depths] + ([special] if special else [])
        self._progress("computing the folder's log-probs in bfloat16")
        coarse = self._passes(LocalModel(subject.model, "bfloat16", subject.adapter), passes)
        self._progress("computing the folder's log-probs in float32")
        self._model = LocalModel(subject.model, "float32", subject.adapter)
        exact = self._passes(self._model, passes)
        rounding = [minus(a, b) for a, b in zip(coarse, exact, strict=True)]
        index = self._depths.index(self._diagnosed)
        self._exact, self._rounding = exact[index], rounding[index]
        self._answer = self._answers.scores[self._diagnosed]
        starts = [0, *self._depths[:-1]]
        self._report.depths = [
            verdict.depth_row(depth, start, self._answers.scores[depth], exact[i], rounding[i], self._dtype)
            for i, (depth, start) in enumerate(zip(self._depths, starts, strict=True))
        ]
        if self._judge_weights() and (not special or self._judge_special(exact[-1], rounding[-1])):
            self._judge_samples()

    def _passes(self, model: LocalModel, passes: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        return [model.logprobs(tokens) for tokens in passes]

    def _judge_weights(self) -> bool:
        """Whether the server has the folder's weights, up to its dtype."""
        faults, rounding = self._report.faults, self._rounding
        hypotheses = list(self._hypotheses())
        best = verdict.closest(self._answer, self._exact, hypotheses, rounding, self._dtype)
        reference = self._exact if best is None else best.logprobs
        is_quantized = best is not None and best.fault == "quantized"
        is_exact = is_quantized or verdict.is_near(self._answer, reference, self._dtype, rounding)
        # Before the dtype: some layers of the checkpoint before this one may be as far off as bfloat16 is.
        if not is_exact and (fault := self._partial(reference)):
            faults.append(fault)
            return False
        if best is not None:
            faults.append(verdict.explained(best, self._answer, self._exact))
        if is_quantized:
            return False
        if fault := verdict.dtype_fault(self._answer, reference, rounding, self._dtype):
            faults.append(fault)
            self._dtype = "bfloat16"
        if best is not None:
            return False
        if verdict.is_near(self._answer, self._exact, self._dtype, rounding):
            return self._judge_depths()
        faults.append(self._unexplained())
        return False

    def _judge_depths(self) -> bool:
        """Whether deeper contexts agree as shallow ones do."""
        if self._dtype != self._report.dtype:  # named already
            return True
        if wrong := next((row for row in self._report.depths if not row.is_near), None):
            self._report.faults.append(self._depth_fault(wrong))
        return wrong is None

    def _depth_fault(self, row: Depth) -> Fault:
        first = self._report.depths[0]
        return Fault(
            "depth",
            f"{row.mean:.2g} nats off up to {row.depth} tokens of context, {first.mean:.2g} up to {first.depth}",
        )

    def _hypotheses(self) -> Iterator[Hypothesis]:
        subject, tokens = self._subject, self._tokens[: self._diagnosed]
        if subject.adapter is not None:
            with self._model.without_adapter():
                base = self._model.logprobs(tokens)
            yield Hypothesis("adapter_not_applied", "the model without the adapter", base)
            if line := self._too_close("the adapter", base):
                self._report.unknown.append(line)
        for folder in subject.candidates:
            self._progress(f"computing the log-probs of {folder}")
            logprobs = self._candidate(folder)
            if logprobs is not None:
                is_adapter = (folder / ADAPTER).is_file()
                yield Hypothesis("other_adapter" if is_adapter else "other_checkpoint", str(folder), logprobs)
                if line := self._too_close(str(folder), logprobs):
                    self._report.remarks.append(line)
        for scheme in SCHEMES:
            with self._model.quantized(scheme):
                rounded = self._model.logprobs(tokens)
            yield Hypothesis("quantized", f"the folder with weights rounded to {scheme}", rounded)

    def _candidate(self, folder: Path) -> tuple[float, ...] | None:
        model = self._loaded(folder)
        if model.rows <= max(self._tokens[: self._diagnosed]):
            self._report.remarks.append(f"{folder} has too few tokens to be what the server answers")
            return None
        return model.logprobs(self._tokens[: self._diagnosed])

    def _loaded(self, folder: Path) -> LocalModel:
        is_adapter = (folder / ADAPTER).is_file()
        return LocalModel(self._subject.model, "float32", folder) if is_adapter else LocalModel(folder, "float32")

    def _too_close(self, name: str, other: Sequence[float]) -> str | None:
        if verdict.is_distinguishable(self._exact, other, self._rounding, self._dtype):
            return None
        return f"{name} moves the probe by less than {self._dtype} rounds it: not told apart"

    def _unexplained(self) -> Fault:
        """The fault of log-probs that no hypothesis so far explains."""
        if self._report.depths[0].is_near and (wrong := [row for row in self._report.depths if not row.is_near]):
            return self._depth_fault(wrong[0])
        if fault := self._cut_prompt():
            return fault
        size = rms(minus(self._answer, self._exact))
        evidence = f"{size:.2g} nats (rms) from the folder, where bfloat16 makes {rms(self._rounding):.2g}"
        base = self._answers.base
        if self._subject.adapter is not None and base is not None:
            with self._model.without_adapter():
                exact = self._model.logprobs(self._tokens[: self._diagnosed])
            if verdict.is_near(base, exact, "bfloat16", self._rounding):
                return Fault("other_adapter", f"the model below the adapter agrees; with the adapter it is {evidence}")
        return Fault("other_weights", f"{evidence}; none of {len(self._subject.candidates)} candidates explains it")

    def _cut_prompt(self) -> Fault | None:
        """A setting of sampling in the log-probs of the prompt itself."""
        stop = min(self._diagnosed, probe.SHALLOWEST)
        start = stop - probe.SAMPLED
        tokens = self._tokens[:stop]
        return self._setting(tokens[:start], tokens[start:], self._answer[start - 1 : stop - 1], "the prompt")

    def _setting(
        self, prompt: Sequence[int], tokens: Sequence[int], reported: Sequence[float], place: str
    ) -> Fault | None:
        logits = self._model.logits([*prompt, *tokens], len(prompt))
        is_reported = [number > _LOST for number in reported]
        if not any(is_reported):
            return None
        setting = sampling.explain(
            logits[is_reported],
            [token for token, is_there in zip(tokens, is_reported, strict=True) if is_there],
            prompt,
            [number for number in reported if number > _LOST],
            verdict.limit_of(self._dtype, self._rounding),
        )
        if setting is None:
            return None
        return Fault(
            setting.kind,
            f"log-probs of {place} are those of {setting.name} {setting.value:.3g}, which was not requested:"
            f" {setting.residual:.2g} nats (rms) are left",
        )

    def _partial(self, reference: Sequence[float]) -> Fault | None:
        """Weights of a candidate in some parts of the model, and the folder's in the others, that are far nearer than
        `reference` is."""
        for folder in self._subject.candidates:
            other = self._loaded(folder)
            if not other.has_shapes_of(self._model):
                continue
            self._progress(f"looking for layers of {folder} among the folder's")
            best, least = list[str](), rms(minus(self._answer, reference)) / 2
            for stale in self._splits(other):
                logprobs = self._mixed(other, stale)
                distance = rms(minus(self._answer, logprobs))
                if distance < least and verdict.is_near(self._answer, logprobs, "bfloat16", self._rounding):
                    best, least = stale, distance
                if best and verdict.is_near(self._answer, logprobs, self._dtype, self._rounding):
                    break
            if best:
                names = ", ".join(best[:_SHOWN]) + (f" and {len(best) - _SHOWN} more" * (len(best) > _SHOWN))
                return Fault("partial_update", f"of {folder}, not of the folder: {names}; {least:.2g} nats (rms) left")
        return None

    def _splits(self, other: LocalModel) -> Iterator[list[str]]:
        """Parts that an update may have missed, the likeliest first."""
        parts = self._model.layers()
        # After small steps the parts' effects add up, so a fit says at once which of them are stale, several as well.
        ways = np.array([minus(self._mixed(other, [part]), self._exact) for part in parts])
        shares = np.linalg.lstsq(ways.T, np.array(minus(self._answer, self._exact)), rcond=None)[0]
        yield [part for part, share in zip(parts, shares, strict=True) if share > 0.5]
        # After large ones they do not: then a part is missing, or the update broke off after some.
        yield from ([part] for part in parts)
        yield from (parts[start:] for start in range(1, len(parts) - 1))

    def _mixed(self, other: LocalModel, parts: Sequence[str]) -> tuple[float, ...]:
        with self._model.with_parts_of(other, parts):
            return self._model.logprobs(self._tokens[: self._diagnosed])

    def _judge_special(self, exact: Sequence[float], rounding: Sequence[float]) -> bool:
        """Whether the probe of special tokens agrees as the one of ordinary tokens does; adds a fault to the report if
        not. `exact` are the folder's log-probs of that probe in float32, `rounding` how far bfloat16 moves each."""
        answers = self._answers
        # Rounding differs more between few tokens than between many: the coarser limit of both probes counts.
        coarser = max(rounding, self._rounding, key=lambda each: verdict.limit_of(self._dtype, each))
        if verdict.is_near(answers.special, exact, self._dtype, coarser):
            return True
        limit, texts = verdict.limit_of(self._dtype, coarser), self._vocabulary.texts
        fault = verdict.special_fault(answers.special_tokens, answers.special, exact, limit, texts)
        self._report.faults.append(fault)
        return False

    def _judge_samples(self) -> None:
        """How the log-probs of sampled tokens are reported, and whether the prefix cache is that of these weights."""
        answers, report = self._answers, self._report
        if answers.fresh is None or answers.cached is None or answers.tempered is None:
            report.remarks.append("sampled tokens: not compared, since the server does not name them with log-probs")
            return
        samples = (answers.fresh, answers.cached, answers.tempered)
        beyond = max(token for sample in samples for token in sample.token_ids)
        if beyond >= self._model.rows:
            evidence = f"it samples token {beyond}, and the folder has {self._model.rows}"
            report.faults.append(Fault("other_weights", evidence))
            return
        if not self._agrees(answers.fresh):
            sample = answers.fresh
            fault = self._setting(sample.prompt, sample.token_ids, sample.logprobs, "sampled tokens")
            report.faults.append(fault or self._processed(sample))
            return
        if not self._agrees(answers.cached):
            report.faults.append(
                Fault(
                    "stale_prefix_cache",
                    f"after a prompt that the cache may hold, sampled tokens are {self._off(answers.cached):.2g} nats"
                    f" (rms) off; after one that it cannot hold, {self._off(answers.fresh):.2g}",
                )
            )
        self._judge_mode(answers.tempered)

    def _processed(self, sample: Sample) -> Fault:
        return Fault(
            "processed",
            f"log-probs of sampled tokens are {self._off(sample):.2g} nats (rms) off, those of the prompt agree; no one"
            " setting of sampling explains it",
        )

    def _judge_mode(self, sample: Sample) -> None:
        logits = self._model.logits([*sample.prompt, *sample.token_ids], len(sample.prompt))
        distances = {
            mode: rms(minus(sample.logprobs, sampling.tempered(logits, sample.token_ids, temperature).tolist()))
            for mode, temperature in (("raw", 1.0), ("processed", _TEMPERATURE))
        }
        mode: Mode = "raw" if distances["raw"] < distances["processed"] else "processed"
        self._report.mode = mode
        if self._subject.expected_mode not in (None, mode):
            evidence = (
                f"at temperature {_TEMPERATURE:g} log-probs of samples are {mode}: {distances[mode]:.2g} nats off"
            )
            self._report.faults.append(Fault("logprobs_mode", evidence))

    def _differences(self, sample: Sample) -> list[float]:
        logits = self._model.logits([*sample.prompt, *sample.token_ids], len(sample.prompt))
        return minus(sample.logprobs, sampling.tempered(logits, sample.token_ids, 1.0).tolist())

    def _off(self, sample: Sample) -> float:
        return rms(self._differences(sample))

    def _agrees(self, sample: Sample) -> bool:
        apart = self._differences(sample)
        return verdict.is_near(apart, [0.0] * len(apart), self._dtype, self._rounding)
