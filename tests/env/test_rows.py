"""A data set and reward functions in the place of an environment."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from each_case import each_case

from agentrl import notices
from agentrl.env.dataset_env import RowsEnv
from agentrl.errors import EnvError, UsageError
from agentrl.host.clocks import HostClock, watch

HERE = __name__


def numpy_bool(prompt: Any, completion: str, row: Any) -> Any:
    return np.bool_(completion == "yes")


def numpy_number(prompt: Any, completion: str, row: Any) -> Any:
    return np.float32(0.5)


def one_element(prompt: Any, completion: str, row: Any) -> Any:
    return np.array(0.25)


def tensor(prompt: Any, completion: str, row: Any) -> Any:
    import torch

    return torch.tensor(0.75)


async def later(prompt: Any, completion: str, row: Any) -> float:
    await asyncio.sleep(0)
    return 0.125


def from_trl(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    assert set(kwargs) == {"prompts", "prompt"}
    return [float(said == right) for said, right in zip(completions, answer, strict=True)]


def talking_trl(prompts: list[Any], completions: list[Any]) -> list[float | None]:
    (asked,), (said,) = prompts, completions
    assert [message["role"] for message in (*asked, *said)] == ["system", "user", "assistant"]
    return [1.0 if said[0]["content"] == "yes" else None]


async def async_trl(completions: list[str], scale: int = 2, **kwargs: Any) -> Any:
    return np.array([scale * len(one) for one in completions])


def two_values(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0, 2.0]


def needs_more(completions: list[str], solution: list[str]) -> list[float]:
    return [1.0]


def two_arguments(prompt: Any, completion: str) -> float:
    return 1.0


def raises(prompt: Any, completion: str, row: Any) -> float:
    raise KeyError("missing")


def hangs(prompt: Any, completion: str, row: Any) -> float:
    while completion == "hang":
        pass
    return 1.0


def dies(prompt: Any, completion: str, row: Any) -> float:
    os._exit(3)


def prints(prompt: Any, completion: str, row: Any) -> float:
    print('{"score": 7}', flush=True)
    return float(os.getpid())


def alarmed(prompt: Any, completion: str, row: Any) -> float:
    """As math-verify bounds a comparison: by a signal, which needs a main thread."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    signal.alarm(0)
    return 1.0


def length(prompt: Any, completion: str, row: Any) -> float:
    return float(len(completion))


def same(prompt: Any, completion: str, row: Any) -> bool:
    return completion == row["answer"] and prompt[-1]["role"] == "user"


def nothing(prompt: Any, completion: str, row: Any) -> Any:
    return math.nan


def env(*rewards: str, **settings: Any) -> RowsEnv:
    return RowsEnv(rewards=[f"{HERE}:{name}" for name in rewards], **settings)


def test_the_outcome_is_the_weighted_sum_of_what_the_functions_say_of_prompt_answer_and_row() -> None:
    one = env("length", "same", weights=[0.1, 2.0], prompt="{question}!", system="be brief", success_from=2.0)
    messages, _ = one.reset(options={"question": "2 + 2?", "answer": "4"})
    assert [message["content"] for message in messages] == ["be brief", "2 + 2?!"]
    *_, terminated, _, info = one.step("4")
    assert terminated and info["outcome"] == pytest.approx(2.1) and info["success"]
    one.reset(options={"question": "2 + 2?", "answer": "4"})
    *_, info = one.step("five")
    assert info["outcome"] == pytest.approx(0.4) and not info["success"]
    assert info["scores"] == {f"{HERE}:length": 4.0, f"{HERE}:same": 0.0}


def test_a_column_of_messages_is_asked_as_it_is() -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "{c}"}]
    assert env("length").reset(options={"prompt": talk})[0] == tuple(talk)


def test_cells_that_are_no_text_are_written_as_json_and_a_null_as_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Not as Python writes them: `None`, `True` and single quotes are in nobody's data."""
    row = {"question": "q", "hint": None, "options": ["a", {"b": True}], "exact": False, "n": 3, "rate": 0.5}
    asked, _ = env("length", prompt="{question}|{hint}|{options}|{exact}|{n}|{rate:.2f}").reset(options=row)
    assert [message["content"] for message in asked] == ['q||["a", {"b": true}]|false|3|0.50']
    assert [text for text in caplog.messages if "null" in text]
    for nothing in (None, "", []):
        with pytest.raises(UsageError, match="there is nothing to ask"):
            env("length").reset(options={"prompt": nothing})
    env("length").reset(options={"prompt": '[{"role": "user", "content": "q"}]'})
    assert [text for text in caplog.messages if "chat messages as JSON text" in text]


