"""Continuous batching: requests come and go between two forward passes, weights change between two forward passes.

Owns the running requests, the order in which prompts are computed, the sampling distribution, and the version stamped
on each token. Knows neither HTTP nor files: a request's tokens leave through its `sink`.

One `step` is one forward pass: every running request that is up to date gives one row, and new prompts (or the new
part of a longer context) are computed beside them, up to `pass_tokens` tokens. A prompt that another request is just
computing waits for it and copies the shared part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import torch

from agentrl.engine.embedded.cache_slots import CacheSlots, share
from agentrl.engine.embedded.lora import Adapter, adapted
from agentrl.engine.embedded.model import EmbeddedModel, KVStore, PackedWeights, PassRows, TokenRun
from agentrl.records import Finish, SamplingParams, VersionSpan
from agentrl.tokens import images
from agentrl.tokens.images import Image
from agentrl.tokens.vision import Vision

if TYPE_CHECKING:  # it loads transformers
    from agentrl.engine.embedded.vision_tower import VisionTower

# pyright: reportUnknownMemberType=false
# (torch leaves parts of its signatures untyped)


def sample(
    logits_BV: torch.Tensor, rows: Sequence[SamplingParams], generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[int, list[int]]]:
    """One token a row, [B], and its log-probability under the distribution it was drawn from, [B], in nats; and by
    number of each row whose settings cut, the tokens that could be drawn, ascending.

    A greedy row's log-probability is that of the unscaled distribution, as vLLM reports it."""
    # All numbers are drawn before the rows are divided, so that `_SAMPLED_AT_ONCE`, which is a matter of cache size,
    # does not change what a seed gives.
    uniform_B1 = torch.rand(len(rows), 1, generator=generator)
    tokens, logprobs, kept_sets = list[torch.Tensor](), list[torch.Tensor](), dict[int, list[int]]()
    for first_row in range(0, len(rows), _SAMPLED_AT_ONCE):
        row_slice = slice(first_row, first_row + _SAMPLED_AT_ONCE)
        tokens_B1, logprobs_BV = _draw(logits_BV[row_slice], rows[row_slice], uniform_B1[row_slice])
        tokens.append(tokens_B1)
        logprobs.append(logprobs_BV.gather(-1, tokens_B1))
        for row_number, sampling in enumerate(rows[row_slice]):
            if sampling.cuts:
                kept_sets[first_row + row_number] = logprobs_BV[row_number].isfinite().nonzero()[:, 0].tolist()
    return torch.cat(tokens).squeeze(-1), torch.cat(logprobs).squeeze(-1), kept_sets


