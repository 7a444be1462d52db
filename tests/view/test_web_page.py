"""`agentrl view`: what the page is answered, and who is answered at all."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from each_case import each_case
from starlette.testclient import TestClient
from store.play import admit, play_all, serve
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.config import parse
from agentrl.errors import UsageError
from agentrl.run.reporting import status as reporting
from agentrl.run.run_folder import RunDir
from agentrl.run.trainer import Trainer
from agentrl.store import RunStore, Source
from agentrl.store.run_values import RESTARTED
from agentrl.view import page_server, recorded_run, web_page
from agentrl.view.notes import keep_notes, notes_of
from agentrl.view.opened_runs import OpenedRuns
from agentrl.view.page_server import served
from agentrl.view.run_gauges import exported
from agentrl.view.web_page import Visitors, loopback_hosts, page_files

from .made_run import HOSTILE, LONG, PICTURE, make_run

TOKEN = "secret-of-the-test"
KEY = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    make_run(path / "made")
    return path


@pytest.fixture
def runs(folder: Path) -> Iterator[OpenedRuns]:
    found = OpenedRuns([folder])
    yield found
    found.close()


@pytest.fixture
def page(runs: OpenedRuns) -> TestClient:
    app = web_page.web_page(runs, Visitors(TOKEN, loopback_hosts("127.0.0.1")))
    return TestClient(app, base_url="http://127.0.0.1:8642", headers=KEY)


def get(page: TestClient, path: str, **query: Any) -> Any:
    answer = page.get(f"/api/runs{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_process_that_died_and_was_started_again_is_a_mark_and_a_line_of_the_status(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "made")
    with RunStore.open(run.store_path) as store:
        deaths = [{"time_s": time.time(), "process": "engine-0", "why": f"engine-0 died of {n}"} for n in (1, 2)]
        RESTARTED.set(store, deaths)
    opened = OpenedRuns([run.path])
    with closing(opened):
        app = web_page.web_page(opened, Visitors(TOKEN, loopback_hosts("127.0.0.1")))
        page = TestClient(app, base_url="http://127.0.0.1:8642", headers=KEY)
        events = get(page, "/made")["marks"]["events"]
    assert [event["text"] for event in events if "died" in event["text"]] == [
        f"engine-0 died of {n}; it was started again" for n in (1, 2)
    ]
    assert "restarted 2 times a process that died, the last: engine-0 died of 2" in [
        *reporting.lines(reporting.status(run))
    ]


def test_the_list_and_the_summary_of_a_run(page: TestClient) -> None:
    (line,) = get(page, "")
    assert (line["id"], line["name"], line["env"], line["state"], line["live"]) == (
        *("made", "made", "test/Env-v0"),
        *("not under way", False),
    )
    assert (line["step"], line["steps"], line["reward"], line["spark"]) == (3, 4, 0.5, [0.25, 0.5, 0.75])
    run = get(page, "/made")
    assert run["marks"]["checkpoints"] == [1] and run["marks"]["weights"] == [0, 1]
    assert [(event["kind"], event["step"]) for event in run["marks"]["events"]] == [("fault", 0), ("alarm", 3)]
    assert run["endings"] == {"done": 2, "env_failed": 1} and run["failures"]["failed"] == 1
    assert run["flow"]["groups"] == {"waiting": 2, "running": 1, "trained": 1}
    assert "loss" in run["names"] and "by_lag.0.tokens" in run["names"]
    assert run["purposes"] == ["eval:tasks:before", "train"] and run["config"]["train"]["steps"] == 4
    (held_out,) = run["evaluations"]["tasks"]
    assert (held_out["step"], held_out["success"], held_out["n"]) == (0, 1.0, 1)


def test_metrics_by_name_with_those_of_later_steps(page: TestClient, folder: Path) -> None:
    found = get(page, "/made/metrics", names="loss,by_lag.0.tokens,nothing")
    assert found["step"] == [1, 2, 3]
    assert found["values"] == {"loss": [1.0, None, 1 / 3], "by_lag.0.tokens": [10, 20, 30], "nothing": [None] * 3}
    assert found["lags"] == {"lag": ["0", "1", "2_3"], "trained": [60, 9, 0], "stale": [0, 0, 3]}
    refused = page.get("/api/runs/made/metrics", params={"names": ",".join("abc" * 30)})
    assert refused.status_code == 400 and "64 at most" in refused.json()["error"]


def test_a_list_of_episodes_with_filters_an_order_and_a_histogram(page: TestClient) -> None:
    def ids(**query: Any) -> list[int]:
        return [row["id"] for row in get(page, "/made/episodes", sort="episode", order="asc", **query)["rows"]]

    everything = ids()
    first, second, failed, running = everything[:4]
    assert ids(success="yes") == [first] == ids(min=0.5, max=1) == ids(q="onerror=") and ids(step=1) == [first, second]
    assert ids(stop="env_failed") == [failed] and ids(state="running") == [running]
    assert ids(min_turns=2) == [second] and ids(purpose="eval:tasks:before") not in (everything, [])
    assert ids(q="nowhere") == [] and len(ids(limit=2, offset=1)) == 2
    found = get(page, "/made/episodes", min=1, max=1)
    assert found["histogram"]["bins"] == [{"low": 0.0, "high": 0.0, "n": 1}, {"low": 1.0, "high": 1.0, "n": 1}]
    assert (found["total"], found["histogram"]["without"]) == (1, len(everything) - 2)
    for bad in ({"sort": "id; DROP"}, {"stop": "x"}, {"offset": "-1"}, {"min": "much"}, {"step": "9" * 40}):
        refused = page.get("/api/runs/made/episodes", params=bad)
        assert refused.status_code == 400 and next(iter(bad)) in refused.json()["error"]


def test_an_episode_its_group_and_the_step_that_trained_it(page: TestClient) -> None:
    first = get(page, "/made/episodes", success="yes")["rows"][0]
    found = get(page, f"/made/episodes/{first['id']}")
    (turn,) = found["turns"]
    assert (turn["reward"], turn["rewards"], turn["text"]["text"]) == (0.5, {"env": 0.5}, HOSTILE)
    # its return is 1 + 0.5; the other member has 0 + 0 + 0.25 from its first turn on
    assert turn["advantage"] == pytest.approx(1.25)
    assert [token["logprob"] for token in turn["tokens"]] == [-0.5, -1.0, -1.5]
    assert {token["version"] for token in turn["tokens"]} == {1}
    hostile, long = turn["observation"]
    assert hostile["content"]["text"] == HOSTILE
    assert (len(long["content"]["text"]), long["content"]["length"]) == (20_000, 60_000)
    whole = get(page, f"/made/episodes/{first['id']}", whole="yes")
    assert whole["turns"][0]["observation"][1]["content"]["text"] == LONG
    group = get(page, f"/made/groups/{first['group']}")
    assert [member["outcome"] for member in group["members"]] == [1.0, 0.0] and group["taken_step"] == 1
    step = get(page, "/made/steps/1")
    assert [row["id"] for row in step["episodes"]] == [member["id"] for member in group["members"]]
    assert step["values"]["outcome_mean"] == 0.25
    for gone in ("/made/episodes/999", "/made/groups/999", "/nowhere", "/made/nowhere", "/nowhere/events"):
        assert page.get(f"/api/runs{gone}").status_code == 404, gone
    assert page.get("/api/runs/made/steps/99").status_code == 400


def test_why_a_source_gave_its_score_stands_beside_it_on_the_page_and_in_the_terminal(tmp_path: Path) -> None:
    config = parse({"name": "judged", "model": "m", "env": {"id": "test/Env-v0"}})
    with RunStore.open(RunDir.create(tmp_path / "judged", config).store_path) as store:
        serve(store, 0)
        admit(store, limit=1)
        store.scores.declare_sources([Source(name="review")])
        first, _ = play_all(store, turns=1)
        store.scores.score(f"{first.episode_id}.0.0", "review", 0.5, reason=f"[bold]it ran[/] {HOSTILE}")
    with closing(OpenedRuns([tmp_path])) as runs:
        server = web_page.web_page(runs, Visitors(TOKEN, loopback_hosts("127.0.0.1")))
        client = TestClient(server, base_url="http://127.0.0.1:8642", headers=KEY)
        (turn,) = get(client, f"/judged/episodes/{first.episode_id}")["turns"]
    (text,) = [reason["text"] for reason in turn["reasons"].values()]
    assert turn["rewards"]["review"] == 0.5 and text.startswith("[bold]it ran[/] <script>") and "\x1b" not in text
    printed = CliRunner().invoke(app, ["rewards", str(tmp_path / "judged"), "--episode", str(first.episode_id)])
    assert printed.exit_code == 0 and "0.500" in printed.output and "[bold]it ran[/]" in printed.output
    assert "\x1b" not in printed.output and "\0" not in printed.output
    document = json.loads(
        CliRunner().invoke(app, ["rewards", str(tmp_path / "judged"), "--episode", "1", "--json"]).output
    )
    assert [(one["source"], one["value"], one["reason"]) for one in document] == [("review", 0.5, text)]


def test_a_text_that_utf_8_cannot_hold_goes_out_as_ascii(page: TestClient) -> None:
    body = page.get("/api/runs/made/episodes", params={"q": "esrever"}).content
    first = json.loads(body)["rows"][0]["id"]
    body = page.get(f"/api/runs/made/episodes/{first}").content
    assert body.isascii() and b"\\ud800" in body and b"\\u0000" in body


def test_who_does_not_show_the_token_reads_nothing(page: TestClient) -> None:
    for path in ("/api/runs", "/api/runs/made", "/api/runs/made/events", "/api/nothing"):
        for shown in ("", "Bearer ", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer \u00e9"):
            answer = page.get(path, headers={"authorization": shown.encode("latin-1")})
            assert (answer.status_code, TOKEN in answer.text) == (401, False), (path, shown)
    assert page.get("/api/runs", params={"token": TOKEN}, headers={"authorization": ""}).status_code == 401
    assert page.get("/api/runs", headers={"authorization": "", "cookie": f"token={TOKEN}"}).status_code == 401


def test_beyond_this_machine_the_token_is_asked_for_too(runs: OpenedRuns) -> None:
    hosts = loopback_hosts("0.0.0.0")
    assert hosts == frozenset()
    page = TestClient(web_page.web_page(runs, Visitors(TOKEN, hosts)), base_url="http://node-7:8642")
    assert page.get("/").status_code == 200 and page.get("/api/runs").status_code == 401
    assert page.get("/api/runs", headers=KEY).status_code == 200
    with pytest.raises(UsageError, match="--host 'no such host'"):
        loopback_hosts("no such host")


@each_case("path", ["/", "/assets/app.js", "/api/runs", "/nothing", "/assets/nothing"])
def test_every_answer_has_the_strict_headers(page: TestClient, path: str) -> None:
    for answer in (page.get(path), page.get(path, headers={"host": "evil.example"}), page.post(path)):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers


def test_a_name_that_points_here_from_elsewhere_gets_nothing(page: TestClient) -> None:
    for host in ("evil.example", "evil.example:8642", "127.0.0.1.evil.example:8642", "localhost@evil.example", ""):
        assert page.get("/api/runs", headers={"host": host}).status_code == 421, host
    for host in ("127.0.0.1:8642", "localhost:1", "[::1]:8642", "LOCALHOST"):
        assert page.get("/api/runs", headers={"host": host}).status_code == 200, host
    assert [page.request(method, "/api/runs").status_code for method in ("POST", "PUT", "DELETE")] == [405] * 3


NOTES = {"tags": ["baseline", "keep"], "note": HOSTILE}


def send(page: TestClient, body: Any, *, run: str = "made", **headers: str) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return page.post(f"/api/runs/{run}/notes", content=content, headers={"content-type": "application/json", **named})


def test_tags_and_a_note_stand_in_the_runs_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made")
    page = TestClient(
        web_page.web_page(OpenedRuns([tmp_path]), Visitors(TOKEN, loopback_hosts("127.0.0.1"))),
        base_url="http://127.0.0.1:8642",
        headers=KEY,
    )
    assert (get(page, "")[0]["tags"], get(page, "")[0]["note"]) == ([], "")
    before = run.store_path.read_bytes()
    kept = send(page, {**NOTES, "tags": [" baseline", "keep", "keep"]})
    assert (kept.status_code, kept.json()) == (200, NOTES)
    (line,) = get(page, "")
    assert {key: line[key] for key in NOTES} == NOTES == {key: get(page, "/made")[key] for key in NOTES}
    assert run.notes.stat().st_mode & 0o077 == 0 and run.store_path.read_bytes() == before
    assert not list(run.path.glob(".notes-*"))
    for bad, why in (
        ({"tags": ["x" * 41], "note": ""}, "1 to 40 letters"),
        ({"tags": ["a\u202eb"], "note": ""}, "1 to 40 letters"),
        ({"tags": [5], "note": ""}, "1 to 40 letters"),
        ({"tags": [f"t{n}" for n in range(21)], "note": ""}, "20 at most"),
        ({"tags": [], "note": "x" * 10_001}, "10000 at most"),
        ({"tags": [], "note": "", "path": "/etc/passwd"}, "notes are"),
        ([], "notes are"),
    ):
        refused = send(page, bad)
        assert refused.status_code == 400 and why in refused.json()["error"], bad
    assert [send(page, body).status_code for body in (b"{", b"[" * 100_000, b"x" * 200_000)] == [400, 400, 413]
    assert send(page, NOTES, run="other").status_code == 404
    assert get(page, "/made")["note"] == HOSTILE, "nothing of these was kept"
    run.notes.write_text("[1")
    assert notes_of(run) == {"tags": [], "note": ""}


@each_case(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://127.0.0.1:8642", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "text/plain"}, 403),
        ({"content-type": "application/x-www-form-urlencoded"}, 403),
        ({"host": "evil.example", "origin": "http://evil.example"}, 421),
        ({"authorization": ""}, 401),
    ],
)
def test_only_this_page_writes_notes(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    run = make_run(tmp_path / "made")
    page = TestClient(
        web_page.web_page(OpenedRuns([tmp_path]), Visitors(TOKEN, loopback_hosts("127.0.0.1"))),
        base_url="http://127.0.0.1:8642",
        headers=KEY,
    )
    answer = send(page, NOTES, **headers)
    assert (answer.status_code, run.notes.exists()) == (status, status == 200)
    assert "access-control-allow-origin" not in answer.headers
    assert page.options("/api/runs/made/notes", headers=headers).status_code in (405, 421)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made")
    run.notes.mkdir()
    with pytest.raises(UsageError, match=r"notes\.json cannot be written: Is a directory"):
        keep_notes(run, NOTES)
    assert not list(run.path.glob(".notes-*"))


OUT = (
    *("/assets/../opened_runs.py", "/assets/..%2fopened_runs.py", "/assets/%2e%2e/__init__.py", "/assets//etc/passwd"),
    *("/api/runs/..%2f..%2fetc", "/api/runs/%2fetc%2fpasswd", "/api/runs/made%00", "/api/runs/made/episodes/..%2f1"),
)


def test_an_image_is_sent_by_its_digest_as_what_its_bytes_are(page: TestClient, folder: Path) -> None:
    second = get(page, "/made/episodes", purpose="train", order="asc")["rows"][1]["id"]
    (shown,) = get(page, f"/made/episodes/{second}")["turns"][0]["observation"][0]["images"]
    assert shown == {"digest": PICTURE.digest, "type": "image/png", "width": 12, "height": 8}
    answer = page.get(f"/api/runs/made/images/{PICTURE.digest}")
    assert (answer.status_code, answer.content) == (200, PICTURE.data)
    assert answer.headers["content-type"] == "image/png" and answer.headers["x-content-type-options"] == "nosniff"
    assert page.get(f"/api/runs/made/images/{PICTURE.digest}", headers={"authorization": ""}).status_code == 401
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'><script>window.hacked = 1</script></svg>"
    digest = hashlib.sha256(svg).hexdigest()
    with RunStore.open(folder / "made" / "store.sqlite") as store, store._db.write():  # pyright: ignore[reportPrivateUsage]
        store._db.execute("INSERT INTO images VALUES (?, ?) ON CONFLICT DO NOTHING", (digest, svg))  # pyright: ignore[reportPrivateUsage]
    refused = page.get(f"/api/runs/made/images/{digest}")
    assert refused.status_code == 404 and "no image" in refused.json()["error"] and b"<script" not in refused.content
    for other, status in (("0" * 64, 404), ("A" * 64, 400), ("x", 400)):
        assert page.get(f"/api/runs/made/images/{other}").status_code == status, other


@each_case("path", OUT)
def test_no_path_leads_out(page: TestClient, path: str) -> None:
    assert page.get(path).status_code == 404


def test_the_files_load_nothing_from_elsewhere_and_hold_no_script() -> None:
    files = {name: content.decode() for name, content in page_files().items()}
    assert {"index.html", "app.js", "style.css"} <= files.keys()
    for name, text in files.items():
        used = text.replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in used and "https:" not in used and "//cdn" not in used, name
        assert not any(
            word in text for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write")
        )
    assert "<script>" not in files["index.html"] and " style=" not in files["index.html"]


def test_a_change_of_the_run_is_told_once(runs: OpenedRuns, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_page, "_LOOK_S", 0.001)
    monkeypatch.setattr(web_page, "_QUIET_LOOKS", 3)
    monkeypatch.setattr(web_page, "_SETTLED_LOOKS", 5)
    monkeypatch.setattr(web_page, "_LONGEST_S", 0.0)

    async def listen() -> list[str]:
        shared = web_page._Shared()
        told = web_page._changes(runs["made"], shared, runs.closing)
        heard = [await anext(told), await anext(told)]
        with RunStore.open(folder / "made" / "store.sqlite") as store:
            admit(store, max_running=1000, groups_per_step=8)
        heard += [await anext(told), await anext(told), await anext(told)]
        shared.forget()
        return [*heard, await anext(told)]

    first, quiet, changed, again, last, written = asyncio.run(asyncio.wait_for(listen(), 60))
    assert first.startswith("event: change\n") and changed.startswith("event: change\n") and first != changed
    assert quiet == again == ": nothing new\n\n"
    assert last == "event: change\ndata: again\n\n", "an answer that was kept may be older than the last change"
    assert written == "event: written\ndata: again\n\n", "no viewer keeps an answer from before"


def test_ten_viewers_are_answered_once(runs: OpenedRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    now = 100.0
    shared = web_page._Shared(clock=lambda: now)

    def slow() -> str:
        nonlocal now
        asked.append(now)
        now += 0.3
        return "x" * len(asked)

    async def look() -> list[bytes]:
        return list(await asyncio.gather(*(shared("key", slow) for _ in range(10))))

    assert asyncio.run(look()) == [b'"x"'] * 10 and asked == [100.0]
    now += 14.9
    assert asyncio.run(look()) == [b'"x"'] * 10, "it took 0.3 s: nobody asks again for as long as an answer is kept"
    now += 0.2
    assert asyncio.run(look()) == [b'"xx"'] * 10 and len(asked) == 2
    shared.forget()
    assert asyncio.run(look()) == [b'"xxx"'] * 10

    def quick() -> str:
        nonlocal now
        asked.append(now)
        now += 0.01
        return "x"

    asked.clear()
    for wait_s in (0.0, 4.9, 0.2):
        now += wait_s
        asyncio.run(shared("quick", quick))
    assert len(asked) == 2, "10 ms: a five hundredth of a core, so once in five seconds"

    def fails() -> str:
        raise UsageError("no")

    for _ in range(2):
        with pytest.raises(UsageError):
            asyncio.run(shared("other", fails))
    assert asyncio.run(shared("other", lambda: 1)) == b"1", "a failure is not kept"
    assert not shared._locks, "each question that was ever asked would leave one"


def test_what_is_known_goes_out_past_the_routes_to_those_who_may_ask(
    page: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_page, "_LOOK_S", 60.0)
    names = "/api/runs/made/metrics?names=loss"
    first = page.get(names)

    def no_route(*_: Any) -> Any:
        raise AssertionError("a route was asked")

    with monkeypatch.context() as patch:
        patch.setattr(web_page, "_sent", no_route)
        again = page.get(names)
        left = [float(answer.headers.pop("x-known-s")) for answer in (first, again)]
        assert 0 < left[1] < left[0] <= 60, "for so long a viewer need not ask"
        assert (again.content, dict(again.headers)) == (first.content, dict(first.headers))
        with pytest.raises(AssertionError, match="a route was asked"):
            page.get("/api/runs/made/metrics?names=entropy")
    refused = [{"authorization": "Bearer of another"}, {"authorization": ""}, {"host": "evil.example"}]
    assert [page.get(names, headers=headers).status_code for headers in refused] == [401, 401, 421]
    assert page.post(names).status_code == 405
    head = page.head(names)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(first.content)))


def test_a_run_that_begins_later_or_anew_is_seen(tmp_path: Path) -> None:
    runs = OpenedRuns([tmp_path])
    assert runs.all() == []
    run = make_run(tmp_path / "one")
    make_run(tmp_path / "other" / "one")
    opened = runs["one"]
    assert len(opened.steps()) == 3
    run.store_path.rename(tmp_path / "away.sqlite")
    for end in ("-wal", "-shm"):
        run.store_path.with_name(f"store.sqlite{end}").unlink(missing_ok=True)
    with RunStore.create(run.store_path, "{}"):
        pass
    assert opened.steps() == [], "the handle of the run that was there is not asked any more"
    both = OpenedRuns([tmp_path / "one", tmp_path / "other"])
    assert sorted(one.id for one in both.all()) == ["one", "one~2"]
    assert OpenedRuns([tmp_path / "nothing"]).all() == []
    both.close()
    runs.close()


def test_the_server_serves_and_ends_and_says_where_it_cannot(folder: Path) -> None:
    with served([folder]) as address:
        base, _, token = address.partition("/#token=")
        answer = httpx.get(f"{base}/api/runs", headers={"authorization": f"Bearer {token}"}, timeout=60)
        assert [run["id"] for run in answer.json()] == ["made"] and len(token) >= 32
        port = int(base.rpartition(":")[2])
        with (
            pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}: .* choose another --port"),
            served([folder], port=port),
        ):
            pass
    with pytest.raises(httpx.TransportError):
        httpx.get(base, timeout=60)


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["page", "figures"])
def test_half_requests_of_another_keep_the_owner_out_of_no_server(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than it has places for. Those that stay are closed when their time for a head is over."""
    monkeypatch.setattr(page_server, "_BOUNDS", replace(page_server._BOUNDS, head_s=1.0))
    if kind == "figures":
        pytest.importorskip("prometheus_client")
    with ExitStack() as stack:
        server = served([folder]) if kind == "page" else exported([folder], port=0)
        base, _, token = stack.enter_context(server).partition("/#token=")
        url = base if kind == "figures" else f"{base}/api/runs"
        place = urlsplit(base).hostname, urlsplit(base).port
        others = [stack.enter_context(socket.create_connection(place)) for _ in range(320)]  # type: ignore[arg-type]
        for other in others:
            other.sendall(b"GET /api/runs HTTP/1.1\r\nHost: x\r\nX-Half: ")
        answer = httpx.get(url, headers={"authorization": f"Bearer {token or None}"}, timeout=60)
        assert answer.status_code == 200
        for other in others:
            other.settimeout(60)
            with suppress(ConnectionResetError):
                assert other.recv(1) == b""  # closed, without an answer


