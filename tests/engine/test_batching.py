"""Continuous batching: every token's log-prob and version against whole-sequence forward passes of transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case

from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.embedded.batching import Batcher, BatchRequest, Emission
from agentrl.engine.embedded.model import EmbeddedModel, KVStore, read_weights
from agentrl.records import SamplingParams

from .conftest import VOCAB
from .oracle import reference_logits, reference_logprobs


class Case:
    """A batcher with the emissions of each request on record."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 24,
        length: int = 200,
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        architecture = read_architecture(folder)
        model = EmbeddedModel(architecture, read_weights(folder), length=length, dtype=dtype)
        settings = {"max_batch": 16, "seed": 0, **settings}
        self.folder = folder
        self.batcher = Batcher(model, KVStore(architecture, slots, length, model.dtype), **settings)
        self.emissions: dict[str, list[Emission]] = {}
        self.requests: dict[str, BatchRequest] = {}

    def submit(self, id: str, tokens: list[int], max_tokens: int = 12, **sampling: object) -> BatchRequest:
        seen: list[Emission] = []
        params = SamplingParams(max_tokens=max_tokens, **sampling)  # pyright: ignore[reportArgumentType]
        request = BatchRequest(id=id, tokens=list(tokens), sampling=params, sink=seen.append)
        self.emissions[id], self.requests[id] = seen, request
        self.batcher.submit(request)
        return request

    def run(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if not self.batcher.busy:
                return
            self.batcher.step()

    def check_logprobs(self, id: str, folder: Path | None = None) -> None:
        request = self.requests[id]
        expected = reference_logprobs(
            folder or self.folder, request.tokens, request.prompt_length, request.sampling.temperature
        )
        assert request.logprobs == pytest.approx(expected, abs=1e-4)

    def check_emissions(self, id: str) -> None:
        """Chunks put together are the request, and their spans leave no gap."""
        request, chunks = self.requests[id], self.emissions[id]
        assert [t for chunk in chunks for t in chunk.token_ids] == request.tokens[request.prompt_length :]
        assert [p for chunk in chunks for p in chunk.logprobs] == request.logprobs
        at = 0
        for span in (span for chunk in chunks for span in chunk.spans):
            assert span.start == at and span.end > at
            at = span.end
        assert at == request.sampled
        assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1) and chunks[-1].finish


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(0x100 + id) for id in ids)  # two bytes a token


def prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def groups(case: Case, *, turns: int, rng: random.Random) -> None:
    """Groups of siblings that share a prompt, each going on for several turns; requests come while others run."""
    live = {f"{g}-{m}": prompt(g, 20 + 19 * g) for g in range(3) for m in range(3)}
    for turn in range(turns):
        for id, tokens in live.items():
            case.submit(f"{id}/{turn}", tokens, max_tokens=rng.randrange(2, 14))
            case.run(rng.randrange(3))
        case.run()
        for id in live:
            live[id] = case.requests[f"{id}/{turn}"].tokens + prompt(rng.randrange(999), rng.randrange(1, 9))


@pytest.mark.medium
@each_case(
    "settings",
    [
        {},
        {"pass_tokens": 7},  # prompts computed in small pieces
        {"max_batch": 5},  # requests wait for one another
        {"slots": 6, "max_batch": 6},  # cached prefixes are thrown away all the time
        {"slots": 1, "max_batch": 1},
        {"stream_tokens": 1},
    ],
)
def test_logprobs_of_multi_turn_groups_are_exact(model_dir: Path, settings: dict[str, int]) -> None:
    case = Case(model_dir, **settings)
    groups(case, turns=2, rng=random.Random(0))
    for id in case.requests:
        case.check_logprobs(id)
        case.check_emissions(id)


def test_a_groups_prompt_is_computed_once(model_dir: Path) -> None:
    case = Case(model_dir)
    shared = prompt(1, 80)
    for member in range(8):
        case.submit(str(member), shared)
    case.run()
    counters = case.batcher.counters
    assert counters.prefix_queries == 8 * 80
    assert counters.prefix_hits == 7 * 79  # the last token is computed by each: it gives the first logits