def _draw(
    logits_BV: torch.Tensor, rows: Sequence[SamplingParams], uniform_B1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that numbers from [0, 1) draw, [B, 1], and the distributions that they were drawn from."""
    logprobs_BV = distribution(logits_BV, rows)
    # Inverse-CDF sampling: one random number decides a row. `torch.multinomial` takes as many for each row as the
    # vocabulary has entries.
    cdf_BV = logprobs_BV.exp().cumsum_(-1)
    # The sum of 150,000 rounded probabilities is not 1. Without this factor a number near 1 would lie beyond the last
    # entry, and the draw would be a token that was cut.
    total_B1 = cdf_BV[:, -1:]
    # Strictly below the total: the first entry above `drawn` then has a probability that is not zero.
    drawn_B1 = torch.minimum(uniform_B1 * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    tokens_B1 = torch.searchsorted(cdf_BV, drawn_B1, right=True)
    greedy_rows = [row for row, sampling in enumerate(rows) if sampling.temperature == 0]
    if greedy_rows:
        tokens_B1[greedy_rows] = logits_BV[greedy_rows].argmax(-1, keepdim=True)
    return tokens_B1, logprobs_BV


def distribution(logits_BV: torch.Tensor, rows: Sequence[SamplingParams]) -> torch.Tensor:
    """Log-probabilities, [B, V], after temperature, then min-p, top-k and top-p; what is cut off is minus infinity."""
    scaled_BV = logits_BV
    # The usual case copies nothing: logits of a large batch are many megabytes, and a division by 1 would read and
    # write all of them.
    if any(row.temperature not in (0, 1) for row in rows):
        divisors = [row.temperature or 1.0 for row in rows]
        scaled_BV = logits_BV / torch.tensor(divisors).unsqueeze(-1)
    cut_rows = [row for row, sampling in enumerate(rows) if sampling.cuts]
    if cut_rows:
        scaled_BV = scaled_BV.clone() if scaled_BV is logits_BV else scaled_BV
        scaled_BV[cut_rows] = _cut(scaled_BV[cut_rows], [rows[row] for row in cut_rows])
    return torch.log_softmax(scaled_BV, -1)


def _cut(logits_BV: torch.Tensor, rows: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits with minus infinity for what is cut. Order and ties are vLLM's: tokens as likely as the last of the
    `top_k` stay, and of equal ones at the edge of `top_p` some stay."""
    vocab = logits_BV.shape[-1]
    top_p_B1, min_p_B1 = (torch.tensor([[getattr(row, name)] for row in rows]) for name in ("top_p", "min_p"))
    top_k_B1 = torch.tensor([[row.top_k if 0 < row.top_k < vocab else vocab] for row in rows])
    probabilities_BV = logits_BV.softmax(-1)
    rare_BV = probabilities_BV < min_p_B1 * probabilities_BV.amax(-1, keepdim=True)
    ascending_BV, order_BV = logits_BV.masked_fill(rare_BV, float("-inf")).sort(dim=-1)
    # The value of the k-th largest logit, and not its place: all tokens that are as likely stay, as in vLLM. By place
    # the kept set would depend on how the sort orders ties, and engine and learner could disagree about it.
    last_B1 = ascending_BV.gather(-1, vocab - top_k_B1)
    ascending_BV = ascending_BV.masked_fill(ascending_BV < last_B1, float("-inf"))
    beyond_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - top_p_B1
    # The likeliest token always stays: with a tiny `top_p`, or after rounding, nothing would be left to draw from.
    beyond_BV[:, -1] = False
    ascending_BV = ascending_BV.masked_fill(beyond_BV & (top_p_B1 < 1), float("-inf"))
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, ascending_BV)


# A pass of patience delays a first token; what it saves for a shorter part is less than that.
_WORTH_WAITING = 16  # tokens of a shared prompt for which a request waits a pass rather than compute them again

_SAMPLED_AT_ONCE = 8  # rows whose distributions are held at a time: few enough to stay in the cache

_SCORED_AT_ONCE = 256  # prompt tokens whose logits are held at a time


@dataclass(frozen=True, slots=True)
class Emission:
    """New tokens of a request. Spans count from the request's first sampled token. `kept` has the set that each token
    was drawn from, of a request whose settings cut."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish: Finish | None
    kept: list[list[int]] = field(default_factory=list[list[int]])


class ShownImages:
    """The images of a prompt: where their tokens lie, and where every token of the request stands."""

    def __init__(self, token_ids: Sequence[int], known: Mapping[int, Image], vision: Vision) -> None:
        positions = vision.positions(token_ids, known)
        self._positions_T3 = torch.tensor(positions)
        # Qwen2-VL numbers an image's tokens by row and column, which takes fewer numbers than tokens (arXiv
        # 2409.12191, section 2.1). So the text behind an image stands at a lower position than its index says.
        self._ahead = int(self._positions_T3.max()) + 1 - len(positions)  # of a sampled token, before its place
        self._spans = [(start, stop, known[token]) for token, start, stop in images.runs(token_ids)]

    def turned(self, start: int, count: int) -> torch.Tensor:
        """Time, row and column [count, 3] of so many tokens from `start` on."""
        prompt_T3 = self._positions_T3[start : start + count]
        after_T = torch.arange(start + len(prompt_T3), start + count) + self._ahead
        return torch.cat([prompt_T3, after_T.unsqueeze(1).expand(-1, 3)])

    def within(self, start: int, count: int, tower: VisionTower) -> Iterator[tuple[int, torch.Tensor]]:
        """The tokens of images among these: the first one's number, from `start` on, and what they are."""
        for first_position, end_position, image in self._spans:
            low_position, high_position = max(first_position, start), min(end_position, start + count)
            if low_position < high_position:
                yield low_position - start, tower(image)[low_position - first_position : high_position - first_position]


