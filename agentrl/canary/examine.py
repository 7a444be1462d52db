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
            "depths": [asdict(depth_row) for depth_row in self.depths],
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
    server_answers = trio.run(_ask, subject, vocabulary, progress)
    expected_dtype = subject.dtype or _dtype_of(subject.model)
    report = Report(way=server_answers.way, name=server_answers.name, dtype=expected_dtype)
    _judge_tokens(subject, vocabulary, server_answers, report)
    if any(map(math.isnan, server_answers.special)) or any(
        any(map(math.isnan, depth_scores)) for depth_scores in server_answers.scores.values()
    ):
        report.faults.insert(0, Fault("not_numbers", "a log-prob of the probe is NaN"))
        return report
    _Comparison(subject, vocabulary, server_answers, report, progress).judge()
    return report


def _dtype_of(folder: Path) -> Dtype:
    model_config = json.loads((folder / "config.json").read_text())
    dtype_name = model_config.get("dtype") or model_config.get("torch_dtype") or "float32"
    return dtype_name if dtype_name in ("float32", "float16", "bfloat16") else "bfloat16"


def _diagnosed(depths: Sequence[int]) -> int:
    return max([probe_depth for probe_depth in depths if probe_depth <= _DIAGNOSED], default=depths[0])


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
        context_limits = [
            context_limit for context_limit in (server.fits, _positions(subject.model)) if context_limit is not None
        ]
        probe_depths = probe.depths(min(context_limits, default=probe.SHALLOWEST + probe.SAMPLED), subject.max_depth)
        probe_tokens = probe.draw(vocabulary, probe_depths[-1])
        special_tokens = probe.draw_special(vocabulary, probe_depths[0])
        diagnosed_depth, model_name = _diagnosed(probe_depths), server.name
        progress(
            f"{server.url}: {server.way}, {model_name or 'its only model'}, contexts up to {probe_depths[-1]} tokens"
        )
        # Before anything is scored: what the cache holds of the probe is then from an earlier look at the server, and
        # perhaps from earlier weights.
        cached_sample = await server.sample(probe_tokens[:diagnosed_depth], model_name, count=probe.SAMPLED)
        fresh_prompt = probe.with_new_start(vocabulary, probe_tokens[: probe_depths[0]])
        fresh_sample = await server.sample(fresh_prompt, model_name, count=probe.SAMPLED)
        tempered_sample = await server.sample(fresh_prompt, model_name, count=probe.SAMPLED, temperature=_TEMPERATURE)
        depth_scores = {
            probe_depth: await server.score(probe_tokens[:probe_depth], model_name) for probe_depth in probe_depths
        }
        return _Answers(
            way=server.way,
            name=model_name,
            scores=depth_scores,
            special_tokens=special_tokens,
            special=await server.score(special_tokens, model_name) if special_tokens else (),
            base=await server.score(probe_tokens[:diagnosed_depth], server.base) if server.base is not None else None,
            cached=cached_sample,
            fresh=fresh_sample,
            tempered=tempered_sample,
            chats=await _chats(server, subject.model),
            text=await server.text_tokens(probe.TEXT, server.base or model_name),
        )


async def _chats(server: Server, folder: Path) -> list[tuple[tuple[int, ...], ServedTokens | str]]:
    """The folder's tokens of each conversation with the server's, or the words of its refusal."""
    try:
        renderer = Renderer(folder)
    except ModelError:  # it has no template
        return []
    compared_chats: list[tuple[tuple[int, ...], ServedTokens | str]] = []
    for messages in probe.CONVERSATIONS:
        try:
            folder_tokens = renderer.start(messages)
        except ModelError:  # the template takes no such message
            continue
        try:
            served_tokens = await server.chat_tokens(messages, server.base or server.name)
        except (EngineUnavailable, EngineTimeout):
            raise
        except EngineError as refusal:
            compared_chats.append((folder_tokens, refusal.reason))
            continue
        if served_tokens is not None:
            compared_chats.append((folder_tokens, served_tokens))
    return compared_chats


