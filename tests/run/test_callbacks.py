"""Callbacks over a real store, with no process started: what is told, once, in which order, and how one that raises or
hangs ends. `told` of the tests is written by the callbacks, the expected events are the rows that the tests made."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from each_case import each_case
from store.play import admit, play, play_all, serve

from agentrl import Callback, EarlyStopping, StopTraining
from agentrl.config import parse
from agentrl.errors import UsageError
from agentrl.records import StopReason, Task
from agentrl.run.callbacks import delivery
from agentrl.run.callbacks.callback import EvalEnded, StepEnded, check_callbacks
from agentrl.run.callbacks.delivery import telling
from agentrl.run.callbacks.event_feed import place_key
from agentrl.run.run_folder import RunDir
from agentrl.run.stop_request import StopRequest
from agentrl.store import Ending, RunStore

DEADLINE_S = 300.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", parse({"model": "m", "env": {"id": "e"}}))


@pytest.fixture
def store(run: RunDir) -> Iterator[RunStore]:
    with RunStore.open(run.store_path) as found:
        yield found


class Notes(Callback):
    """Writes down the id of each event it is told of."""

    def __init__(self, name: str = "Notes") -> None:
        super().__init__(name=name)
        self.told: list[str] = []

    def on_start(self, run: Any) -> None:
        self.told.append(f"start:{run.attempt}:{run.step}")

    def on_end(self, end: Any) -> None:
        self.told.append(f"end:{end.step}:{end.finished}")

    def _event(self, event: Any) -> None:
        self.told.append(event.id)

    on_step = on_episode = on_weights = on_eval = _event


def tell(run: RunDir, *callbacks: Callback, during: Callable[[], object] = lambda: None) -> StopRequest:
    """Tell callbacks in a run in which `during` happens."""
    stop = StopRequest()

    async def main() -> None:
        async with telling(check_callbacks(callbacks), run, run.config(), stop):
            await trio.to_thread.run_sync(during)

    trio.run(main)
    return stop


def step(store: RunStore, number: int, **values: Any) -> int:
    """An optimizer step, and engines that serve its weights."""
    version = serve(store, number)
    store.metrics.record("step", number, {"loss": float(number), **values})
    return version


def test_each_event_is_told_once_and_a_resumed_run_goes_on_from_there(run: RunDir, store: RunStore) -> None:
    serve(store, 0)
    admit(store, limit=2)
    first, second, third, fourth = store.leases.claim("worker", 4, lease_s=30.0)
    play(store, third)  # before the first: episodes do not end in the order of their numbers
    step(store, 1)
    notes = Notes()
    tell(run, notes)
    assert notes.told[0] == "start:1:0" and notes.told[-1] == "end:1:True"
    assert sorted(notes.told[1:-1]) == sorted([f"episode:{third.episode_id}", "step:1:1", "weights:1", "weights:2"])

    later = Notes()
    tell(run, later, during=lambda: [play(store, claim) for claim in (first, fourth)])
    assert later.told[0] == "start:1:0"
    assert sorted(later.told[1:-1]) == sorted([f"episode:{one.episode_id}" for one in (first, fourth)])

    play(store, second)
    step(store, 2)
    last = Notes()
    tell(run, last)
    assert sorted(last.told[1:-1]) == sorted([f"episode:{second.episode_id}", "step:1:2", "weights:3"])
    again = Notes()
    tell(run, again)
    assert again.told == ["start:1:0", "end:2:True"]
    tell(run, new := Notes("another"))  # has a place of its own
    assert len(new.told) == 2 + 4 + 2 + 3


def test_a_step_that_a_restart_undid_is_told_again_and_one_nobody_was_told_of_is_not(
    run: RunDir, store: RunStore
) -> None:
    serve(store, 0)
    store.lineage.checkpoint(1, step(store, 1), run.checkpoints / "1")
    step(store, 2)
    tell(run, Notes())
    step(store, 3)
    store.lineage.rollback(1)  # undoes step 2, which was told, and step 3, which was not
    step(store, 2)
    notes = Notes()
    tell(run, notes)
    assert [one for one in notes.told if one.startswith(("start", "step"))] == ["start:2:1", "step:2:2"]


def test_an_evaluation_is_told_when_its_last_episode_has_ended(run: RunDir, store: RunStore) -> None:
    serve(store, 0)
    purpose = "eval:tasks:before"
    store.groups.add_groups([Task(index=at, env="e", seed=at) for at in range(2)], size=1, purpose=purpose)
    one, other = store.leases.claim("worker", 2, lease_s=30.0)
    play(store, one, outcome=1.0)
    evaluations: list[EvalEnded] = []
    hook = Callback(name="evals", on_eval=evaluations.append)
    tell(run, hook)
    assert evaluations == []
    play(store, other, outcome=0.0)
    tell(run, hook)
    (found,) = evaluations
    assert (found.name, found.when, found.step, found.success, found.n) == ("tasks", "before", 0, 0.5, 2)
    store.groups.rename_purpose(purpose, "eval:tasks:during@7")  # as a run does that goes on for longer
    tell(run, hook)
    assert len(evaluations) == 1


def test_a_kill_before_the_place_is_written_tells_the_last_events_again_with_the_same_ids(
    run: RunDir, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(store, 0)
    step(store, 1)
    monkeypatch.setattr(delivery.Teller, "_save", lambda *_: None)  # killed before it
    tell(run, first := Notes())
    monkeypatch.undo()
    tell(run, second := Notes())
    tell(run, third := Notes())
    assert first.told == second.told and third.told == ["start:1:0", "end:1:True"]


def test_thousands_of_episodes_are_told_in_order_and_none_twice(run: RunDir, store: RunStore) -> None:
    serve(store, 0)
    admit(store, limit=700, max_running=10_000, max_lag=10_000, groups_per_step=700)
    ended = [claim.episode_id for claim in [*play_all(store, turns=1), *play_all(store, turns=1)]]
    assert len(ended) == 1400
    told: list[int] = []
    one = Callback(name="one", on_episode=lambda episode: told.append(episode.episode))
    tell(run, one)
    tell(run, one)
    assert sorted(told) == sorted(ended)
    assert store.meta(place_key("one")) is not None


def boom(event: StepEnded) -> None:
    raise KeyError(f"loss of {event.step}")


def test_what_raises_ends_the_run_with_its_place_and_its_event_counts_as_told(
    run: RunDir, store: RunStore, capfd: pytest.CaptureFixture[str]
) -> None:
    serve(store, 0)
    step(store, 1)
    step(store, 2)
    notes = Notes()
    stop = tell(run, Callback(name="mine", on_step=boom), notes)
    line = boom.__code__.co_firstlineno + 1
    assert stop.error is not None and stop.finish is None
    assert str(stop.error) == (
        f"callback mine: on_step(step:1:1) raised KeyError: 'loss of 1' ({__file__}:{line});"
        " with errors = 'warn' the run goes on"
    )
    printed = capfd.readouterr().err
    assert f'File "{__file__}", line {line}, in boom' in printed and "delivery.py" not in printed
    assert "step:1:2" in notes.told, "the others are told"
    stop = tell(run, Callback(name="mine", on_step=boom))
    assert "on_step(step:1:2)" in str(stop.error)


def test_with_warn_it_goes_on_and_a_run_that_fails_alike_a_thousand_times_has_few_lines(
    run: RunDir, store: RunStore, capfd: pytest.CaptureFixture[str]
) -> None:
    serve(store, 0)
    for number in range(1, 10):
        step(store, number)
    stop = tell(run, Callback(name="mine", on_step=boom, errors="warn"))
    assert stop == StopRequest()
    printed = capfd.readouterr().err
    assert printed.count("Traceback") == 1
    assert [int(line.split("step:1:")[1].split(")")[0]) for line in printed.splitlines() if "raised" in line] == [
        1,
        2,
        4,
        8,
    ]


def test_one_that_hangs_is_named_with_its_line_and_holds_nobody_up(
    run: RunDir, store: RunStore, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_LOOK_S", 0.01)
    serve(store, 0)
    step(store, 1)
    goes_on, entered = threading.Event(), threading.Event()

    def hangs(_: StepEnded) -> None:
        _ = entered.set(), goes_on.wait(DEADLINE_S)  # on one line: the run may look before the hook waits

    notes, printed = Notes(), ""

    def until_named() -> None:
        nonlocal printed
        assert entered.wait(DEADLINE_S)
        while "the run goes on" not in printed:
            printed += capfd.readouterr().err

    try:
        tell(run, Callback(name="slow", on_step=hangs, deadline_s=0.05), notes, during=until_named)
    finally:
        goes_on.set()
    line = hangs.__code__.co_firstlineno + 1
    place = re.escape(f"{__file__}:{line}")
    said = rf"callback slow: on_step \(step:1:1\) has not returned for \d+ s, at {place}; the run goes on"
    assert re.search(said, printed), printed
    assert "the run ends without it, and delivers the rest when it goes on" in capfd.readouterr().err
    assert notes.told[-1] == "end:1:True"
    tell(run, Callback(name="slow", on_step=(told := list[StepEnded]()).append))
    assert [event.step for event in told] == [1], "what it was in is told again"


def test_stop_training_ends_it_in_order_and_exit_is_no_way_out(run: RunDir, store: RunStore) -> None:
    serve(store, 0)
    step(store, 1)

    def enough(_: StepEnded) -> None:
        raise StopTraining("good enough")

    stop = tell(run, Callback(name="mine", on_step=enough))
    assert (stop.finish, stop.error, stop.interrupt) == ("callback mine: good enough", None, None)

    def leaves(_: StepEnded) -> None:
        raise SystemExit(3)

    assert "raised SystemExit: 3" in str(tell(run, Callback(name="other", on_step=leaves)).error)


class Misspelt(Callback):
    def on_steps(self, step: StepEnded) -> None: ...


class Awaited(Callback):
    async def on_step(self, step: StepEnded) -> None: ...  # pyright: ignore[reportIncompatibleMethodOverride]


@each_case(
    ("callbacks", "match"),
    [
        ([Misspelt()], "Misspelt: on_steps is never called; the hooks are on_start, on_episode, on_step"),
        ([Awaited()], "on_step is a coroutine function: hooks run in a thread"),
        ([Callback()], "callback Callback has no hook"),
        ([print], "is no callback: derive its class"),
        ([Callback(on_step=print), Callback(on_eval=print)], "two callbacks have the name 'Callback'"),
        ([Callback(on_step=print, errors="ignore")], "errors = 'ignore': give 'stop' or 'warn'"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_a_callback_that_would_do_nothing_is_refused(callbacks: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        check_callbacks(callbacks)


def stops_at(early: EarlyStopping, values: list[float | None], first: int = 1) -> int | None:
    """The step at which it stops training, if any."""
    for number, value in enumerate(values, first):
        event = StepEnded(id="", step=number, attempt=1, time_s=0.0, values={"success_mean": value})
        try:
            early.on_step(event)
        except StopTraining:
            return number
    return None


@each_case(
    ("settings", "values", "stops"),
    [
        ({"patience": 3}, [0.1, 0.5, 0.5, 0.4, 0.5, 0.9], 5),
        ({"patience": 3}, [0.1, 0.5, 0.4, 0.4, 0.6, 0.5, 0.5, 0.5], 8),
        ({"patience": 2, "min_delta": 0.2}, [0.1, 0.2, 0.3, 0.4], 3),
        ({"patience": 2, "mode": "min"}, [5.0, 4.0, 4.5, 4.2], 4),
        ({"target": 0.9}, [0.1, 0.9, 0.1], 2),
        ({"target": 0.1, "mode": "min"}, [0.2, 0.1], 2),
        ({"target": 0.5, "window": 2}, [0.9, 0.0, 0.4, 0.6], 4),  # means 0.45, 0.2, 0.5
        ({"patience": 2}, [0.5, None, None, 0.4, None, 0.3], 6),
    ],
)
def test_early_stopping(settings: dict[str, Any], values: list[float | None], stops: int) -> None:
    assert stops_at(EarlyStopping("success_mean", **settings), values) == stops


def test_early_stopping_counts_a_step_that_was_undone_once() -> None:
    early = EarlyStopping("success_mean", patience=2)
    assert stops_at(early, [0.5, 0.4]) is None
    assert stops_at(early, [0.4], first=2) is None, "step 2 was trained again"
    assert stops_at(early, [0.4], first=3) == 3


def test_early_stopping_refuses_what_never_stops_and_names_what_it_could_mean() -> None:
    with pytest.raises(UsageError, match="would never stop"):
        EarlyStopping("loss")
    with pytest.raises(UsageError, match="no step has a metric 'sucess_mean': give success_mean"):
        stops_at(EarlyStopping("sucess_mean", patience=1), [0.5])


def test_early_stopping_of_a_resumed_run_counts_from_its_first_step(run: RunDir, store: RunStore) -> None:
    serve(store, 0)
    for number, value in enumerate([0.5, 0.4], 1):
        step(store, number, success_mean=value)
    assert tell(run, EarlyStopping("success_mean", patience=2)).finish is None
    step(store, 3, success_mean=0.4)
    stop = tell(run, EarlyStopping("success_mean", patience=2))
    assert stop.finish is not None and "for 2 values, since 0.5 at step 1, at step 3" in stop.finish


def test_failed_episodes_are_told_with_their_cause(run: RunDir, store: RunStore) -> None:
    serve(store, 0)
    admit(store, limit=1)
    (claim, *_) = store.leases.claim("worker", 1, lease_s=30.0)
    store.journal.begin(claim.episode_id, claim.fence, ({"role": "user", "content": "x"},))
    failed = Ending(stop_reason=StopReason.ENV_FAILED, detail="KeyError: 'x'")
    store.journal.finish(claim.episode_id, claim.fence, failed)
    told: list[Any] = []
    tell(run, Callback(name="one", on_episode=told.append))
    assert [(one.stop_reason.by_policy, one.detail, one.purpose) for one in told] == [(False, "KeyError: 'x'", "train")]