@dataclass(slots=True, kw_only=True, eq=False)
class BatchRequest:
    """One generation. `tokens` holds the prompt and, behind it, the sampled tokens; those of images are negative, so
    that an array of int32 holds them."""

    id: str
    tokens: list[int]
    sampling: SamplingParams
    sink: Callable[[Emission], None]
    adapter: Adapter | None = None  # over the weights, for all its tokens
    shown: ShownImages | None = None  # the images of its prompt
    prompt_length: int = 0
    logprobs: list[float] = field(default_factory=list[float])
    kept: list[list[int]] = field(default_factory=list[list[int]])
    emitted: int = 0
    slot: int = -1
    cached: int = 0  # prompt tokens whose keys and values were cached, not computed
    version_starts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (first token, version)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def sampled(self) -> int:
        """How many tokens were sampled so far."""
        return len(self.logprobs)

    def spans(self, start: int, end: int) -> list[VersionSpan]:
        """Version spans of sampled tokens [start, end)."""
        bounds = [*(first for first, _ in self.version_starts), end]
        spans = [VersionSpan(v, max(a, start), min(bounds[i + 1], end)) for i, (a, v) in enumerate(self.version_starts)]
        return [span for span in spans if span.start < span.end]


@dataclass(slots=True)
class Counters:
    """Counts since the start, in tokens unless the name says otherwise."""

    generated: int = 0
    prompt: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    passes: int = 0


