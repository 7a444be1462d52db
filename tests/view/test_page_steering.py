"""A run under way is paused, goes on and gets other settings from its page; nobody else's page, and no demo, can."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.run import live_settings, steering
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.run_values import PAUSED, REQUESTED_SETTINGS
from agentrl.view import page_server, web_page
from agentrl.view.bundle import write_bundle
from agentrl.view.opened_runs import OpenedRuns
from agentrl.view.web_page import Visitors, loopback_hosts

from .made_run import make_run

TOKEN = "secret-of-the-test"
KEY = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs" / "made")


@pytest.fixture
def page(run: RunDir) -> Iterator[TestClient]:
    runs = OpenedRuns([run.path.parent])
    yield client(runs)
    runs.close()


def client(runs: OpenedRuns, *, steer: bool = True) -> TestClient:
    visitors = Visitors(TOKEN, loopback_hosts("127.0.0.1"), steer)
    return TestClient(web_page.web_page(runs, visitors), base_url="http://127.0.0.1:8642", headers=KEY)


def ask(page: TestClient, what: str, body: Any, **headers: str) -> tuple[int, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json", **named}
    answer = page.post(f"/api/runs/made/{what}", content=content, headers=sent)
    document = answer.json()
    return answer.status_code, document.get("told") or document["error"]


def shown(page: TestClient) -> dict[str, Any]:
    return page.get("/api/runs/made").json()


def held(run: RunDir) -> tuple[Any, Any]:
    with RunStore.read(run.store_path) as store:
        return PAUSED.of(store.meta), REQUESTED_SETTINGS.of(store.meta)


def test_a_run_is_paused_and_goes_on_and_the_page_shows_it_at_once(run: RunDir, page: TestClient) -> None:
    with run.lock():
        before = page.get("/api/runs").json()[0]
        assert (before["live"], before["paused_s"]) == (True, None) and shown(page)["steers"] is True
        first = f"{run.path} is paused: turns and a step under way end first; agentrl resume {run.path} lets it go on"
        assert ask(page, "pause", {"now": False}) == (200, first)
        assert page.get("/api/runs").json()[0]["paused_s"] >= 0, "no answer from before is kept"
        assert shown(page)["steering"]["paused"] == held(run)[0] == {**held(run)[0], "now": False}
        assert ask(page, "pause", {"now": True})[1].startswith(f"{run.path} is paused: turns under way stop")
        assert held(run)[0]["now"] is True
        assert ask(page, "resume", {})[1].startswith(f"{run.path} goes on; it was paused for ")
        assert held(run)[0] == {} and shown(page)["steering"]["paused"] is None
    assert ask(page, "pause", {"now": False}) == (400, f"{run.path} is not under way: there is nothing to pause")


def test_settings_are_asked_for_and_refused_with_the_reason(run: RunDir, page: TestClient) -> None:
    with run.lock():
        said = ask(page, "set", {"settings": ["train.lr=1e-6", "buffer.max_lag=2"]})
        assert said == (
            200,
            f"{run.path} has from its next step on: buffer.max_lag = 2 (was 4), train.lr = 1e-06 (was 0.0005)",
        )
        steering = shown(page)["steering"]
        assert steering["wanted"] == {"train.lr": 1e-6, "buffer.max_lag": 2}
        assert (steering["settings"]["train.lr"], steering["settings"]["alarms.kl_above"]) == (5e-4, 0.3)
        assert "train.steps" not in steering["settings"], "it changes at a resume alone"
        for setting, why in (
            ("train.lr=<b>fast</b>", "train.lr = '<b>fast</b>': "),
            ("train.lr=-1", "greater than 0"),
            ("train.steps=9", f"it changes at a resume, not while the run goes on: agentrl stop {run.path}; "),
            ("env.id=other", "a run that goes on keeps it"),
            ("train.lr", "write it as section.key=value"),
            ("train.lr=" + "[" * 491, "train.lr = '[[["),
        ):
            status, told = ask(page, "set", {"settings": ["alarms.kl_above=3", setting]})
            assert (status, why in told) == (400, True), told
        for bad in ({}, [], {"settings": []}, {"settings": "train.lr=1"}, {"settings": [1]}, {"settings": ["x" * 501]}):
            assert ask(page, "set", bad)[0] == 400, bad
        assert [ask(page, "pause", bad)[0] for bad in ({}, {"now": 1}, b"{", b"[" * 99_999)] == [400] * 4
        assert [wish["settings"] for wish in held(run)[1]] == [{"train.lr": 1e-6, "buffer.max_lag": 2}]
        with RunStore.open(run.store_path) as store:
            live_settings.take_up(run, store, 4)
        page.post("/api/runs/made/resume", json={})  # what the page knows is not older than what it asked for
        found = shown(page)
        assert (found["steering"]["wanted"], found["config"]["train"]["lr"]) == ({}, 1e-6)
        event = {"kind": "setting", "step": 4, "text": "buffer.max_lag = 2 (was 4), train.lr = 1e-06 (was 0.0005)"}
        assert event in found["marks"]["events"]


def test_failures_are_played_again_as_by_the_command(run: RunDir, page: TestClient) -> None:
    with run.lock():
        planned = steering.requeued_lines(run, steering.requeue(run, dry_run=True))
        status, told = ask(page, "requeue", {})
        assert (status, told) == (200, "; ".join(planned).replace("would play again", "plays again"))
        assert "plays again: nothing" not in told
        assert "plays again: nothing" in ask(page, "requeue", {})[1], "each thing once"
        assert ask(page, "requeue", {"failed": True})[0] == 400
    assert ask(page, "requeue", {}) == (
        400,
        f"{run.path} is not under way: agentrl requeue {run.path} --failed, before it goes on",
    )


def test_failures_of_one_group_are_played_again_as_by_the_command(run: RunDir, page: TestClient) -> None:
    with run.lock():
        for group, planned in ((1, "plays again: nothing"), (2, "plays again: 1 failed episode(s) of open groups")):
            would = "; ".join(steering.requeued_lines(run, steering.requeue(run, [group], dry_run=True), dry_run=True))
            status, told = ask(page, "requeue", {"group": group})
            assert (status, told) == (200, would.replace("would play again", "plays again")) and planned in told
        assert page.get("/api/runs/made/groups/2").json()["members"][0]["stop_reason"] is None, "it waits again"
        status, told = ask(page, "requeue", {"group": 99})
        assert (status, f"no group 99 in {run.store_path}" in told) == (400, True)
        for bad in ("2", 2.0, True, None, [2], 0, -1, 1 << 63, "x" * 999):
            status, told = ask(page, "requeue", {"group": bad})
            assert (status, told) == (400, f"group = {str(bad)[:50]!r}: give the number of a group")
        assert ask(page, "requeue", {"group": 2, "failed": True})[0] == 400
    assert ask(page, "requeue", {"group": 2}) == (
        400,
        f"{run.path} is not under way: agentrl requeue {run.path} --group 2, before it goes on",
    )


def test_a_run_that_is_not_under_way_is_changed_by_who_starts_it(run: RunDir, page: TestClient) -> None:
    """At a start a run takes up programs, too: no page may name them."""
    before = run.config()
    for setting in ("train.lr=1e-6", "scratch_dir=/etc"):
        status, told = ask(page, "set", {"settings": [setting]})
        assert (status, f"change it by agentrl set {run.path}" in told) == (400, True)
    assert run.config() == before


@pytest.mark.parametrize("what", ["pause", "resume", "set"])
def test_only_this_page_steers(run: RunDir, page: TestClient, what: str) -> None:
    body = {"pause": {"now": True}, "resume": {}, "set": {"settings": ["train.lr=1e-6"]}}[what]
    with run.lock():
        if what == "resume":
            ask(page, "pause", {"now": True})
        before = held(run)
        for headers, status in (
            ({"origin": "https://evil.example"}, 403),
            ({"origin": "http://127.0.0.1:9999"}, 403),
            ({"origin": "null"}, 403),
            ({"sec_fetch_site": "cross-site"}, 403),
            ({"content-type": "text/plain"}, 403),
            ({"host": "evil.example", "origin": "http://evil.example"}, 421),
            ({"authorization": ""}, 401),
        ):
            assert ask(page, what, body, **headers)[0] == status, headers
        assert page.get(f"/api/runs/made/{what}").status_code == 405
        assert held(run) == before
        same = {"origin": "http://127.0.0.1:8642", "sec_fetch_site": "same-origin"}
        assert ask(page, what, body, **same)[0] == 200 and held(run) != before


def test_a_page_that_only_looks_keeps_notes_and_steers_nothing(run: RunDir) -> None:
    runs = OpenedRuns([run.path.parent])
    page = client(runs, steer=False)
    with run.lock():
        for what in ("pause", "resume", "set", "requeue"):
            assert ask(page, what, {})[0] == 405
        assert ask(page, "requeue", {"group": 2})[0] == 405
        assert page.post("/api/runs/made/notes", json={"tags": [], "note": "x"}).status_code == 200
        assert shown(page)["steers"] is False and held(run) == ({}, [])
    runs.close()


def test_no_demo_and_no_bundle_steers(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Visitors] = []

    def stop(runs: OpenedRuns, visitors: Visitors) -> Any:
        asked.append(visitors)
        raise KeyboardInterrupt

    monkeypatch.setattr(page_server, "web_page", stop)
    for words in (["--demo"], [str(run.path)], [str(run.path), "--no-steer"]):
        CliRunner().invoke(app, ["view", *words, "--port", "0"])
    assert [one.steer for one in asked] == [False, True, False]
    with run.lock():
        write_bundle(run.path, tmp_path / "page", most=1)
    assert "steers" not in json.loads((tmp_path / "page" / "data" / "run.json").read_text())