def test_held_out_rows_are_asked_by_seed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{at}"}) + "\n" for at in range(3)))
    one = env("length", rows=str(file))
    assert [one.reset(seed=seed)[0][0]["content"] for seed in (0, 1, 2, 3)] == ["q0", "q1", "q2", "q0"]


def test_what_cannot_be_asked_or_judged_is_named() -> None:
    with pytest.raises(UsageError, match=r"prompt = '\{question\}' cannot be filled: 'question'; a row has prompt"):
        env("length", prompt="{question}").reset(options={"prompt": "a"})
    with pytest.raises(UsageError, match="no row to ask"):
        env("length").reset(seed=1)
    with pytest.raises(UsageError, match="give one for each of the 1 rewards"):
        env("length", weights=[1, 2])
    one = env("nothing")
    one.reset(options={"prompt": "a"})
    with pytest.raises(EnvError, match=r"'\S+:nothing' returned nan: return a finite number"):
        one.step("b")


ANYWHERE = pytest.mark.parametrize("processes", [0, 1], ids=["thread", "process"])


def outcome(one: RowsEnv, action: str, **row: Any) -> float:
    one.reset(options={"prompt": "a", **row})
    return one.step(action)[4]["outcome"]


@ANYWHERE
def test_scores_of_every_kind_by_functions_of_every_form(processes: int) -> None:
    forms = ("numpy_bool", "numpy_number", "one_element", "later", "from_trl", "async_trl")
    one = env(*forms, processes=processes)
    for action, expected in (("yes", [1.0, 0.5, 0.25, 0.125, 0.0, 6.0]), ("4", [0.0, 0.5, 0.25, 0.125, 1.0, 2.0])):
        one.reset(options={"prompt": "a", "answer": "4"})
        scores = one.step(action)[4]["scores"]
        assert [scores[f"{HERE}:{name}"] for name in forms] == expected


def test_a_tensor_without_dimensions_is_a_score() -> None:
    assert outcome(env("tensor", processes=0), "") == 0.75


@ANYWHERE
def test_a_prompt_of_messages_is_answered_with_one_as_in_trl(processes: int) -> None:
    one = env("talking_trl", processes=processes, system="be brief")
    talk = [{"role": "user", "content": "?"}]
    assert outcome(one, "yes", prompt=talk) == 1.0
    assert outcome(one, "no", prompt=talk) == 0.0, "None: not for this row"


@each_case(
    ("name", "processes", "message"),
    [
        ("raises", 0, r"raised KeyError: 'missing' \(.*test_rows\.py:\d+\)"),
        ("raises", 1, r"raised KeyError: 'missing' \(.*test_rows\.py:\d+\)"),
        ("two_values", 0, r"returned \[1\.0, 2\.0\]: return one number per completion"),
        ("nothing", 0, r"returned nan: return a finite number"),
    ],
)
def test_a_function_that_fails_is_named_wherever_it_runs(name: str, processes: int, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        outcome(env(name, processes=processes), "b")


def test_a_column_that_trl_would_give_and_no_row_has_is_named() -> None:
    with pytest.raises(UsageError, match=r"needs_more' asks for solution; a row has answer, prompt"):
        outcome(env("needs_more", processes=0), "b", answer="4")


def test_a_signature_that_cannot_be_called_is_refused_when_it_is_made() -> None:
    with pytest.raises(UsageError, match=r"takes \(prompt.*, completion.*give \(prompt, completion, row\), or TRL's"):
        env("two_arguments")


def test_functions_that_need_a_main_thread_have_one() -> None:
    failures: list[BaseException] = []

    def play() -> None:
        try:
            assert outcome(env("alarmed"), "b") == 1.0
            with pytest.raises(EnvError, match="signal only works in main thread"):
                outcome(env("alarmed", processes=0), "b")
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=play)
    thread.start()
    thread.join(timeout=120)
    assert not thread.is_alive() and not failures, failures


def busy(prompt: Any, completion: str, row: Any) -> float:
    started = time.monotonic()
    while time.monotonic() < started + 0.4:
        pass
    return 1.0


@pytest.mark.medium
def test_waiting_for_a_process_is_the_hosts_time(tmp_path: Path) -> None:
    """Ten answers at once, two functions, one process that takes 2 s to start: the last answer waits for some 6 s, and
    neither its step (4 s) nor a function (4 s) has run out of time. An answer that nobody waits for is not judged.
    """
    log, module = tmp_path / "judged", tmp_path / "slow_to_import.py"
    module.write_text(
        "import time\ntime.sleep(2)\n"
        f"def note(prompt, completion, row):\n    open({str(log)!r}, 'a').write(completion)\n    return 1.0\n"
    )
    results: list[tuple[Any, Any]] = []

    async def play(action: str, own_s: float = 4.0) -> None:
        one = RowsEnv(rewards=[f"{HERE}:busy", f"{module}:note"], reward_s=4.0, processes=1)
        await one.areset(seed=0, options={"prompt": "q"})
        with watch(own_s=own_s) as watching:
            info = (await one.astep(action))[4]
            results.append((watching.over, info["outcome"]))

    async def burst() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(play, "a")
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(0.5):
                await play("left")

    trio.run(burst, clock=HostClock())
    assert results == [(None, 2.0)] * 10
    assert log.read_text() == "a" * 10


