"""A training server that is killed goes on where it was: every future it accepted has its answer, and no step is made
twice."""

from __future__ import annotations

import errno
import json
import signal
import sqlite3
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from safetensors import SafetensorError

from agentrl.errors import DiskFull
from agentrl.host.ports import free_port
from agentrl.learner.adapter_learner import AdapterLearner
from agentrl.models.resolve import model_dir
from agentrl.run.training_server import disk_waits
from agentrl.run.training_server.call_log import Call, CallAnswer, CallEffects, CallLog
from agentrl.run.training_server.training_calls import TrainingCalls, model_id

from .training_servers import MODEL, START_S, in_process

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

ROWS = [[5, 9, 40, 77, 12, 300], [8, 8, 31, 2]]
MODEL_ID = model_id("s", 0)


class Killed(BaseException):
    """Nothing in the server catches it."""


class DyingLog(CallLog):
    """Its process ends at the answer of call `at`: before it is written, or after."""

    def __init__(self, file: Path, at: int | None = None, *, written: bool = False) -> None:
        super().__init__(file)
        self._at, self._written = at, written

    def answer(self, call: Call, answer: CallAnswer, effects: CallEffects | None = None) -> None:
        if call.place == self._at and not self._written:
            raise Killed
        super().answer(call, answer, effects)
        if call.place == self._at:
            raise Killed


def forward_backward(row: Sequence[int], *, loss: str = "cross_entropy") -> bytes:
    from tinker import types
    from tinker.proto.request_conv import forward_backward_request_to_proto

    inputs: Any = {"target_tokens": list(row[1:])}
    datum = types.Datum(model_input=types.ModelInput.from_ints(list(row[:-1])), loss_fn_inputs=inputs)
    given = types.ForwardBackwardInput(data=[datum], loss_fn=loss)  # pyright: ignore
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id=MODEL_ID, seq_id=1)
    return forward_backward_request_to_proto(request).SerializeToString()


def fields(**given: object) -> bytes:
    return json.dumps(given).encode()


STEP = fields(adam_params={"learning_rate": 1e-2, "eps": 1e-2})
CALLS = [
    ("create_model", fields(session_id="s", model_seq_id=0, base_model=MODEL, lora_config={"rank": 2, "seed": 1})),
    ("forward_backward", forward_backward(ROWS[0])),
    ("forward_backward", forward_backward(ROWS[1])),
    ("optim_step", STEP),
    ("save_weights", fields(path="kept")),
    ("forward_backward", forward_backward(ROWS[0])),
    ("forward_backward", forward_backward(ROWS[0], loss="unknown")),
    ("forward", forward_backward(ROWS[1])),
    ("optim_step", STEP),
    ("optim_step", STEP),  # without gradients
    ("load_weights", fields(path=f"tinker://{MODEL_ID}/weights/kept", optimizer=True)),
    ("forward_backward", forward_backward(ROWS[1])),
    ("save_weights_for_sampler", fields(path="shown")),
    ("optim_step", STEP),
]
"""All kinds of calls, gradients of several before a step, and failures."""


def live(folder: Path, log: CallLog) -> bool:
    """One life of the server: calls that are not there yet come, all are computed. Returns whether it was killed."""
    folder.mkdir(exist_ok=True)
    learner = AdapterLearner(model_dir(MODEL))
    left = trio.Event()

    def answered(call: str) -> None:
        if call == f"{MODEL_ID}:{len(CALLS) - 1}":
            left.set()

    async def main() -> None:
        calls = TrainingCalls(log, learner, folder, most_tokens=64, answered=answered)
        for place, (kind, body) in enumerate(CALLS):
            model = None if place else MODEL_ID
            log.accept(session="s", owner=MODEL_ID, place=place, kind=kind, body=body, model=model)
        async with trio.open_nursery() as nursery:
            await nursery.start(calls.run)
            with trio.fail_after(120):
                await left.wait()
            nursery.cancel_scope.cancel()

    try:
        trio.run(main)
    except BaseExceptionGroup as group:
        if group.split(Killed)[1] is not None:
            raise
        return True
    finally:
        log.close()
    return False


