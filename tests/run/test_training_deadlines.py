"""Law 4 at a training server: calls whose predecessor never comes, clients that are gone, an engine that ends."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from agentrl.errors import EngineUnavailable
from agentrl.learner.adapter_learner import AdapterLearner
from agentrl.models.resolve import model_dir
from agentrl.run.training_server.call_log import CallAnswer, CallLog, CallTooLate
from agentrl.run.training_server.kept_engine import KeptEngine
from agentrl.run.training_server.sessions import SessionGone, Sessions
from agentrl.run.training_server.training_calls import TrainingCalls, model_id

from .training_servers import MODEL, in_thread

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
PATIENCE_S, SILENT_S = 600.0, 1800.0


def fields(**given: object) -> bytes:
    return json.dumps(given).encode()


def create(session: str) -> bytes:
    return fields(session_id=session, model_seq_id=0, base_model=MODEL, lora_config={"rank": 2, "seed": 1})


@asynccontextmanager
async def running(*parts: Callable[..., Awaitable[object]]) -> Any:
    async with trio.open_nursery() as nursery:
        for part in parts:
            await nursery.start(part)
        yield
        nursery.cancel_scope.cancel()


async def jump_until(true: Callable[[], bool], step_s: float) -> float:
    """Let the clock go on until it is true; returns the seconds that went by."""
    clock, began = cast(trio.testing.MockClock, trio.lowlevel.current_clock()), trio.current_time()
    while not true():
        clock.jump(step_s)
        await trio.testing.wait_all_tasks_blocked(0.001)
    return trio.current_time() - began


async def test_a_call_fails_whose_predecessor_never_comes(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    found = list[str]()
    with CallLog(tmp_path / "calls.sqlite") as log:
        session = log.clients.begin_session("one")
        model = model_id(session, 0)

        def accept(place: int, kind: str = "optim_step", body: bytes = b"{}") -> str:
            owner = model if place == 0 else None
            return log.accept(session=session, owner=model, place=place, kind=kind, body=body, model=owner)[0]

        accept(0, "create_model", create(session))
        learner = AdapterLearner(model_dir(MODEL))
        calls = TrainingCalls(log, learner, tmp_path, most_tokens=64, answered=found.append, patience_s=PATIENCE_S)
        late = [accept(3), accept(4)]
        async with running(calls.run):
            took = await jump_until(lambda: len(found) == 3, 1.0)
            assert took >= PATIENCE_S
            assert found == [f"{model}:0", *late]
            for id in late:
                answer = log.answer_of(id)
                assert isinstance(answer, CallAnswer) and answer.form == "failed"
                said = json.loads(answer.data)
                assert said["error"].startswith(f"call 3 waited 600 s for call 1 of {model}, which never came: ")
                assert said["category"] == "user"
            with pytest.raises(CallTooLate, match=f"call 1 of {model} came after call 4 had its answer"):
                accept(1)
            accept(5)  # the calls after it go on
            calls.came(model)
            await jump_until(lambda: len(found) == 4, 0.0)
    assert found[3] == f"{model}:5"


async def test_a_call_that_comes_in_time_is_computed_in_its_order(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    found = list[str]()
    with CallLog(tmp_path / "calls.sqlite") as log:
        session = log.clients.begin_session("one")
        model = model_id(session, 0)
        places = {0: "create_model", 2: "unload_model", 1: "unload_model"}
        learner = AdapterLearner(model_dir(MODEL))
        calls = TrainingCalls(log, learner, tmp_path, most_tokens=64, answered=found.append, patience_s=PATIENCE_S)
        async with running(calls.run):
            for place, kind in places.items():
                body = create(session) if place == 0 else b"{}"
                owner = model if place == 0 else None
                log.accept(session=session, owner=model, place=place, kind=kind, body=body, model=owner)
                calls.came(model)
                mock_clock.jump(0.9 * PATIENCE_S if place == 2 else 0)
                await trio.testing.wait_all_tasks_blocked(0.001)
            await jump_until(lambda: len(found) == 3, 0.0)
    assert found == [f"{model}:{place}" for place in range(3)]


async def test_a_client_that_is_gone_frees_its_memory_and_keeps_what_it_saved(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    found = list[str]()
    with CallLog(tmp_path / "calls.sqlite") as log:
        learner = AdapterLearner(model_dir(MODEL))
        gone, there, waits = (log.clients.begin_session(name) for name in ("gone", "there", "waits"))
        steps = [
            ("save_weights", fields(path="kept")),
            ("save_weights_for_sampler", fields(sampling_session_seq_id=0)),
        ]
        for session in (gone, there):
            model = model_id(session, 0)
            for place, (kind, body) in enumerate([("create_model", create(session)), *steps]):
                owner = None if place else model
                log.accept(session=session, owner=model, place=place, kind=kind, body=body, model=owner)
        sampler = f"{waits}:sample:0"
        log.accept(session=waits, owner=sampler, place=0, kind="sample", body=b"{}")  # nobody answers it here
        calls = TrainingCalls(log, learner, tmp_path, most_tokens=64, answered=found.append)
        sessions = Sessions(log, silent_s=SILENT_S, ended=calls.end)
        async with running(calls.run, sessions.run):
            await jump_until(lambda: len(found) == 6, 0.0)
            assert "m1" in learner and "m2" in learner

            def ended() -> bool:
                sessions.hear(there)
                return "m1" not in learner and not (tmp_path / "models/1").exists()

            assert await jump_until(ended, 30.0) >= SILENT_S
            await jump_until(lambda: len(list((tmp_path / "weights").iterdir())) == 3, 0.0)
        assert [log.clients.session_is(one) for one in (gone, there, waits)] == ["ended", "open", "open"]
        with pytest.raises(SessionGone, match=r"the session has ended: .* was silent for too long; make a new client"):
            sessions.hear(gone)
        assert log.clients.weights(f"tinker://{model_id(gone, 0)}/weights/kept") is not None
        assert log.clients.weights(f"tinker://{model_id(gone, 0)}/sampler_weights/unnamed-2") is None
        assert log.clients.weights(f"tinker://{model_id(there, 0)}/sampler_weights/unnamed-2") is not None
        assert "m2" in learner and (tmp_path / "models/2").exists()


async def test_an_engine_that_does_not_come_is_waited_for_until_a_deadline(autojump_clock: object) -> None:
    engine = KeptEngine(cast(Any, None), vocabulary=1, patience_s=60.0)
    began = trio.current_time()
    with pytest.raises(EngineUnavailable, match="no other one was up within 60 s"):
        await engine.client()
    assert trio.current_time() - began == 60


@pytest.mark.slow
@pytest.mark.tinker
def test_an_engine_that_is_killed_is_started_again_and_what_it_computed_is_answered(tmp_path: Path) -> None:
    import tinker
    from tinker import types

    with in_thread(tmp_path) as server, tinker.ServiceClient(base_url=server.url, api_key=server.key) as service:
        trainer = service.create_lora_training_client(MODEL, rank=2, seed=1).result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints([5, 9, 40, 77, 12])
        before = sampler.compute_logprobs(prompt).result()
        first = server.engine.process
        assert first is not None
        asked = sampler.sample(prompt, 4, types.SamplingParams(max_tokens=200, stop=[]))
        first.kill()
        assert [len(one.tokens) for one in asked.result().sequences] == [200] * 4
        assert server.engine.process is not first
        assert sampler.compute_logprobs(prompt).result()[1:] == pytest.approx(before[1:], abs=1e-5)
