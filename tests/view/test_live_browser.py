"""A browser follows a run that another process writes, and steers it; pages of other origins get nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.run_values import PAUSED, REQUESTED_SETTINGS
from agentrl.view import opened_runs, web_page
from agentrl.view.page_server import served

from .chromium import launched, window
from .made_run import make_run

pytestmark = pytest.mark.chromium
REBOUND = "evil.example"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched(f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1") as found:
        yield found


@contextmanager
def written(run: RunDir) -> Generator[Callable[[str], None]]:
    """Another process holds the run: a function that has it write something."""
    words = [sys.executable, "-m", "view.live_writer", str(run.path)]
    tests = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(words, env=tests, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def write(line: str) -> None:
            print(line, file=process.stdin, flush=True)
            assert process.stdout is not None and process.stdout.readline() == "written\n"

        assert process.stdout.readline() == "under way\n"
        try:
            yield write
        finally:
            process.stdin.close()


def steering(run: RunDir) -> tuple[Any, Any]:
    with RunStore.read(run.store_path) as store:
        return PAUSED.of(store.meta), REQUESTED_SETTINGS.of(store.meta)


@pytest.mark.medium
def test_a_run_of_another_process_comes_by_itself_and_is_steered(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((web_page, "_LOOK_S"), (web_page, "_LONGEST_S"), (opened_runs, "_LIVE_S")):
        monkeypatch.setattr(module, name, 0.02)
    monkeypatch.setattr(web_page, "_SETTLED_LOOKS", 1 << 30)
    run, asked = make_run(tmp_path / "made"), Counter[str]()
    with served([tmp_path]) as address, written(run) as write, window(browser) as (page, wrong):
        page.add_init_script("const later = setTimeout; window.setTimeout = (call, ms) => later(call, ms / 20)")
        page.on("request", lambda request: asked.update([request.url.rpartition("/")[2].partition("?")[0]]))
        page.goto(address)
        page.click(".run a[href='#/run/made']")
        page.wait_for_selector(".progress:has-text('step 3')")
        page.evaluate("window.same = true")

        write("step 4")
        page.wait_for_selector(".progress:has-text('step 4')")
        page.wait_for_selector(".alarm:has-text('kl: <b>4</b> > 1')")
        assert page.locator(".page-run .title .chip").text_content() == "training"
        assert page.locator(".page-run td b").count() == 0, "an alarm is text, too"

        page.click("summary:has-text('Steer this run')")
        page.click("button:has-text('Pause now')")
        page.wait_for_selector(f".told.done:has-text('{run.path} is paused: turns under way stop')")
        page.wait_for_selector(".title .chip.wait:has-text('paused for')")
        assert steering(run)[0]["now"] is True
        page.click("button:has-text('Resume')")
        page.wait_for_selector(".told.done:has-text('goes on; it was paused for')")
        page.wait_for_selector(".title .chip:has-text('training')")
        assert steering(run)[0] == {}

        page.fill("input[aria-label=Setting]", "train.lr")
        assert page.get_attribute("input[aria-label^='Its new']", "placeholder") == "0.0005", "what it is now"
        page.fill("input[aria-label^='Its new']", "1e-6")
        page.keyboard.press("Enter")
        page.wait_for_selector(".told.done:has-text('from its next step on: train.lr = 1e-06 (was 0.0005)')")
        page.wait_for_selector(".steer .note:has-text('train.lr = 0.000001')")
        write("take up 5")
        page.wait_for_selector("td:has-text('train.lr = 1e-06 (was 0.0005)')")
        assert steering(run) == ({}, []) and wrong == []

        hostile = "<img src=x onerror='window.hacked = 1'>"
        page.fill("input[aria-label^='Its new']", hostile)
        page.click(".steer button:has-text('Set')")
        page.wait_for_selector('.told.refused:has-text("train.lr = \\"<img src=x onerror=\'window.hacked = 1\'>")')
        assert page.evaluate("window.hacked === undefined && window.same") and steering(run) == ({}, [])
        assert page.locator("main img").count() == 0
        assert asked["made"] >= 2 and asked["events"] == 1, "news come over one request"

        page.evaluate("location.hash = '#/run/made/group/2'")
        page.wait_for_selector(".page-group .member:has-text('env failed')")
        page.click("button:has-text('Play its failures again')")
        page.wait_for_selector(".told.done:has-text('plays again: 1 failed episode(s) of open groups')")
        page.wait_for_selector(".page-group .member:has-text('env failed')", state="detached")
    assert wrong == ["error: Failed to load resource: the server responded with a status of 400 (Bad Request)"]


ASK = """async ([base, token]) => {
    const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
    const asked = [["", "GET"], ["api/runs", "GET"], ["api/runs/made/events", "GET"], ["api/runs/made/pause", "POST"]];
    const told = [];
    for (const [path, method] of asked) {
        try {
            const body = method === "POST" ? '{"now": true}' : undefined;
            told.push((await fetch(base + path, { method, headers, body })).status);
        } catch (error) { told.push(error.name); }
    }
    return told;
}"""
# What needs no leave of the other origin: a request without headers of its own, and a form.
BLIND = """async (address) => {
    await fetch(address, { method: "POST", mode: "no-cors", body: '{"now": true}' }).catch(() => {});
    const form = document.createElement("form");
    Object.assign(form, { action: address, method: "post", enctype: "text/plain" });
    form.append(Object.assign(document.createElement("input"), { name: '{"now": true, "x', value: '": 1}' }));
    document.body.append(form);
    form.submit();
}"""


@pytest.mark.medium
def test_a_name_that_is_pointed_here_reads_and_steers_nothing(browser: Any, tmp_path: Path) -> None:
    """DNS rebinding, by somebody who even has the token: Chromium itself takes the name for this machine."""
    run = make_run(tmp_path / "made")
    with served([tmp_path]) as address, run.lock(), window(browser) as (page, _):
        base, _, token = address.partition("#token=")
        answer = page.goto(base.replace("127.0.0.1", REBOUND))
        assert (answer.status, "not served under that name" in page.content()) == (421, True)
        assert page.evaluate("location.hostname") == REBOUND
        assert page.evaluate(ASK, ["/", token]) == [421, 421, 421, 421]
        page.goto(base)
        assert page.evaluate(ASK, ["/", token]) == [200, 200, 200, 200], "it is the name that is refused"
    assert steering(run)[0] != {}


class _Elsewhere(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><body>another origin</body>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.medium
def test_a_page_of_another_origin_steers_nothing(browser: Any, tmp_path: Path) -> None:
    run, seen = make_run(tmp_path / "made"), list[tuple[str, int]]()
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere) as elsewhere,
        served([tmp_path]) as address,
        run.lock(),
        window(browser) as (page, _),
    ):
        threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
        page.on("response", lambda answer: seen.append((answer.request.method, answer.status)))
        base, _, token = address.partition("#token=")
        page.goto(f"http://127.0.0.1:{elsewhere.server_port}/")
        assert page.evaluate(ASK, [base, token]) == ["TypeError"] * 4, "the browser gives it no answer"
        seen.clear()
        page.evaluate(BLIND, f"{base}api/runs/made/pause")
        page.wait_for_url(f"{base}api/runs/made/pause")
        elsewhere.shutdown()
    assert seen == [("POST", 403)], "the form's; of the other request it is not even told that"
    assert steering(run) == ({}, [])


PAGES = {
    "": "runs",
    "compare?runs=made,other": "compare",
    "run/made/episodes": "episodes",
    "run/made/episode/1": "episode",
    "run/made/group/1": "group",
    "run/made/step/1": "step",
    "run/made": "run",
}


@pytest.mark.axe
@pytest.mark.long
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_axe_finds_no_fault_on_any_page(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    from axe_playwright_python.base import AXE_SCRIPT

    found = list[str]()
    run, _ = (make_run(tmp_path / name) for name in ("made", "other"))
    look = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    with served([tmp_path]) as address, run.lock(), window(browser, **look) as (page, wrong):

        def examine(shown: str) -> None:
            page.evaluate(AXE_SCRIPT)
            for fault in page.evaluate("axe.run().then((found) => found.violations)"):
                found.append(f"{shown}: {fault['impact']}: {fault['help']}: {fault['nodes'][0]['html']}")

        page.goto(address)
        for place, name in PAGES.items():
            page.goto(f"{address.partition('#')[0]}#/{place}")
            page.wait_for_selector(f"main > .page-{name}")
            examine(name)
        page.click("summary:has-text('Steer this run')")
        page.click("button:has-text('Pause')")
        page.wait_for_selector(".told.done")
        examine("a run that is paused")
        assert wrong == []
        page.fill("input[aria-label=Setting]", "train.steps")
        page.keyboard.press("Enter")
        page.wait_for_selector(".told.refused")
        examine("a setting that is refused")
        page.evaluate("document.querySelector('main').append(document.createElement('button'))")
        assert found == []
        examine("a button without a name")
    assert len(found) == 1, "axe looks"