class PassPlanner:
    """Chooses which tokens the next pass computes, and lays them out as rows of the model."""

    def __init__(self, model: EmbeddedModel, slots: CacheSlots, counters: Counters, pass_tokens: int) -> None:
        self._model, self._slots, self._counters, self._pass_tokens = model, slots, counters, pass_tokens

    def plan(
        self, running: Mapping[str, BatchRequest], version: int
    ) -> tuple[list[BatchRequest], list[tuple[BatchRequest, int]]]:
        """The requests that get one row, and those that get several, with their number. Prompts are taken in order of
        arrival."""
        slots, token_budget = self._slots, self._pass_tokens
        single_requests: list[BatchRequest] = []
        token_runs: list[tuple[BatchRequest, int]] = []
        for request in running.values():
            computed = int(slots.computed[request.slot])
            # `cached < 0` marks a request that was admitted and never planned: one whose whole prompt is in its slot
            # already still has to be counted, and its last token computed for its logits.
            if computed < len(request.tokens) - 1 or request.cached < 0:
                # Decoding rows are never put off for prompts: the budget bounds new prompt tokens alone, so that a
                # long prompt delays a running turn by one bounded pass (Sarathi-Serve, arXiv 2403.02310, calls it
                # chunked prefill).
                if token_budget <= 0:
                    continue
                computed = slots.adopt(request.slot, _key(request, version))
                # A group's members arrive together. The first of them computes the prompt in this pass, and the others
                # copy it in the next one: a pass of patience costs less than the same prompt once for each member.
                # Keys and values depend on the weights below, and an adapter changes them: a prefix of another
                # adapter's request has the same tokens and other numbers.
                leading_slots = [leader.slot for leader, _ in token_runs if leader.adapter is request.adapter]
                if leading_slots and slots.shared_with(request.slot, leading_slots) >= computed + _WORTH_WAITING:
                    continue
                if request.cached < 0:
                    self._count_prefix(request, computed)
            pending_count = len(request.tokens) - computed
            if pending_count == 1:
                single_requests.append(request)
            else:
                token_runs.append((request, min(pending_count, token_budget)))
                token_budget -= min(pending_count, token_budget)
        self._compact(single_requests, running)
        return single_requests, token_runs

    def _count_prefix(self, request: BatchRequest, computed: int) -> None:
        request.cached = computed
        self._counters.prefix_queries += request.prompt_length
        self._counters.prefix_hits += computed
        self._counters.prompt += request.prompt_length

    def _compact(self, singles: list[BatchRequest], running: Mapping[str, BatchRequest]) -> None:
        """Keep single rows' slots together at the low end: attention runs over all slots up to the highest one."""
        # Some slack, since each exchange copies a whole context: to be exactly dense would move slots in nearly every
        # pass, for a few masked rows less.
        slot_bound = len(singles) + len(singles) // 4 + 2
        request_in_slot = {request.slot: request for request in running.values()}
        single_slots = {request.slot for request in singles}
        free_slots = (slot for slot in range(slot_bound) if slot not in single_slots)
        for slot in sorted((slot for slot in single_slots if slot >= slot_bound), reverse=True):
            # There is always one: single rows have at most `len(singles)` slots, and `slot_bound` is larger.
            free_slot = next(free_slots)
            self._slots.exchange(slot, free_slot)
            displaced_request = request_in_slot.pop(free_slot, None)
            request_in_slot[slot].slot = free_slot
            if displaced_request is not None:
                displaced_request.slot = slot

    def rows(
        self, singles: list[BatchRequest], runs: list[tuple[BatchRequest, int]]
    ) -> tuple[PassRows, list[BatchRequest]]:
        """The rows of a pass, and the requests of which it samples a token."""
        slots = self._slots
        row_tokens = [request.tokens[-1] for request in singles]
        positions = [len(request.tokens) - 1 for request in singles]
        single_slots = [request.slot for request in singles]
        row_adapters = [request.adapter for request in singles]  # of each row
        logit_rows, sampled_requests = list(range(len(singles))), list(singles)
        # 1 and not 0 for slots in between: a softmax over no position at all is NaN, and 0 x NaN would reach the
        # others.
        slot_lengths = [1] * (max(single_slots) + 1 if single_slots else 0)
        for slot, position in zip(single_slots, positions, strict=True):
            slot_lengths[slot] = position + 1
        planned_runs: list[TokenRun] = []
        for request, count in runs:
            first_position, first_row = int(slots.computed[request.slot]), len(row_tokens)
            row_tokens += request.tokens[first_position : first_position + count]
            positions += range(first_position, first_position + count)
            row_adapters += [request.adapter] * count
            planned_runs.append(TokenRun(request.slot, first_position, slice(first_row, first_row + count)))
            # A prompt that goes on in the next pass has no logits that anybody wants: the head, the largest product
            # of a small model, is computed for the last token of a context alone.
            if first_position + count == len(request.tokens):
                logit_rows.append(len(row_tokens) - 1)
                sampled_requests.append(request)
        request_parts = [*((request, len(request.tokens) - 1, 1) for request in singles)]
        request_parts += [(request, int(slots.computed[request.slot]), count) for request, count in runs]
        turned_N3, image_rows = self._shown(request_parts)
        pass_rows = PassRows(
            tokens_N=torch.tensor(row_tokens),
            positions_N=torch.tensor(positions),
            turned_N3=turned_N3,
            shown=image_rows,
            single_slots_N=torch.tensor(single_slots, dtype=torch.long),
            lengths_S=torch.tensor(slot_lengths, dtype=torch.long),
            longest=self._model.attended(max(slot_lengths, default=0), slots.length),
            shortest=min(positions[: len(singles)], default=-1) + 1,
            runs=tuple(planned_runs),
            logit_rows_N=torch.tensor(logit_rows, dtype=torch.long),
            shared=share(slots, single_slots),
            adapted=adapted(row_adapters, logit_rows),
        )
        return pass_rows, sampled_requests

    def _shown(
        self, parts: Sequence[tuple[BatchRequest, int, int]]
    ) -> tuple[torch.Tensor | None, tuple[tuple[slice, torch.Tensor], ...]]:
        """Positions and image tokens of the rows of a pass; each of `parts` is a request, the number of its first
        token, and how many tokens. Without images in any request there are none: (None, ())."""
        if all(request.shown is None for request, _, _ in parts):
            return None, ()
        turned_parts, image_rows, first_row = list[torch.Tensor](), list[tuple[slice, torch.Tensor]](), 0
        for request, start, count in parts:
            if request.shown is None:
                turned_parts.append(torch.arange(start, start + count).unsqueeze(1).expand(-1, 3))
            else:
                assert self._model.tower is not None, "a model without one takes no images"
                turned_parts.append(request.shown.turned(start, count))
                for offset, tokens_NH in request.shown.within(start, count, self._model.tower):
                    image_rows.append((slice(first_row + offset, first_row + offset + len(tokens_NH)), tokens_NH))
            first_row += count
        return torch.cat(turned_parts), tuple(image_rows)