def _positions(folder: Path) -> int | None:
    model_config = json.loads((folder / "config.json").read_text())
    text_config = model_config.get("text_config", {})
    positions = model_config.get("max_position_embeddings") or text_config.get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


# --- the verdict ------------------------------------------------------------------------------------------------------


def _judge_tokens(subject: Subject, vocabulary: Vocabulary, answers: _Answers, report: Report) -> None:
    refusals = [refusal for _, refusal in answers.chats if isinstance(refusal, str)]
    token_pairs = [
        (folder_tokens, served_tokens)
        for folder_tokens, served_tokens in answers.chats
        if not isinstance(served_tokens, str)
    ]
    if refusals:
        refusal = f"the server refuses {len(refusals)} of {len(answers.chats)} conversations that the folder's renders"
        report.faults.append(Fault("chat_template", f"{refusal}: {refusals[0][:120]}"))
    elif not token_pairs:
        report.remarks.append("chat template: not compared (the folder has none, or the server has no chats)")
    elif token_fault := verdict.token_fault(token_pairs, vocabulary.special, "chat_template"):
        report.faults.append(token_fault)
    elif all(served_tokens.ids is None for _, served_tokens in token_pairs):
        report.remarks.append("chat template: only numbers of tokens were compared, since the server names no ids")
    if answers.text is None:
        return
    folder_tokens = text_tokens(subject.model, probe.TEXT)
    if folder_tokens is not None and (
        token_fault := verdict.token_fault([(folder_tokens, answers.text)], vocabulary.special, "tokenizer")
    ):
        report.faults.append(token_fault)


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
        subject, special_tokens = self._subject, self._answers.special_tokens
        probe_passes = [self._tokens[:probe_depth] for probe_depth in self._depths] + (
            [special_tokens] if special_tokens else []
        )
        self._progress("computing the folder's log-probs in bfloat16")
        coarse_logprobs = self._passes(LocalModel(subject.model, "bfloat16", subject.adapter), probe_passes)
        self._progress("computing the folder's log-probs in float32")
        self._model = LocalModel(subject.model, "float32", subject.adapter)
        exact_logprobs = self._passes(self._model, probe_passes)
        rounding = [
            minus(coarse_pass, exact_pass)
            for coarse_pass, exact_pass in zip(coarse_logprobs, exact_logprobs, strict=True)
        ]
        diagnosed_index = self._depths.index(self._diagnosed)
        self._exact, self._rounding = exact_logprobs[diagnosed_index], rounding[diagnosed_index]
        self._answer = self._answers.scores[self._diagnosed]
        start_positions = [0, *self._depths[:-1]]
        self._report.depths = [
            verdict.depth_row(
                probe_depth,
                start_position,
                self._answers.scores[probe_depth],
                exact_logprobs[pass_index],
                rounding[pass_index],
                self._dtype,
            )
            for pass_index, (probe_depth, start_position) in enumerate(zip(self._depths, start_positions, strict=True))
        ]
        if self._judge_weights() and (not special_tokens or self._judge_special(exact_logprobs[-1], rounding[-1])):
            self._judge_samples()

    def _passes(self, model: LocalModel, passes: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        return [model.logprobs(pass_tokens) for pass_tokens in passes]

    def _judge_weights(self) -> bool:
        """Whether the server has the folder's weights, up to its dtype."""
        report_faults, rounding = self._report.faults, self._rounding
        hypotheses = list(self._hypotheses())
        best_hypothesis = verdict.closest(self._answer, self._exact, hypotheses, rounding, self._dtype)
        reference = self._exact if best_hypothesis is None else best_hypothesis.logprobs
        is_quantized = best_hypothesis is not None and best_hypothesis.fault == "quantized"
        is_exact = is_quantized or verdict.is_near(self._answer, reference, self._dtype, rounding)
        # Before the dtype: some layers of the checkpoint before this one may be as far off as bfloat16 is.
        if not is_exact and (fault := self._partial(reference)):
            report_faults.append(fault)
            return False
        if best_hypothesis is not None:
            report_faults.append(verdict.explained(best_hypothesis, self._answer, self._exact))
        if is_quantized:
            return False
        if fault := verdict.dtype_fault(self._answer, reference, rounding, self._dtype):
            report_faults.append(fault)
            self._dtype = "bfloat16"
        if best_hypothesis is not None:
            return False
        if verdict.is_near(self._answer, self._exact, self._dtype, rounding):
            return self._judge_depths()
        report_faults.append(self._unexplained())
        return False

    def _judge_depths(self) -> bool:
        """Whether deeper contexts agree as shallow ones do."""
        if self._dtype != self._report.dtype:  # named already
            return True
        if wrong_row := next((depth_row for depth_row in self._report.depths if not depth_row.is_near), None):
            self._report.faults.append(self._depth_fault(wrong_row))
        return wrong_row is None

    def _depth_fault(self, row: Depth) -> Fault:
        first_row = self._report.depths[0]
        return Fault(
            "depth",
            f"{row.mean:.2g} nats off up to {row.depth} tokens of context, {first_row.mean:.2g} up to "
            f"{first_row.depth}",
        )

    def _hypotheses(self) -> Iterator[Hypothesis]:
        subject, probe_tokens = self._subject, self._tokens[: self._diagnosed]
        if subject.adapter is not None:
            with self._model.without_adapter():
                base_logprobs = self._model.logprobs(probe_tokens)
            yield Hypothesis("adapter_not_applied", "the model without the adapter", base_logprobs)
            if uncertainty := self._too_close("the adapter", base_logprobs):
                self._report.unknown.append(uncertainty)
        for candidate_folder in subject.candidates:
            self._progress(f"computing the log-probs of {candidate_folder}")
            logprobs = self._candidate(candidate_folder)
            if logprobs is not None:
                is_adapter = (candidate_folder / ADAPTER).is_file()
                yield Hypothesis("other_adapter" if is_adapter else "other_checkpoint", str(candidate_folder), logprobs)
                if uncertainty := self._too_close(str(candidate_folder), logprobs):
                    self._report.remarks.append(uncertainty)
        for rounding_scheme in SCHEMES:
            with self._model.quantized(rounding_scheme):
                rounded_logprobs = self._model.logprobs(probe_tokens)
            yield Hypothesis("quantized", f"the folder with weights rounded to {rounding_scheme}", rounded_logprobs)

    def _candidate(self, folder: Path) -> tuple[float, ...] | None:
        candidate_model = self._loaded(folder)
        if candidate_model.rows <= max(self._tokens[: self._diagnosed]):
            self._report.remarks.append(f"{folder} has too few tokens to be what the server answers")
            return None
        return candidate_model.logprobs(self._tokens[: self._diagnosed])

    def _loaded(self, folder: Path) -> LocalModel:
        is_adapter = (folder / ADAPTER).is_file()
        return LocalModel(self._subject.model, "float32", folder) if is_adapter else LocalModel(folder, "float32")

    def _too_close(self, name: str, other: Sequence[float]) -> str | None:
        if verdict.is_distinguishable(self._exact, other, self._rounding, self._dtype):
            return None
        return f"{name} moves the probe by less than {self._dtype} rounds it: not told apart"

    def _unexplained(self) -> Fault:
        """The fault of log-probs that no hypothesis so far explains."""
        if self._report.depths[0].is_near and (
            wrong_rows := [depth_row for depth_row in self._report.depths if not depth_row.is_near]
        ):
            return self._depth_fault(wrong_rows[0])
        if prompt_fault := self._cut_prompt():
            return prompt_fault
        rms_distance = rms(minus(self._answer, self._exact))
        evidence = f"{rms_distance:.2g} nats (rms) from the folder, where bfloat16 makes {rms(self._rounding):.2g}"
        base_logprobs = self._answers.base
        if self._subject.adapter is not None and base_logprobs is not None:
            with self._model.without_adapter():
                exact_logprobs = self._model.logprobs(self._tokens[: self._diagnosed])
            if verdict.is_near(base_logprobs, exact_logprobs, "bfloat16", self._rounding):
                return Fault("other_adapter", f"the model below the adapter agrees; with the adapter it is {evidence}")
        return Fault("other_weights", f"{evidence}; none of {len(self._subject.candidates)} candidates explains it")

    def _cut_prompt(self) -> Fault | None:
        """A setting of sampling in the log-probs of the prompt itself."""
        stop_position = min(self._diagnosed, probe.SHALLOWEST)
        start_position = stop_position - probe.SAMPLED
        probe_tokens = self._tokens[:stop_position]
        return self._setting(
            probe_tokens[:start_position],
            probe_tokens[start_position:],
            self._answer[start_position - 1 : stop_position - 1],
            "the prompt",
        )

    def _setting(
        self, prompt: Sequence[int], tokens: Sequence[int], reported: Sequence[float], place: str
    ) -> Fault | None:
        token_logits = self._model.logits([*prompt, *tokens], len(prompt))
        is_reported = [reported_logprob > _LOST for reported_logprob in reported]
        if not any(is_reported):
            return None
        setting = sampling.explain(
            token_logits[is_reported],
            [drawn_token for drawn_token, is_there in zip(tokens, is_reported, strict=True) if is_there],
            prompt,
            [reported_logprob for reported_logprob in reported if reported_logprob > _LOST],
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
        for candidate_folder in self._subject.candidates:
            candidate_model = self._loaded(candidate_folder)
            if not candidate_model.has_shapes_of(self._model):
                continue
            self._progress(f"looking for layers of {candidate_folder} among the folder's")
            best_parts, least_distance = list[str](), rms(minus(self._answer, reference)) / 2
            for stale_parts in self._splits(candidate_model):
                logprobs = self._mixed(candidate_model, stale_parts)
                distance = rms(minus(self._answer, logprobs))
                if distance < least_distance and verdict.is_near(self._answer, logprobs, "bfloat16", self._rounding):
                    best_parts, least_distance = stale_parts, distance
                if best_parts and verdict.is_near(self._answer, logprobs, self._dtype, self._rounding):
                    break
            if best_parts:
                shown_parts = ", ".join(best_parts[:_SHOWN]) + (
                    f" and {len(best_parts) - _SHOWN} more" * (len(best_parts) > _SHOWN)
                )
                return Fault(
                    "partial_update",
                    f"of {candidate_folder}, not of the folder: {shown_parts}; {least_distance:.2g} nats (rms) left",
                )
        return None

    def _splits(self, other: LocalModel) -> Iterator[list[str]]:
        """Parts that an update may have missed, the likeliest first."""
        part_names = self._model.layers()
        # After small steps the parts' effects add up, so a fit says at once which of them are stale, several as well.
        part_effects = np.array([minus(self._mixed(other, [part_name]), self._exact) for part_name in part_names])
        part_shares = np.linalg.lstsq(part_effects.T, np.array(minus(self._answer, self._exact)), rcond=None)[0]
        yield [part_name for part_name, part_share in zip(part_names, part_shares, strict=True) if part_share > 0.5]
        # After large ones they do not: then a part is missing, or the update broke off after some.
        yield from ([part_name] for part_name in part_names)
        yield from (part_names[start_index:] for start_index in range(1, len(part_names) - 1))

    def _mixed(self, other: LocalModel, parts: Sequence[str]) -> tuple[float, ...]:
        with self._model.with_parts_of(other, parts):
            return self._model.logprobs(self._tokens[: self._diagnosed])

    def _judge_special(self, exact: Sequence[float], rounding: Sequence[float]) -> bool:
        """Whether the probe of special tokens agrees as the one of ordinary tokens does; adds a fault to the report if
        not. `exact` are the folder's log-probs of that probe in float32, `rounding` how far bfloat16 moves each."""
        server_answers = self._answers
        # Rounding differs more between few tokens than between many: the coarser limit of both probes counts.
        coarser_rounding = max(rounding, self._rounding, key=lambda each: verdict.limit_of(self._dtype, each))
        if verdict.is_near(server_answers.special, exact, self._dtype, coarser_rounding):
            return True
        rounding_limit, token_texts = verdict.limit_of(self._dtype, coarser_rounding), self._vocabulary.texts
        special_fault = verdict.special_fault(
            server_answers.special_tokens, server_answers.special, exact, rounding_limit, token_texts
        )
        self._report.faults.append(special_fault)
        return False

    def _judge_samples(self) -> None:
        """How the log-probs of sampled tokens are reported, and whether the prefix cache is that of these weights."""
        server_answers, report = self._answers, self._report
        if server_answers.fresh is None or server_answers.cached is None or server_answers.tempered is None:
            report.remarks.append("sampled tokens: not compared, since the server does not name them with log-probs")
            return
        server_samples = (server_answers.fresh, server_answers.cached, server_answers.tempered)
        largest_token = max(
            sampled_token for server_sample in server_samples for sampled_token in server_sample.token_ids
        )
        if largest_token >= self._model.rows:
            evidence = f"it samples token {largest_token}, and the folder has {self._model.rows}"
            report.faults.append(Fault("other_weights", evidence))
            return
        if not self._agrees(server_answers.fresh):
            server_sample = server_answers.fresh
            sampling_fault = self._setting(
                server_sample.prompt, server_sample.token_ids, server_sample.logprobs, "sampled tokens"
            )
            report.faults.append(sampling_fault or self._processed(server_sample))
            return
        if not self._agrees(server_answers.cached):
            report.faults.append(
                Fault(
                    "stale_prefix_cache",
                    "after a prompt that the cache may hold, sampled tokens are"
                    f" {self._off(server_answers.cached):.2g} nats (rms) off; after one that it cannot hold,"
                    f" {self._off(server_answers.fresh):.2g}",
                )
            )
        self._judge_mode(server_answers.tempered)

    def _processed(self, sample: Sample) -> Fault:
        return Fault(
            "processed",
            f"log-probs of sampled tokens are {self._off(sample):.2g} nats (rms) off, those of the prompt agree; no one"
            " setting of sampling explains it",
        )

    def _judge_mode(self, sample: Sample) -> None:
        token_logits = self._model.logits([*sample.prompt, *sample.token_ids], len(sample.prompt))
        distances = {
            logprobs_mode: rms(
                minus(sample.logprobs, sampling.tempered(token_logits, sample.token_ids, temperature).tolist())
            )
            for logprobs_mode, temperature in (("raw", 1.0), ("processed", _TEMPERATURE))
        }
        logprobs_mode: Mode = "raw" if distances["raw"] < distances["processed"] else "processed"
        self._report.mode = logprobs_mode
        if self._subject.expected_mode not in (None, logprobs_mode):
            evidence = (
                f"at temperature {_TEMPERATURE:g} log-probs of samples are {logprobs_mode}:"
                f" {distances[logprobs_mode]:.2g} nats off"
            )
            self._report.faults.append(Fault("logprobs_mode", evidence))

    def _differences(self, sample: Sample) -> list[float]:
        token_logits = self._model.logits([*sample.prompt, *sample.token_ids], len(sample.prompt))
        return minus(sample.logprobs, sampling.tempered(token_logits, sample.token_ids, 1.0).tolist())

    def _off(self, sample: Sample) -> float:
        return rms(self._differences(sample))

    def _agrees(self, sample: Sample) -> bool:
        differences = self._differences(sample)
        return verdict.is_near(differences, [0.0] * len(differences), self._dtype, self._rounding)