def everything(folder: Path) -> tuple[list[Any], dict[str, bytes]]:
    """All answers, and the bytes of all weights."""
    with sqlite3.connect(folder / "calls.sqlite") as database:
        answers = database.execute("SELECT place, form, answer FROM calls ORDER BY place").fetchall()
    files = [path for path in folder.rglob("*.safetensors") if not path.name.startswith(".")]
    return answers, {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert not live(folder, DyingLog(folder / "calls.sqlite"))
    found = everything(folder)
    kinds = [form for _, form, _ in found[0]]
    assert [place for place, form in enumerate(kinds) if form == "failed"] == [6, 9]
    assert sorted(found[1]) == [
        f"models/1/{len(CALLS) - 1}.safetensors",
        "weights/13/adapter_model.safetensors",
        "weights/5/state.safetensors",
    ]
    return found


@pytest.mark.parametrize("written", [False, True], ids=["before an answer is written", "after"])
@pytest.mark.parametrize("at", range(len(CALLS)))
def test_killed_at_any_call_it_ends_as_if_it_had_not_been(
    at: int, written: bool, tmp_path: Path, undisturbed: tuple[list[Any], dict[str, bytes]]
) -> None:
    assert live(tmp_path, DyingLog(tmp_path / "calls.sqlite", at, written=written))
    answered = everything(tmp_path)[0][: at + written]
    assert all(form is not None for _, form, _ in answered)
    again = live(tmp_path, CallLog(tmp_path / "calls.sqlite")) if at + written < len(CALLS) else False
    assert not again
    answers, files = everything(tmp_path)
    assert answers[: at + written] == answered
    assert answers == undisturbed[0]
    assert {name: files.get(name) for name in undisturbed[1]} == undisturbed[1]


class FullLog(CallLog):
    """Its disk is full whenever an answer is to be written for the first time."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.tried = list[int]()

    def answer(self, call: Call, answer: CallAnswer, effects: CallEffects | None = None) -> None:
        self.tried.append(call.place)
        if self.tried.count(call.place) == 1:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            with self.file.writing():
                raise error
        super().answer(call, answer, effects)


@pytest.mark.medium
def test_a_full_disk_is_waited_for_and_it_ends_as_if_there_had_been_space(
    tmp_path: Path,
    undisturbed: tuple[list[Any], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For every answer, and for every file of weights, of which a part may be there."""
    saved, saves = AdapterLearner.save, set[Path]()

    def save(learner: AdapterLearner, name: str, file: Path) -> None:
        if file not in saves:
            saves.add(file)
            file.write_bytes(b"half")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        saved(learner, name, file)

    monkeypatch.setattr(AdapterLearner, "save", save)
    monkeypatch.setattr(disk_waits, "_LOOK_S", 0.0)
    log = FullLog(tmp_path / "calls.sqlite")
    assert not live(tmp_path, log)
    answers, files = everything(tmp_path)
    assert answers == undisturbed[0]
    assert {name: files.get(name) for name in undisturbed[1]} == undisturbed[1]
    assert sorted(log.tried) == sorted([*range(len(CALLS))] * 2) and len(saves) > 4
    assert f"no space left for {tmp_path}: free some; it is waited for" in capsys.readouterr().err


async def test_a_disk_that_stays_full_ends_the_server(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    wait, full = disk_waits.SpaceWait(tmp_path), OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(DiskFull, match="for 3600 s"):
        while True:
            await wait.after(full)
    assert 3600 <= trio.current_time() < 3601
    with pytest.raises(OSError, match="Permission denied"):
        await wait.after(OSError(errno.EACCES, "Permission denied"))


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not true():
        assert time.monotonic() < deadline


@pytest.mark.slow
def test_a_client_goes_on_over_kills_of_its_server(tmp_path: Path) -> None:
    import tinker
    from tinker import types

    port = free_port()  # none of those that the system gives to others while the server is away
    state = tmp_path / "state"
    params = types.AdamParams(learning_rate=1e-2, eps=1e-2)
    data = [
        types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:]})  # pyright: ignore
        for row in ROWS
    ]

    def logprobs(future: Any) -> list[list[float]]:
        return [output["logprobs"].tolist() for output in future.result().loss_fn_outputs]

    def in_log(kind: str) -> int:
        with sqlite3.connect(state / "calls.sqlite") as database:
            return database.execute("SELECT count(*) FROM calls WHERE kind = ?", (kind,)).fetchone()[0]

    with in_process(state, port) as process:
        service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key=(state / "key").read_text())
        trainer = service.create_lora_training_client(MODEL, rank=2, seed=1).result()
        found = [logprobs(trainer.forward_backward(data, "cross_entropy"))]  # answered, and its gradient not stepped
        process.send_signal(signal.SIGKILL)
        process.wait()
    stepped = [trainer.optim_step(params)]  # nobody listens
    with in_process(state, port) as process:
        stepped[0].result()
        second, third = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(params)
        sampler = service.create_sampling_client(base_model=MODEL).result()
        sampled = sampler.sample(types.ModelInput.from_ints(ROWS[0]), 2, types.SamplingParams(max_tokens=4, stop=[]))
        until(lambda: in_log("optim_step") == 2 and in_log("sample") == 1)
        process.send_signal(signal.SIGKILL)  # it has promised three futures
        process.wait()
    with in_process(state, port):
        third.result()
        found += [logprobs(second), logprobs(trainer.forward(data, "cross_entropy"))]
        assert [len(one.tokens) for one in sampled.result().sequences] == [4, 4]
        assert in_log("optim_step") == 2
        alone = service.create_lora_training_client(MODEL, rank=2, seed=1).result()
        wanted = []
        for _ in range(2):
            wanted.append(logprobs(alone.forward_backward(data, "cross_entropy")))
            alone.optim_step(params).result()
        wanted.append(logprobs(alone.forward(data, "cross_entropy")))
        assert found == wanted
        assert all(one != other for one, other in pairwise(found))
        service.close("success").result()
