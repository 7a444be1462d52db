"""A run as a job of a Ray cluster: what is sent to the cluster's dashboard, and what it answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from each_case import each_case
from trio.testing import MockClock

from agentrl.errors import UsageError, matters
from agentrl.run import supervisor
from agentrl.run.cluster import submit as submitting
from agentrl.run.cluster.submit import entrypoint, submit
from agentrl.store import RunStore, run_values
from agentrl.store.async_calls import Looks

from .test_scaling import made
from .test_status import typed

HEAD = "http://head:8265"
TEXT = """model = "m"
env = {id = "e"}
name = "it's $HOME `here` \\"quoted\\" %s"
"""


class Dashboard:
    """The job API of Ray 2.60, for one job whose states are given; it answers in the shapes of a real one."""

    def __init__(self, *states: str, logs: str = "") -> None:
        self.states, self.logs, self.asked = list(states), logs, list[httpx.Request]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        match request.method, request.url.path:
            case "POST", "/api/jobs/":
                return httpx.Response(200, json={"job_id": "raysubmit_1", "submission_id": "raysubmit_1"})
            case "GET", "/api/jobs/raysubmit_1":
                state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
                told = {
                    "type": "SUBMISSION",
                    "job_id": None,
                    "submission_id": "raysubmit_1",
                    "message": "it is " + state,
                }
                return httpx.Response(200, json={**told, "status": state})
            case "GET", "/api/jobs/raysubmit_1/logs":
                return httpx.Response(200, json={"logs": self.logs})
            case _:
                return httpx.Response(404, text="404: Not Found")


def sent(answer: Callable[[httpx.Request], httpx.Response], **how: Any) -> str:
    transport = httpx.MockTransport(answer)
    return submit(HEAD, "true", deadline_s=60.0, transport=transport, sleep=lambda _: None, **how)


def test_the_job_runs_the_run_file_as_it_is_whatever_stands_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real shell runs it, as Ray's does."""
    (tmp_path / "bin").mkdir()
    agentrl = tmp_path / "bin" / "agentrl"
    agentrl.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    agentrl.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    file, out = tmp_path / "run.toml", tmp_path / "a b" / "mine"
    file.write_text(TEXT)
    command = entrypoint(file, out, ["train.steps=3", 'name="x y"'])
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True)
    copy = tmp_path / "a b" / "mine.toml"
    assert copy.read_text() == TEXT
    given = [f"--set={one}" for one in ("cluster.launcher=ray", "cluster.address=auto", "train.steps=3", 'name="x y"')]
    words = json.loads(done.stdout)
    assert words[:4] == ["train", str(copy), "--out", str(out)]
    assert [f"{a}={b}" for a, b in zip(words[4::2], words[5::2], strict=True)] == given


def test_a_job_is_waited_for_until_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(submitting.TOKEN, "secret")
    dashboard = Dashboard("PENDING", "PENDING", "RUNNING")
    assert sent(dashboard) == "raysubmit_1"
    first, *rest = dashboard.asked
    assert json.loads(first.content) == {"entrypoint": "true"}
    assert len(rest) == 3 and {one.headers["Authorization"] for one in dashboard.asked} == {"Bearer secret"}


def test_a_job_that_fails_at_once_says_why() -> None:
    with pytest.raises(UsageError, match=r"raysubmit_1 .* \(FAILED\): agentrl: model = 'm': no such model"):
        sent(Dashboard("PENDING", "FAILED", logs="agentrl: model = 'm': no such model\n"))
    with pytest.raises(UsageError, match="it is STOPPED"):
        sent(Dashboard("STOPPED"))


def _nobody(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("Connection refused", request=request)


@each_case(
    ("answer", "told"),
    [
        (_nobody, r"does not answer \(Connection refused\): give that of the head's dashboard, http://HEAD:8265"),
        (lambda _: httpx.Response(401, text="Unauthorized"), "set RAY_AUTH_TOKEN"),
        (lambda _: httpx.Response(500, text="Traceback\nValueError: no"), "answered 500: ValueError: no"),
        (lambda _: httpx.Response(200, text="<html>"), "answered 200: <html>"),
    ],
)
def test_what_is_no_cluster_is_said_in_one_line(answer: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        sent(answer)


def test_the_command_checks_the_file_and_says_what_to_type_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict[str, Any]()

    def submitted(address: str, command: str, *, deadline_s: float) -> str:
        given.update(address=address, command=command)
        return "raysubmit_1"

    monkeypatch.setattr(submitting, "submit", submitted)
    file, out = tmp_path / "run.toml", tmp_path / "mine"
    file.write_text('model = "m"\nenv = {id = "e"}\n')
    done = typed("submit", file, "--address", HEAD, "--out", out)
    assert done.output == (
        f"job raysubmit_1 of {HEAD} trains in {out}\n"
        f"next      agentrl status {out}; agentrl logs {out} --follow; agentrl stop {out}\n"
    )
    assert given["address"] == HEAD and str(out) in given["command"]
    given.clear()
    wrong = typed("submit", file, "--address", HEAD, "--set", "rollout.workers=0")
    assert isinstance(wrong.exception, UsageError) and not given, "nothing is sent that cannot run"
    there = typed("submit", file, "--address", HEAD, "--out", made(tmp_path).path)
    assert isinstance(there.exception, UsageError) and "holds a run" in str(there.exception) and not given


async def test_a_run_of_another_machine_ends_when_its_store_asks_for_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    run = made(tmp_path)
    run.lock_path.write_text("17.1.4026531999.abcd")
    with RunStore.open(run.store_path) as store:
        store.set_meta(run_values.STOP_REQUESTED.key, "16.1.4026531999.abcd")  # it was for the one before
        with trio.move_on_after(100):
            await supervisor._stop_on_request(run, Looks(store))
        store.set_meta(run_values.STOP_REQUESTED.key, "17.1.4026531999.abcd")
        with trio.fail_after(5), pytest.raises(supervisor.Interrupted, match="--resume") as raised:
            await supervisor._stop_on_request(run, Looks(store))
        assert matters(raised.value).exit_code == 130