def _key(request: BatchRequest, version: int) -> int:
    """Key of the request's weights: keys and values of other weights have another one."""
    return version if request.adapter is None else request.adapter.key


# Why weights change between two passes of running requests, and what becomes of their keys and values.
#
# The learner makes new weights with each step, and a long turn may take longer than a step. To wait until every request
# has ended is the simple way: rows of the batch become empty one after the other, and the longest turn decides when new
# weights come and when the batch is full again (law 6). To end the requests and sample them anew throws tokens away
# (law 1), and it prefers short turns, which are done before the next weights come.
#
# So `take` swaps the weights between two passes, and running requests go on. A pass is computed by one version from its
# first layer to its last, and the version is written beside the tokens as a span. A swap within a pass would mix layers
# of two versions, and no span could say which weights made the token.
#
# The keys and values of the tokens so far were computed by older weights. Two ways are open, and the caller chooses
# (`engine.at_update`):
#
#   recomputed   `forget` before `take`. A token then has the log-probability of a whole pass under the weights of its
#                version. The price: each running request computes its context again at each update.
#   kept         Nothing is computed twice. A token's log-probability is still that of the distribution from which it
#                was drawn, but no single version gives it: old keys meet new weights.
#
# AReaL (Fu et al. 2025, arXiv:2505.24298) recomputes, PipelineRL (Piché et al. 2025, arXiv:2509.19128) keeps. In both
# ways a new request shares no prefix of an older version (`CacheSlots`), or its first token would already be a mixture
# that its span does not show.
#
# `tests/engine/test_batching.py` compares both ways with passes of transformers
# (`test_kept_kv_mixes_old_keys_with_new_weights`), and `test_law_1_a_prefix_cached_under_older_weights_is_never_served`
# fails without the comparison of versions.
class Batcher:
    """Runs requests on a model. Not thread-safe: one owner calls `submit`, `abort`, `step` and `load`."""

    def __init__(
        self,
        model: EmbeddedModel,
        kv: KVStore,
        *,
        max_batch: int,
        version: int = 0,
        stream_tokens: int = 16,
        pass_tokens: int = 1024,
        seed: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """Without `decode`, which gives the text of tokens, no request may have stop texts."""
        self.model, self.version, self.counters = model, version, Counters()
        self.decode = decode
        self.slots = CacheSlots(kv)
        # A request without a slot would be admitted only to wait: it waits in the queue instead, where an abort finds
        # it.
        self._max_batch = min(max_batch, len(self.slots.busy))
        self._stream_tokens = stream_tokens
        self._planner = PassPlanner(model, self.slots, self.counters, pass_tokens)
        self.waiting: deque[BatchRequest] = deque()
        self.running: dict[str, BatchRequest] = {}
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.running)

    def knows(self, id: str) -> bool:
        """Whether a request of this id waits or runs."""
        return id in self.running or any(request.id == id for request in self.waiting)

    def submit(self, request: BatchRequest) -> None:
        """Queue a request. Its prompt must leave room for one token; the server has checked that."""
        self.waiting.append(request)

    def abort(self, id: str) -> bool:
        """End a request with the tokens it has; False if there is none of this id."""
        request = self.running.pop(id, None)
        if request is not None:
            self.slots.release(request.slot)
        else:
            request = next((waiting_request for waiting_request in self.waiting if waiting_request.id == id), None)
            if request is None:
                return False
            self.waiting.remove(request)
        self._emit(request, "abort")
        return True

    def abort_like(self, start: str) -> None:
        """End every request whose id begins with `start`, with the tokens it has."""
        for request_id in [*self.running, *(request.id for request in self.waiting)]:
            if request_id.startswith(start):
                self.abort(request_id)

    def flush(self) -> None:
        """Send what running requests have sampled and not sent yet."""
        for request in self.running.values():
            if request.sampled > request.emitted:
                self._emit(request, None)

    def abort_all(self) -> None:
        """End every request with the tokens it has."""
        self.abort_like("")

    def score(self, tokens: list[int], adapter: Adapter | None = None) -> list[float]:
        """Log-probs of `tokens[1:]` at temperature 1, by a pass of their own: no cached key or value enters."""
        model = self.model
        # A store of its own: the canary asks this of an engine that serves, and must neither find its prompt cached
        # under older weights nor evict a turn's prefix.
        score_store, logprobs = KVStore(model.architecture, 1, len(tokens), model.dtype), list[float]()
        with torch.inference_mode():
            # In pieces, since logits are [tokens, vocabulary]: of a context of 32,000 tokens and 150,000 entries they
            # would be 19 GB at once.
            for start in range(0, len(tokens) - 1, _SCORED_AT_ONCE):
                scored_tokens = tokens[start : start + _SCORED_AT_ONCE]
                row_count = len(scored_tokens)
                pass_rows = PassRows.of_run(scored_tokens, start)
                pass_rows = replace(pass_rows, adapted=adapted([adapter] * row_count, range(row_count)))
                logits_TV = model.forward(pass_rows, score_store)
                next_T = torch.tensor(tokens[start + 1 : start + 1 + row_count])
                logprobs_TV = logits_TV[: len(next_T)].log_softmax(-1)
                logprobs += cast("list[float]", logprobs_TV.gather(-1, next_T.unsqueeze(-1)).squeeze(-1).tolist())  # pyright: ignore[reportUnknownMemberType]
        return logprobs

    def forget(self) -> None:
        """Drop every kept key and value, those of running requests too: they are computed anew in the next steps."""
        self.slots.forget(busy=True)

    def rest(self, *, weights: bool) -> None:
        """Free the memory of keys and values, with `weights` also that of the weights. Running requests keep their
        tokens. No `step` or `score` may come before `model.load`, if the weights are gone, and `wake`."""
        self.forget()
        self.slots.kv.free()
        if weights:
            self.model.free()

    def wake(self) -> None:
        """Have room for keys and values again: they are computed anew in the next steps."""
        self.slots.kv.renew()

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """`take` weights that are not packed yet. Raises ModelError and changes nothing if they do not fit."""
        self.take(self.model.pack(weights), version)

    def take(self, packed: PackedWeights, version: int) -> None:
        """Swap all weights. Running requests go on with the keys and values they have (see `forget`); cached
        prefixes of older versions are never used again."""
        self.model.take(packed)
        self.announce(version)

    def announce(self, version: int) -> None:
        """Stamp tokens with `version` from now on."""
        self.version = version
        self.slots.forget(busy=False)
        for request in self.running.values():
            # A running request of which nothing is computed yet gets the new version for its slot: it will be
            # computed under the new weights only, so its prefix may be shared. One that is half computed keeps the
            # old version, and matches nothing.
            if self.slots.computed[request.slot] == 0 and request.adapter is None:
                self.slots.version[request.slot] = version
            # A span begins at the next token. Without any token yet `_sample` writes the first span, at the version
            # that holds by then: two spans that begin at token 0 would contradict each other.
            if request.sampled:
                request.version_starts.append((request.sampled, version))

    def step(self) -> None:
        """One forward pass and one sampled token for every request that is up to date."""
        self._admit()
        single_requests, token_runs = self._planner.plan(self.running, self.version)
        if not single_requests and not token_runs:
            return
        with torch.inference_mode():
            pass_rows, sampled_requests = self._planner.rows(single_requests, token_runs)
            logits_BV = self.model.forward(pass_rows, self.slots.kv)
            for request in single_requests:
                self.slots.computed[request.slot] += 1
            for request, token_count in token_runs:
                self.slots.computed[request.slot] += token_count
            self.counters.passes += 1
            if sampled_requests:
                self._sample(logits_BV, sampled_requests)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_batch:
            # Strictly in order of arrival. To let a short prompt overtake would favour short ones, which is a bias in
            # what gets trained, and a long one could starve.
            acquired_slot = self.slots.acquire(self.waiting[0].tokens, _key(self.waiting[0], self.version))
            if acquired_slot is None:
                return
            request = self.waiting.popleft()
            request.slot = acquired_slot
            request.cached = -1
            self.running[request.id] = request

    def _sample(self, logits_BV: torch.Tensor, requests: list[BatchRequest]) -> None:
        tokens_B, logprobs_B, kept_sets = sample(logits_BV, [request.sampling for request in requests], self._generator)
        self.counters.generated += len(requests)
        cache_slots = self.slots
        token_ids = cast("list[int]", tokens_B.tolist())  # pyright: ignore[reportUnknownMemberType]
        logprobs = cast("list[float]", logprobs_B.tolist())  # pyright: ignore[reportUnknownMemberType]
        for row_number, (request, token_id, logprob) in enumerate(zip(requests, token_ids, logprobs, strict=True)):
            if not request.logprobs:
                request.version_starts.append((0, self.version))
            request.tokens.append(token_id)
            request.logprobs.append(logprob)
            if row_number in kept_sets:
                request.kept.append(kept_sets[row_number])
            context_length = len(request.tokens)
            # `known` runs ahead of `computed` by the token that was just drawn: its keys and values come with the
            # next pass.
            cache_slots.tokens[request.slot, context_length - 1] = token_id
            cache_slots.known[request.slot] = context_length
            finish: Finish | None = None
            if token_id in request.sampling.stop_token_ids or self._completes_a_stop(request):
                finish = "stop"
            elif request.sampled >= request.sampling.max_tokens or context_length >= cache_slots.length:
                finish = "length"
            if finish:
                del self.running[request.id]
                cache_slots.release(request.slot)
            # In chunks, since each event costs JSON, HTTP and the client's parser. A worker reads whole turns, so it
            # loses nothing but the time to its first token.
            if finish or request.sampled - request.emitted >= self._stream_tokens:
                self._emit(request, finish)

    def _completes_a_stop(self, request: BatchRequest) -> bool:
        """Whether a stop text ends with the newest token. Each of its tokens has a byte of it at least, so few need be
        read: those, and one before, since decoders strip a space at the beginning."""
        if not request.sampling.stop or self.decode is None:
            return False
        token_reach = max(len(ending.encode()) for ending in request.sampling.stop)
        ending = self.decode(request.tokens[request.prompt_length :][-token_reach - 1 :])
        return any(stop in ending for stop in request.sampling.stop)

    def _emit(self, request: BatchRequest, finish: Finish | None) -> None:
        start, end = request.emitted, request.sampled
        request.emitted = end
        token_ids = request.tokens[request.prompt_length + start :]
        spans = request.spans(start, end)
        request.sink(Emission(token_ids, request.logprobs[start:], spans, finish, request.kept[start:]))