def test_a_next_turn_computes_only_what_is_new(model_dir: Path) -> None:
    case = Case(model_dir)
    first = case.submit("a", prompt(1, 50))
    case.run()
    before = case.batcher.counters.prefix_hits
    second = case.submit("b", first.tokens + prompt(2, 5))
    case.run()
    assert case.batcher.counters.prefix_hits - before == len(first.tokens) - 1
    assert second.cached == len(first.tokens) - 1
    case.check_logprobs("b")


def test_long_episodes_keep_their_prefixes_cached(model_dir: Path) -> None:
    """Eight episodes of 20 turns beside one another: of the tokens that an earlier turn has seen, at least 90% are
    found in the cache."""
    case = Case(model_dir, slots=10, max_batch=4)
    rng = random.Random(0)
    contexts = {f"{g}-{m}": prompt(g, 15) for g in range(2) for m in range(4)}
    reusable = 0
    for turn in range(20):
        for id in rng.sample(sorted(contexts), len(contexts)):
            case.submit(f"{id}/{turn}", contexts[id], max_tokens=5)
        case.run()
        for id in contexts:
            seen = case.requests[f"{id}/{turn}"].tokens
            reusable += len(seen) if turn < 19 else 0
            contexts[id] = seen + prompt(rng.randrange(999), 3)
    assert case.batcher.counters.prefix_hits >= 0.9 * reusable


def test_greedy_follows_the_argmax_and_stops_at_a_stop_token(model_dir: Path) -> None:
    case = Case(model_dir)
    tokens = prompt(3, 10)
    for _ in range(6):
        tokens.append(int(reference_logits(model_dir, tokens)[-1].argmax()))
    sampled = tokens[10:]
    stop = sampled[3]
    request = case.submit("a", prompt(3, 10), max_tokens=6, temperature=0.0)
    stopped = case.submit("b", prompt(3, 10), max_tokens=6, temperature=0.0, stop_token_ids=(stop,))
    case.run()
    assert request.tokens == tokens
    assert case.emissions["a"][-1].finish == "length"
    assert stopped.tokens[10:] == sampled[: sampled.index(stop) + 1]
    assert case.emissions["b"][-1].finish == "stop"


def test_a_full_context_ends_with_length(model_dir: Path) -> None:
    case = Case(model_dir, length=32)
    request = case.submit("a", prompt(1, 30), max_tokens=50)
    case.run()
    assert len(request.tokens) == 32
    assert case.emissions["a"][-1].finish == "length"
    case.check_logprobs("a")


def test_abort_ends_a_request_with_what_it_has_and_frees_its_slot(model_dir: Path) -> None:
    case = Case(model_dir, slots=2, max_batch=2, stream_tokens=100)
    for id in "abc":
        case.submit(id, prompt(1, 10), max_tokens=40)
    case.run(5)
    assert case.batcher.abort("a") and case.batcher.abort("c") and not case.batcher.abort("nobody")
    case.check_emissions("a")
    assert case.emissions["a"][-1].finish == "abort" and case.requests["a"].sampled > 0
    assert case.emissions["c"] == [Emission([], [], [], "abort")]  # it never ran
    case.submit("d", prompt(5, 10))
    case.run(2)
    assert case.requests["d"].sampled > 0
    case.run()
    case.check_logprobs("b")
    case.check_logprobs("d")


def swap(case: Case, folder: Path, version: int, *, recompute: bool) -> None:
    if recompute:
        case.batcher.forget()
    case.batcher.load(read_weights(folder), version)


