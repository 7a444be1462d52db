"""`agentrl serve --training --kind vllm` with the real Tinker client: samples are of the adapters that it trains."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from agentrl.config import EngineSettings
from agentrl.run.training_server import training_server
from tests.run.training_servers import in_thread

from .conftest import LORA_RANK, Server
from .policy import Policy
from .test_fleet import command, processes_below
from .test_weights import EXACT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.tinker,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

EOS = 1  # of the shared server's model
PROMPT = [5, 9, 40, 77, 12, 30]


class Running:
    """The process of a server that outlives this one."""

    async def wait(self) -> None:
        await trio.sleep_forever()


@pytest.fixture
def started(
    server: Server, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """The folder of the model that `server` has now, and what the engine was to be started with: it is `server`."""
    folder, given = tmp_path / "model", list[dict[str, Any]]()
    shutil.copytree(policy.folder, folder)
    policy.model.load_state_dict(policy.states[max(policy.files, default=1)])
    policy.model.save_pretrained(folder)
    said = "{% for message in messages %}{{ message['content'] }}t1{% endfor %}"  # t1 ends a turn
    (folder / "chat_template.jinja").write_text(said + "{% if add_generation_prompt %} {% endif %}")

    @asynccontextmanager
    async def running_engine(model: Path, settings: EngineSettings, **options: Any) -> AsyncIterator[Any]:
        given.append({"kind": settings.kind, "model": model, "weights_from": settings.weights_from, **options})
        yield server.url, Running()

    monkeypatch.setattr(training_server, "running_engine", running_engine)
    yield folder, given


def datum(tokens: Sequence[int], **columns: Sequence[float]) -> Any:
    from tinker import types

    inputs = {"target_tokens": list(tokens[1:]), **{name: list(column) for name, column in columns.items()}}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


def learned(trainer: Any, tokens: Sequence[int]) -> list[float]:
    """The learner's log-probs of all tokens but the first."""
    (output,) = trainer.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs
    return list(output["logprobs"].tolist())


def step(trainer: Any, tokens: Sequence[int], lr: float) -> float:
    """One step towards these tokens; returns the loss before it."""
    from tinker import types

    computed = trainer.forward_backward([datum(tokens)], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=lr, eps=1e-2)).result()
    return computed.result().metrics["loss:sum"]


def error(trainer: Any, sampler: Any) -> float:
    """How far the log-probs of a sample, and of scored tokens, are from the learner's, at most."""
    from tinker import types

    asked = types.SamplingParams(max_tokens=6, stop=[])
    (sequence,) = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, asked).result().sequences
    whole = [*PROMPT, *sequence.tokens]
    wanted = learned(trainer, whole)
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()[1:]
    pairs = [*zip(sequence.logprobs, wanted[len(PROMPT) - 1 :], strict=True), *zip(scored, wanted, strict=True)]
    return max(abs(one - other) for one, other in pairs)


@pytest.mark.slow
def test_samples_of_several_adapters_are_those_that_their_trainers_compute(
    started: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """On a server that has two adapters in a pass and in its cache: the third sends one out, which is read again."""
    import tinker
    from tinker import types

    folder, given = started
    engine = EngineSettings(kind="vllm")
    settings = {"model": str(folder), "engine": engine, "lora_rank": LORA_RANK}
    with (
        in_thread(tmp_path / "state", **settings) as server,
        tinker.ServiceClient(base_url=server.url, api_key=server.key) as service,
    ):
        name = str(folder)
        trainers = [service.create_lora_training_client(name, rank=rank, seed=rank).result() for rank in (2, 4, 8)]
        base = service.create_sampling_client(base_model=name).result()
        assert error(trainers[0], base) <= EXACT  # an adapter changes nothing at first
        for at, trainer in enumerate(trainers):
            step(trainer, [(11 * place + 40 * at) % 100 + 3 for place in range(8)], 3e-2)
        samplers = [trainer.save_weights_and_get_sampling_client().result() for trainer in trainers]
        for at in (0, 1, 2, 0):
            assert error(trainers[at], samplers[at]) <= EXACT
        for _ in range(6):
            step(trainers[2], [5, *[EOS] * 8], 0.1)
        ending = trainers[2].save_weights_and_get_sampling_client().result()
        asked = types.SamplingParams(max_tokens=4, temperature=0, stop=[])  # nothing ends it, no end token either
        (sequence,) = ending.sample(types.ModelInput.from_ints([5, EOS]), 1, asked).result().sequences
        assert list(sequence.tokens) == [EOS] * 4
        prompt = types.ModelInput.from_ints(PROMPT)
        scored = [sampler.compute_logprobs(prompt).result()[-1] for sampler in (base, *samplers)]
        assert len({round(one, 3) for one in scored}) == 4
        with pytest.raises(tinker.RequestFailedError, match=r"lora_config.rank = 16: .* with --lora-rank 16"):
            service.create_lora_training_client(name, rank=16).result()
        with pytest.raises(tinker.RequestFailedError, match=r"sampling_params.temperature = 0.001: vLLM samples at"):
            base.sample(prompt, 1, types.SamplingParams(max_tokens=1, temperature=0.001)).result()
        with pytest.raises(tinker.RequestFailedError, match="prompt = 128: the model has the tokens 0 to 127"):
            base.sample(types.ModelInput.from_ints([128]), 1, types.SamplingParams(max_tokens=1)).result()
    (options,) = given
    assert (options["kind"], options["lora_rank"], options["max_loras"]) == ("vllm", LORA_RANK, 8)
    assert options["model"] == folder and options["weights_from"] == [str(tmp_path / "state")]


@pytest.mark.long
@pytest.mark.smollm2
@pytest.mark.parametrize("whole", [True, False], ids=["the server", "its core"])
def test_a_real_model_is_trained_over_a_kill_of_its_vllm(whole: bool, tmp_path: Path) -> None:
    import tinker
    from tinker import types

    name = "agentrl/smollm2-135m"
    engine = EngineSettings(kind="vllm", kv_cache_mb=64)
    with (
        in_thread(tmp_path / "state", model=name, engine=engine, max_context=128) as server,
        tinker.ServiceClient(base_url=server.url, api_key=server.key) as service,
    ):
        trainer = service.create_lora_training_client(name, rank=4, seed=0).result()
        losses = [step(trainer, [*PROMPT, 300, 400], 1e-3) for _ in range(2)]
        assert losses[1] < losses[0]
        sampler = trainer.save_weights_and_get_sampling_client().result()
        assert error(trainer, sampler) <= 1e-3
        first = server.engine.process
        assert first is not None
        asked = sampler.sample(types.ModelInput.from_ints(PROMPT), 4, types.SamplingParams(max_tokens=100, stop=[]))
        killed = [pid for pid in processes_below(first.pid) if "EngineCore" in command(pid)]
        os.kill(first.pid if whole else killed[0], signal.SIGKILL)
        assert [len(one.tokens) for one in asked.result().sequences] == [100] * 4
        assert server.engine.process is not first
        assert error(trainer, sampler) <= 1e-3