def sparse(completions: list[str], n: list[int], **kwargs: Any) -> list[float | None]:
    return [None if number % 2 else 1.0 for number in n]


@ANYWHERE
def test_a_function_that_abstains_has_no_score(processes: int) -> None:
    """TRL's rule: None adds nothing to the reward, and is no part of the function's mean."""
    one = env("sparse", "same", processes=processes)
    infos = []
    for n in (0, 1):
        one.reset(seed=0, options={"prompt": "q", "n": n, "answer": "b"})
        infos.append(one.step("b")[4])
    assert [info["outcome"] for info in infos] == [2.0, 1.0]
    assert [[name.rpartition(":")[2] for name in info["scores"]] for info in infos] == [["sparse", "same"], ["same"]]


@pytest.mark.medium
def test_a_function_that_hangs_gives_0_and_the_next_answer_is_judged(caplog: pytest.LogCaptureFixture) -> None:
    one = env("same", "hangs", reward_s=2.0, processes=1)
    assert outcome(one, "hang", answer="hang") == 1.0, "what has answered counts"
    assert "hangs' had not judged an answer within reward_s = 2" in caplog.text
    one.reset(seed=0, options={"prompt": "q", "answer": "hang"})
    info = one.step("hang")[4]
    assert [list(info["scores"]), info["scores_late"]] == [[one._names[0]], [one._names[1]]]
    patient = env("same", "hangs", reward_s=100.0, processes=1)
    assert outcome(patient, "no", answer="hang") == 1.0


@pytest.mark.medium
def test_a_function_that_ends_its_process_fails_its_episode_alone() -> None:
    for _ in range(2):
        with pytest.raises(EnvError, match="process of the reward functions ended with status 3"):
            outcome(env("dies", processes=1), "b")


def test_what_a_function_prints_is_no_answer_and_the_process_is_kept() -> None:
    one = env("prints", processes=1)
    first = outcome(one, "b")
    assert first == outcome(one, "c") == outcome(env("prints", processes=1), "d")
    assert first not in (7.0, os.getpid())


def abstains(completions: list[str], **kwargs: Any) -> list[None]:
    return [None for _ in completions]


def noted(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "agentrl.notices"]


def test_columns_that_the_model_or_a_function_does_not_see_are_named(caplog: pytest.LogCaptureFixture) -> None:
    notices.OF_PROCESS.forget()
    row = {"prompt": "q", "answer": "a", "prompts": "p", "completions": "c", "tools": [{"name": "f"}], "images": None}
    env("abstains").reset(options=row)
    assert noted(caplog) == [
        "data rows: the column 'tools' is not shown to the model",
        "data rows: the column 'completions' is hidden: reward functions get the run's own completions by this name",
        "data rows: the column 'prompts' is hidden: reward functions get the run's own prompts by this name",
    ]


def test_an_answer_that_no_function_judges_is_named(caplog: pytest.LogCaptureFixture) -> None:
    notices.OF_PROCESS.forget()
    assert outcome(env("abstains"), "yes") == 0.0
    assert noted(caplog) == ["rewards: no reward function judges an answer (each returned None): its outcome is 0"]


@each_case(
    ("prompt", "reason"),
    [
        ({"role": "user", "content": "q"}, "a single message"),
        ([{"role": "user", "content": None}], "messages without content"),
        ([], "nothing to ask"),
    ],
)
def test_a_row_that_asks_nothing_is_refused(prompt: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        env("abstains").reset(options={"prompt": prompt})


def equal(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    from math_verify import parse, verify  # pyright: ignore

    return [float(verify(parse(right), parse(said))) for said, right in zip(completions, answer, strict=True)]


@pytest.mark.adapters
def test_math_verify_judges_within_its_own_time_limits() -> None:
    pytest.importorskip("math_verify")
    one = env("equal", reward_s=100.0)
    assert outcome(one, "$\\frac{2}{4}$", answer="$0.5$") == 1.0
    assert outcome(one, "$\\frac{3}{4}$", answer="$0.5$") == 0.0


def test_tools_are_refused_with_the_id_of_the_environment_that_takes_them() -> None:
    with pytest.raises(
        UsageError, match=r"^tools = \['tools.py:add'\]: .* env.id = 'agentrl.env.dataset_env:RowsToolEnv'$"
    ):
        RowsEnv(rewards=[f"{HERE}:numpy_bool"], tools=["tools.py:add"])