def test_a_number_that_nothing_can_have_is_not_found(page: TestClient) -> None:
    for kind in ("episodes", "groups", "steps"):
        for number in (str(1 << 63), "9" * 5000, "-1", "x", "²"):
            answer = page.get(f"/api/runs/made/{kind}/{number}")
            assert answer.status_code == 404, (kind, number[:20], answer.text)


def test_the_recorded_run_is_small_and_whole_and_tells_nothing_of_a_machine() -> None:
    packed = Path(recorded_run.__file__).with_name("recorded_run.tar.zst")
    assert packed.stat().st_size < 300_000
    with recorded_run.recorded_run() as folder:
        files = b"".join(path.read_bytes() for path in folder.iterdir())
        assert not any(place in files for place in (b"/tmp/", b"/root/", b"/home/", b"/dev/shm", b"/work/"))
        page = TestClient(
            web_page.web_page(OpenedRuns([folder]), Visitors(TOKEN)), base_url="http://127.0.0.1", headers=KEY
        )
        (line,) = get(page, "")
        assert (line["id"], line["state"]) == ("demo", "over") and line["step"] == line["steps"] >= 20
        assert len(line["held_out"]) >= 3
        last = get(page, "/demo/episodes", sort="step", limit=1)["rows"][0]
        turns = get(page, f"/demo/episodes/{last['id']}")["turns"]
        assert all(token["text"] for turn in turns for token in turn["tokens"]) and turns[0]["tokens"]
    assert not folder.exists()


