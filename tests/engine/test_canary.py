"""The canary: a stale engine is found however small the steps, a fresh one is not suspected, a wrong file is named."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case
from safetensors.torch import save_file

from agentrl.config import parse
from agentrl.engine.client import EngineClient
from agentrl.engine.weight_sync import canary, fingerprints
from agentrl.engine.weight_sync.canary import Canary, CanaryResult, probe_tokens
from agentrl.engine.weight_sync.publisher import WeightPublisher
from agentrl.engine.weight_sync.transport import Parcel
from agentrl.errors import CanaryMismatch
from tests.parts.vllm_server import FakeVLLM

TOKENS = probe_tokens(500)
STEP = 5e-4  # nats by which one step at a learning rate of 1e-6 moves a token's log-prob, at most
NOISE = 0.008  # nats, rms: what bfloat16 makes of the same weights, as measured


class Drift:
    """A policy whose every step moves the probe's log-probs a little, and an engine's bfloat16 version of it."""

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.start = [-5 * rng.random() for _ in TOKENS[1:]]
        self.way = [rng.uniform(-STEP, STEP) for _ in TOKENS[1:]]

    def at(self, version: int) -> tuple[float, ...]:
        return tuple(a + version * b for a, b in zip(self.start, self.way, strict=True))

    def canary(self, version: int, **facts: Any) -> Canary:
        dtype: Any = facts.pop("dtype", "bfloat16")
        return Canary(version=version, token_ids=TOKENS, logprobs=self.at(version), dtype=dtype, **facts)

    def engine(self, version: int) -> tuple[float, ...]:
        """Its noise is another one with every version of its weights, and the same for the same weights."""
        rng = random.Random(version)
        return tuple(value + rng.gauss(0, NOISE) for value in self.at(version))


def costs(numbers: Sequence[float]) -> Callable[[str, int, int], float]:
    """Of the token at each place of the probe, the first one aside; of what is sampled after it, anything."""
    return lambda _weights, place, _token: numbers[place - 1] if 0 < place <= len(numbers) else -1.0


async def follow(drift: Drift, versions: int, stuck_at: int | None = None, **facts: Any) -> int:
    """Deliver so many versions to an engine that takes none after `stuck_at`; how many went through unsuspected."""
    server, seen = FakeVLLM(), dict[str, CanaryResult]()
    async with aclosing(EngineClient(server.url, transport=server)) as client:
        for version in range(1, versions + 1):
            numbers = drift.engine(version if stuck_at is None else min(version, stuck_at))
            server.version = str(version)
            server.logprob = costs(numbers)
            await canary.check([client], drift.canary(version, **facts), seen=seen)
    return versions


@each_case("stuck_at", [1, 7, 60])
async def test_a_bfloat16_engine_that_takes_no_step_any_more_is_found_long_before_the_tolerance(stuck_at: int) -> None:
    drift = Drift()
    says = r"says it serves version \d+, but it computes with the weights of version \d+: .* went -?\d+% of the way"
    with pytest.raises(CanaryMismatch, match=says) as caught:
        await follow(drift, stuck_at + 200, stuck_at)
    found = int(str(caught.value).partition("serves version ")[2].partition(",")[0])
    assert found - stuck_at < 120
    assert max(abs(a - b) for a, b in zip(drift.at(found), drift.at(stuck_at), strict=True)) < 0.3 * 0.2


@pytest.mark.medium
@each_case("seed", range(3))
async def test_an_engine_that_follows_is_never_suspected(seed: int) -> None:
    assert await follow(Drift(seed), 250) == 250


async def test_steps_too_small_to_be_told_from_noise_say_nothing() -> None:
    assert await follow(Drift(), 15, stuck_at=1) == 15


async def test_numbers_of_weights_that_no_engine_has_say_nothing() -> None:
    """Of float32 weights: a bfloat16 engine rightly stays where it is while steps are below its grid."""
    assert await follow(Drift(), 200, stuck_at=1, rounded=False) == 200


# --- adapters of roles

FAR = (
    300  # versions, after which a role's adapter has moved by 0.15 nats of a token at most, and by less than TOLERANCE
)


async def answered(drift: Drift, spy: Drift, version: int, loaded: int | None, seen: Any = None) -> None:
    """Check an engine at `version` whose adapter of the role "spy" is that of version `loaded`; None: it has no
    effect."""
    server = FakeVLLM(version=str(version), adapters={f"policy-{version}-spy": "spy"})
    policy = drift.engine(version)
    of_spy = policy if loaded is None else spy.engine(loaded)
    server.logprob = lambda weights, place, token: costs(of_spy if weights == "spy" else policy)(weights, place, token)
    async with aclosing(EngineClient("http://engine", transport=server)) as client:
        await canary.check([client], drift.canary(version, by_role={"spy": spy.at(version)}), seen=seen)


def roles() -> tuple[Drift, Drift]:
    """A policy, and a role whose adapter started from it and went another way."""
    drift, spy = Drift(), Drift(1)
    spy.start = drift.start
    return drift, spy


async def test_an_adapter_of_a_role_that_has_no_effect_is_found_within_the_tolerance() -> None:
    drift, spy = roles()
    await answered(drift, spy, FAR, FAR)
    with pytest.raises(CanaryMismatch, match=f"its adapter 'policy-{FAR}-spy' computes as the policy without it"):
        await answered(drift, spy, FAR, None)


async def test_an_adapter_of_a_role_that_takes_no_step_any_more_is_found_and_one_that_follows_is_not() -> None:
    drift, spy = roles()
    drift.way = [0.0] * len(drift.way)  # so that the policy without it tells nothing of steps
    seen = dict[str, CanaryResult]()
    await answered(drift, spy, 200, 200, seen)
    await answered(drift, spy, 500, 500, seen)
    seen.clear()
    await answered(drift, spy, 200, 200, seen)
    with pytest.raises(CanaryMismatch, match="with the adapter 'policy-500-spy' it computes with the weights of"):
        await answered(drift, spy, 500, 300, seen)


async def test_an_adapter_of_a_role_that_was_not_trained_yet_says_nothing() -> None:
    drift, spy = roles()
    await answered(drift, spy, 0, 0)
    await answered(drift, spy, 3, None)


# --- fingerprints


def tiny() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    names = [f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("q_proj", "up_proj", "norm")]
    sizes = [(16, 16), (24, 16), (16,)] * 2
    experts = [
        f"model.layers.0.mlp.experts.{n}.{part}_proj.weight" for n in range(3) for part in ("gate", "up", "down")
    ]
    return {
        "model.embed_tokens.weight": torch.randn(20, 16),
        **{name: torch.randn(size) for name, size in zip(names, sizes, strict=True)},
        **{name: torch.randn(8, 16) for name in experts},
    }


class Scene:
    """An engine that has `held` and computes the right log-probs, or wrong ones."""

    def __init__(self, *, apart: float = 0.0, dtype: str = "bfloat16", held: dict[str, torch.Tensor] | None) -> None:
        self.expected = fingerprints.of_tensors(tiny())
        self.drift, self.dtype = Drift(), "float32" if dtype == "float32" else "bfloat16"
        numbers = self.drift.at(1)
        self.server = FakeVLLM(version="1")
        self.server.logprob = costs([number + apart for number in numbers])
        if held is not None:
            result = {"dtype": dtype, "fingerprints": fingerprints.of_tensors(held)}
            self.server.answers["/collective_rpc"] = (200, json.dumps({"results": [result, result]}).encode())

    async def check(self, file: Path | None = None) -> float:
        info = None if file is None else {"path": str(file)}
        async with aclosing(EngineClient(self.server.url, transport=self.server)) as client:
            proof = self.drift.canary(1, dtype=self.dtype, fingerprints=self.expected)
            return await canary.check([client], proof, update_info=info)


@each_case(
    ("change", "named"),
    [
        ({}, []),
        ({"model.layers.0.up_proj.weight": 1.001}, ["model.layers.0.up_proj.weight"]),
        ({"model.layers.0.norm.weight": 1.001}, ["model.layers.0.norm.weight"]),
        (
            {"model.layers.0.q_proj.weight": "T"},
            ["model.layers.0.q_proj.weight (holds its transpose)"],
        ),
        (
            {"model.layers.0.q_proj.weight": "model.layers.1.q_proj.weight"},
            ["model.layers.0.q_proj.weight (holds model.layers.1.q_proj.weight)"],
        ),
    ],
)
async def test_an_engine_whose_weights_are_others_is_named_though_its_numbers_look_right(
    change: dict[str, Any], named: list[str]
) -> None:
    held = tiny()
    for name, how in change.items():
        held[name] = held[name].T if how == "T" else held[how] if isinstance(how, str) else held[name] * how
    if not named:
        assert await Scene(held=held).check() < 1e-9
        return
    with pytest.raises(CanaryMismatch) as caught:
        await Scene(held=held).check()
    assert str(caught.value).endswith(
        f"says it serves version 1, but its layers compute with other weights; not taken: {named[0]}"
    )


async def test_an_engine_that_cannot_say_or_computes_in_another_dtype_is_judged_by_its_numbers() -> None:
    other = {name: tensor + 1 for name, tensor in tiny().items()}
    assert await Scene(held=None).check() < 1e-9
    assert await Scene(held=other, dtype="float16").check() < 1e-9


@each_case(
    ("change", "named"),
    [
        ({"model.layers.1.up_proj.weight": None}, "model.layers.1.up_proj.weight (not in the file)"),
        (
            {"model.layers.0.mlp.experts.1.up_proj.weight": None},
            "model.layers.0.mlp.experts.1.up_proj.weight (not in the file)",
        ),
        ({"model.layers.0.q_proj.weight": "T"}, "model.layers.0.q_proj.weight (holds its transpose)"),
        (
            {
                "model.layers.0.mlp.experts.1.up_proj.weight": "model.layers.0.mlp.experts.2.up_proj.weight",
                "model.layers.0.mlp.experts.2.up_proj.weight": "model.layers.0.mlp.experts.1.up_proj.weight",
            },
            "model.layers.0.mlp.experts.1.up_proj.weight (holds model.layers.0.mlp.experts.2.up_proj.weight), "
            "model.layers.0.mlp.experts.2.up_proj.weight (holds model.layers.0.mlp.experts.1.up_proj.weight)",
        ),
    ],
)
async def test_what_is_wrong_with_the_file_that_was_sent_is_named(
    change: dict[str, str | None], named: str, tmp_path: Path
) -> None:
    right = tiny()
    sent = dict(right)
    for name, how in change.items():
        if how is None:
            del sent[name]
        else:
            sent[name] = right[name].T.contiguous() if how == "T" else right[how].clone()
    save_file(sent, tmp_path / "sent.safetensors")
    scene = Scene(held=None, apart=1.0, dtype="float32")
    with pytest.raises(CanaryMismatch) as caught:
        await scene.check(tmp_path / "sent.safetensors")
    assert str(caught.value).endswith(f": the file that was sent is wrong: {named}")


def test_a_canary_in_a_file_is_the_same_again(tmp_path: Path) -> None:
    proof = Drift().canary(3, rounded=False, fingerprints={"a": "1"})
    proof.write(tmp_path / "canary")
    assert Canary.read(tmp_path / "canary") == proof


async def test_an_engine_whose_numbers_are_none_computes_with_other_weights() -> None:
    """vLLM answers 400 where it would have to write a NaN."""
    server, drift = FakeVLLM(version="1"), Drift()
    server.fail("status", status=400, message="Out of range float values are not JSON compliant: nan")
    async with aclosing(EngineClient(server.url, transport=server)) as client:
        with pytest.raises(CanaryMismatch, match="is nan nats from the learner's"):
            await canary.check([client], drift.canary(1))


async def told(apart: float, **given: Any) -> float:
    """What a publisher of such engine settings says of an engine whose every log-prob is so far off."""
    server, drift = FakeVLLM(version="1"), Drift()
    server.logprob = costs([number + apart for number in drift.at(1)])
    publisher = WeightPublisher(parse({"model": "m", "env": {"id": "e"}, "engine": {"kind": "vllm", **given}}).engine)
    proof = drift.canary(1, dtype=given.get("dtype", "float32"))
    async with aclosing(EngineClient(server.url, transport=server)) as client:
        return (await publisher._prove(client, Parcel(version=1, path=Path("weights"), canary=proof)))["canary_error"]


@each_case(
    ("given", "most"),
    [
        ({}, 1e-3),
        ({"dtype": "bfloat16"}, 0.2),
        ({"vllm": {"kv-cache-dtype": "bfloat16"}}, 0.2),
        ({"dtype": "bfloat16", "vllm": {"quantization": "fp8"}}, 2.0),
        ({"dtype": "bfloat16", "vllm": {"kv_cache_dtype": "fp8_e5m2"}}, 2.0),
        ({"dtype": "bfloat16", "vllm": {"quantization": "fp8"}, "canary": 0.5}, 0.5),
        ({"canary": 3.0}, 3.0),
    ],
)
async def test_the_tolerance_follows_what_the_engine_computes_in_or_the_setting(given: Any, most: float) -> None:
    assert await told(0.9 * most, **given) == pytest.approx(0.9 * most, rel=1e-3)
    with pytest.raises(CanaryMismatch, match=rf"rounding explains {most:g}, see engine\.canary"):
        await told(1.1 * most, **given)


@each_case(
    ("dtype", "tolerance", "most"),
    [("bfloat16", None, 1.0), ("bfloat16", 0.3, 1.5), ("float32", None, 1e-3), ("float32", 0.2, 0.2)],
)
async def test_one_token_alone_may_be_further_off_in_bfloat16(dtype: Any, tolerance: float | None, most: float) -> None:
    """A deep model rounds a few tokens far off; in the mean the engine must be as near as ever. A larger setting never
    allows less."""
    drift, server = Drift(), FakeVLLM(version="1")
    async with aclosing(EngineClient(server.url, transport=server)) as client:
        for apart in (0.95 * most, 1.05 * most):
            server.logprob = costs([drift.at(1)[0] + apart, *drift.at(1)[1:]])
            checked = canary.check([client], drift.canary(1, dtype=dtype), tolerance=tolerance)
            if apart < most:
                assert await checked == pytest.approx(apart)
            else:
                with pytest.raises(CanaryMismatch, match=r"the log-prob of probe token 1 is"):
                    await checked