def test_recomputed_kv_makes_every_token_that_of_its_versions_weights(model_dir: Path, other_weights: Path) -> None:
    """Three swaps in flight: each token's log-prob is that of a whole pass under the weights of its version."""
    case = Case(model_dir)
    folders = {0: model_dir, 1: other_weights, 2: model_dir, 3: other_weights}
    for member in range(6):
        case.submit(str(member), prompt(member // 3, 40), max_tokens=30)
    case.run(4)
    for version in (1, 2, 3):
        case.run(6)
        swap(case, folders[version], version, recompute=True)
    case.submit("late", prompt(0, 40), max_tokens=5)
    case.run()
    for id, request in case.requests.items():
        case.check_emissions(id)
        spans = request.spans(0, request.sampled)
        assert [span.version for span in spans] == ([3] if id == "late" else [0, 1, 2, 3])
        for span in spans:
            whole = reference_logprobs(folders[span.version], request.tokens, request.prompt_length)
            assert request.logprobs[span.start : span.end] == pytest.approx(whole[span.start : span.end], abs=1e-4)


def test_kept_kv_mixes_old_keys_with_new_weights(model_dir: Path, other_weights: Path) -> None:
    """Keys and values computed before the swap stay: the oracle runs the tail on transformers' cache of the head."""
    from transformers import DynamicCache

    from .oracle import reference

    case = Case(model_dir)
    request = case.submit("a", prompt(7, 20), max_tokens=10)
    case.run(5)  # one pass computes the prompt, each gives one token
    assert request.sampled == 5
    swap(case, other_weights, 1, recompute=False)
    case.run()
    assert [(span.version, span.start, span.end) for span in request.spans(0, 10)] == [(0, 0, 5), (1, 5, 10)]
    cache = DynamicCache()
    head, tail = request.tokens[:24], request.tokens[24:-1]
    with torch.no_grad():
        old = reference(model_dir)(torch.tensor([head]), past_key_values=cache).logits[0]
        new = reference(other_weights)(torch.tensor([tail]), past_key_values=cache).logits[0]
    logprobs = torch.cat([old[19:], new]).log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(logprobs, request.tokens[20:], strict=True)]
    assert request.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("recompute", [True, False])
def test_law_1_a_prefix_cached_under_older_weights_is_never_served(
    model_dir: Path, other_weights: Path, recompute: bool
) -> None:
    case = Case(model_dir)
    done = case.submit("done", prompt(1, 40))
    case.run()
    running = case.submit("running", prompt(2, 40), max_tokens=30)
    case.run(5)
    swap(case, other_weights, 1, recompute=recompute)
    sibling = case.submit("sibling", prompt(2, 40))
    following = case.submit("next", [*done.tokens, 3])
    case.run()
    assert following.cached == 0
    assert sibling.cached == (39 if recompute else 0)  # recomputed under the new weights, it may be shared
    again = case.submit("again", [*running.tokens, 4])
    case.run()
    # Recomputed, its own context is there; kept, its keys are old, and only what the sibling computed anew is shared.
    assert again.cached == (len(running.tokens) - 1 if recompute else 40)
    for id in ("sibling", "next", "again"):
        case.check_logprobs(id, other_weights)


def test_scoring_in_pieces_is_scoring_whole(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(model_dir)
    monkeypatch.setattr("agentrl.engine.embedded.batching._SCORED_AT_ONCE", 16)
    for n in (2, 16, 17, 33):
        tokens = prompt(n, n)
        assert case.batcher.score(tokens) == pytest.approx(reference_logprobs(model_dir, tokens, 1), abs=1e-4)


def test_a_seed_repeats_the_samples(model_dir: Path) -> None:
    runs: list[list[int]] = []
    for _ in range(2):
        case = Case(model_dir)
        request = case.submit("a", prompt(1, 10), max_tokens=30, temperature=2.0)
        case.run()
        runs.append(request.tokens)
    assert runs[0] == runs[1]


def test_temperature_and_cuts_shape_the_reported_logprobs(model_dir: Path) -> None:
    case = Case(model_dir)
    case.submit("warm", prompt(1, 10), temperature=1.7)
    cut = case.submit("cut", prompt(1, 10), temperature=0.8, top_k=3)
    case.run()
    case.check_logprobs("warm")
    logits = reference_logits(model_dir, cut.tokens)[9:-1] / 0.8
    for row, token, logprob in zip(logits, cut.tokens[10:], cut.logprobs, strict=True):
        kept = row.topk(3)
        at = kept.indices.tolist().index(token)
        assert logprob == pytest.approx(float(kept.values.log_softmax(-1)[at]), abs=1e-4)


@each_case(("start", "end"), [(3, 4), (2, 5), (0, 3)])
def test_a_stop_text_ends_the_turn_with_the_token_that_completes_it(model_dir: Path, start: int, end: int) -> None:
    case = Case(model_dir, decode=letters)
    whole = case.submit("whole", prompt(3, 30), temperature=0)
    case.run()
    tokens = whole.tokens[30:]
    stop = letters(tokens[start:end])
    first = letters(tokens).index(stop) + end - start
    case.submit("stopped", prompt(3, 30), temperature=0, stop=("never said", stop))
    case.run()
    assert case.requests["stopped"].tokens[30:] == tokens[:first]
    assert case.emissions["stopped"][-1].finish == "stop"
    case.check_emissions("stopped")