def test_training_with_view_has_a_page_for_as_long_as_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def train(*_: object) -> None:
        threads.extend(thread.name for thread in threading.enumerate())
        raise UsageError("that is all")

    monkeypatch.setattr(Trainer, "train", train)
    file = tmp_path / "run.toml"
    file.write_text('model = "agentrl/tiny-coder"\n[env]\nid = "agentrl/Calculator-v0"\n')
    words = ["train", str(file), "--out", str(tmp_path / "out")]
    without = CliRunner().invoke(app, words)
    assert "see it on" not in without.output and "page" not in threads
    done = CliRunner().invoke(app, [*words, "--view"])
    assert done.output.startswith("see it on http://127.0.0.1:") and "page" in threads
    assert "page" not in {thread.name for thread in threading.enumerate()}
    gone = CliRunner().invoke(app, ["view", str(tmp_path / "nothing")])
    assert "nothing is no folder" in str(gone.exception) and "--demo" in str(gone.exception)


@pytest.mark.medium
def test_a_bundle_holds_the_newest_episodes_and_goes_into_a_new_folder(folder: Path, tmp_path: Path) -> None:
    words = ["view", str(folder / "made"), "--bundle", str(tmp_path / "page"), "--most", "1"]
    done = CliRunner().invoke(app, words)
    assert "with 2 episodes" in done.output, "one of training, one of an evaluation"
    names = {str(path.relative_to(tmp_path / "page")) for path in (tmp_path / "page").rglob("*.*")}
    assert {"index.html", "assets/api.js", "data/run.json", "data/steps/3.json"} <= names
    assert sum(name.startswith("data/episodes/") for name in names) == 2
    index = (tmp_path / "page" / "index.html").read_text()
    assert "default-src 'none'; script-src 'self'" in index and TOKEN not in index
    assert "it is not empty" in str(CliRunner().invoke(app, words).exception)
    assert "give one run directory" in str(CliRunner().invoke(app, [*words[:2], *words[1:]]).exception)
