"""The page in a browser, clicked through: it shows a run, hostile texts stay texts, and nothing leaves the origin."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from store.play import admit, play_all, serve

from agentrl.config import parse
from agentrl.rewards.score_failures import KIND
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore, Source
from agentrl.view import web_page
from agentrl.view.bundle import write_bundle
from agentrl.view.page_server import served
from agentrl.view.recorded_run import recorded_run

from .chromium import DEADLINE_MS, launched
from .made_run import FILE, HOSTILE, make_run

pytestmark = pytest.mark.chromium
JUDGED = {"name": "judged", "model": "m", "env": {"id": "test/Env-v0"}}
PICTURE_SHOWN = "[...document.querySelectorAll('main img')].map((one) => one.naturalWidth).join() === '12'"
# What a screen reader or a keyboard would stumble over: controls without a name, a level of headings left out, a
# region that scrolls and cannot be reached.
UNREADABLE = """
    [...document.querySelectorAll("button, a, input, select, textarea, summary, progress, [role=button], [role=img]")]
        .filter((one) => !(one.ariaLabel || one.textContent.trim() || one.labels?.length || one.ariaHidden))
        .map((one) => one.outerHTML)
        .concat([...document.querySelectorAll("main h1, main h2, main h3")].map((one) => Number(one.tagName[1]))
            .flatMap((level, k, all) => (level > (all[k - 1] ?? 0) + 1 ? [`h${level}`] : [])))
        .concat([...document.querySelectorAll("main *")]
            .filter((one) => one.scrollHeight > one.clientHeight + 1 && getComputedStyle(one).overflowY === "auto")
            .filter((one) => one.tabIndex < 0 && !one.querySelector("a, button, input, summary"))
            .map((one) => one.outerHTML))
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


def until_shown(page: Any) -> None:
    """Until the picture is there. Playwright's own wait is a script of the page's, which its policy refuses."""
    for _ in range(DEADLINE_MS // 50):
        if page.evaluate(PICTURE_SHOWN):
            return
        page.wait_for_timeout(50)
    raise AssertionError("no picture was shown")


@pytest.mark.medium
def test_a_reader_finds_from_the_list_of_runs_to_a_token(browser: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "made")
    make_run(tmp_path / "other", rollout={"stop": [f"a long text that ends a turn, number {n}" for n in range(20)]})
    wrong: list[str] = []
    with served([tmp_path]) as address:
        origin = address.partition("#")[0]
        context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
        context.set_default_timeout(DEADLINE_MS)
        page = context.new_page()
        page.on("console", lambda said: wrong.append(f"{said.type}: {said.text}") if said.type != "info" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: asked.url.removeprefix("blob:").startswith(origin) or wrong.append(asked.url))

        def shows(name: str) -> None:
            page.wait_for_selector(f"main > .page-{name}")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, f"{name} is wider than the window"
            assert page.evaluate(UNREADABLE) == [], name

        page.goto(address)
        shows("runs")
        assert "token" not in page.url, "it is in no history, and in no address that somebody copies"
        for name in ("made", "other"):
            page.check(f"input[aria-label='compare {name}']")
        page.click("text=Compare 2 runs")
        shows("compare")
        assert page.locator(".page-compare svg .line").count() >= 2
        differs = page.locator(".differs")
        assert "rollout.stop" in differs.text_content(), "a long value stands there"
        fits = "(table) => table.offsetWidth <= table.parentElement.clientWidth"
        assert differs.evaluate(fits), "what the second run has is in sight"
        page.keyboard.press("g")
        shows("runs")
        page.click(".run a[href='#/run/made']")
        shows("run")
        assert page.locator(".plot svg").count() >= 5
        assert page.locator(".lanes .area").count() == 4 and page.locator(".pipe li").count() == 5
        page.fill("input[list=names]", "kl_k3")
        page.keyboard.press("Enter")
        page.wait_for_selector("h2:has-text('kl_k3')")

        page.click("summary:has-text('Tags and note')")
        page.fill("input[aria-label^=Tags]", "keep, <b>tag</b>")
        page.fill("textarea", HOSTILE.replace("\x00", "").replace("\ud800", ""))
        page.click("text=Save")
        page.wait_for_selector(".chip.tag:has-text('<b>tag</b>')")
        assert page.locator(".said-of .note").text_content().startswith("<script>window.hacked = 1</script><img")

        page.keyboard.press("Escape")
        page.keyboard.press("e")
        shows("episodes")
        page.click("[aria-label='outcome 1: 1 episodes']")
        page.wait_for_selector("p:has-text('of 1 episodes')")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        shows("episode")
        said = page.locator(".turn .said pre").first.text_content()
        # half of a character is nothing that a browser shows
        assert said.replace("\ufffd", "\ud800") == HOSTILE
        assert page.locator("main script, main img, main [onerror]").count() == 0
        assert page.evaluate("window.hacked === undefined")
        page.click("text=by probability")
        assert page.locator(".token.shade1").count() == 1, "one token had between 50% and 90%"
        page.click("aside a:has-text('2')")
        page.wait_for_selector("h1:has-text('Episode 2')")
        assert page.locator(".edit summary code").text_content() == FILE
        until_shown(page)
        lines = [page.locator(f".diff-{kind}").all_text_contents() for kind in ("same", "removed", "added")]
        assert lines == [["  a", "  c"], ["- <b>b</b>"], ["+ <script>window.hacked = 1</script>"]]
        assert page.evaluate("window.hacked === undefined")
        page.locator(".times .pick").first.dispatch_event("click")
        page.wait_for_selector("#turn-0.linked")
        page.click("a:has-text('Group 1')")
        shows("group")
        assert page.locator(".member").count() == 2 and page.locator("text=Play its failures again").is_hidden()
        page.click("a:has-text('taken by step 1')")
        shows("step")
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"

        stranger = browser.new_context().new_page()
        stranger.set_default_timeout(DEADLINE_MS)
        stranger.goto(origin)
        stranger.wait_for_selector("text=This page needs its token")
        context.close()
    assert wrong == []


# Asks until an answer comes from what the page knows, and what it asks after it wrote.
KNOWN = """async () => {
    const { get, post } = await import("./assets/api.js");
    let asked = 0;
    const real = window.fetch;
    window.fetch = (...given) => { asked += 1; return real(...given); };
    const asks = async () => { const before = asked; await get(["runs", "made"]); return asked - before; };
    let tries = 0;
    while (await asks() && (tries += 1) < 250) await new Promise((resume) => setTimeout(resume, 20));
    const known = await get(["runs", "made"]);
    await post("made", "notes", { tags: [], note: "written" });
    return [tries < 250, known.note, await asks(), (await get(["runs", "made"])).note];
}"""


@pytest.mark.medium
def test_the_health_of_a_run_says_what_to_type_as_text(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_page, "_LOOK_S", 60.0)
    reason = HOSTILE.replace("\x00", "").replace("\ud800", "")
    judge = {"calls": 9, "calls_failed": 9, "turns": 4, "turns_failed": 2, "reason": reason}
    wrong: list[str] = []
    with RunStore.open(make_run(tmp_path / "made").store_path) as store:
        store.metrics.record(KIND, 0, {"source": "judge", "life": "a", "texts_failed": 0, "texts": [], **judge})  # pyright: ignore[reportArgumentType]
    with served([tmp_path]) as address:
        context = browser.new_context(viewport={"width": 390, "height": 844})
        context.set_default_timeout(DEADLINE_MS)
        page = context.new_page()
        page.on("console", lambda said: wrong.append(f"{said.type}: {said.text}") if said.type != "info" else None)
        page.goto(address)
        page.click(".run a[href='#/run/made']")
        page.wait_for_selector(".advice li")
        assert page.locator(".advice .chip").all_text_contents() == ["source fails"]
        assert reason in page.locator(".advice .note").text_content()
        assert page.locator(".advice .typed").all_text_contents() == [f"agentrl rewards {tmp_path / 'made'}"]
        assert page.locator("main script, main img, main [onerror]").count() == 0
        assert page.evaluate("window.hacked === undefined")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate(UNREADABLE) == []
        assert page.evaluate(KNOWN) == [True, "", 1, "written"]
        context.close()
    assert wrong == []


@pytest.mark.medium
def test_why_a_source_gave_its_score_stands_below_the_turn_as_text(browser: Any, tmp_path: Path) -> None:
    with RunStore.open(RunDir.create(tmp_path / "judged", parse(JUDGED)).store_path) as store:
        serve(store, 0)
        admit(store, limit=1)
        store.scores.declare_sources([Source(name="review")])
        first, _ = play_all(store, turns=1)
        store.scores.score(f"{first.episode_id}.0.0", "review", 0.5, reason=HOSTILE)
    with served([tmp_path]) as address:
        page = browser.new_context().new_page()
        page.set_default_timeout(DEADLINE_MS)
        page.goto(address)
        page.wait_for_selector(".run")
        page.goto(f"{address.partition('#')[0]}#/run/judged/episode/{first.episode_id}")
        told = page.locator(".turn .message.tool", has_text="review")
        assert "review +0.5" in told.locator("summary").inner_text()
        assert HOSTILE[:60] in told.locator("pre").inner_text()
        assert page.locator("main script, main img, main [onerror]").count() == 0
        assert page.evaluate("window.hacked === undefined")
        page.context.close()


# "Copied" stays until the test has seen it: a busy machine may look when it would be gone.
KEPT = """
    const later = setTimeout, kept = window.kept = [];
    const waits = () => document.body.innerText.includes("Copied");
    window.setTimeout = (call, ms) => (waits() ? kept.push(call) : later(call, ms));
"""


@pytest.mark.medium
def test_an_episode_is_copied_as_a_test_that_passes(browser: Any) -> None:
    with recorded_run() as folder, served([folder]) as address:
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        context.set_default_timeout(DEADLINE_MS)
        page = context.new_page()
        page.add_init_script(KEPT)
        page.goto(address)
        page.wait_for_selector(".run")
        page.goto(f"{address.partition('#')[0]}#/run/demo/episode/1500")
        page.click("text=by probability")
        assert page.locator(".token[class*=shade]").count() == 19
        copied = list[str]()
        for kind in ("as chat", "as test case"):
            page.click(f"button:has-text('{kind}')")
            page.wait_for_selector("button:has-text('Copied')")
            copied.append(page.evaluate("navigator.clipboard.readText()"))
            page.evaluate("window.kept.splice(0).forEach((call) => call())")
            page.wait_for_selector(f"button:has-text('{kind}')")
        context.close()
    chat, case = copied
    roles = [message["role"] for message in json.loads(chat)]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant", "tool"]
    names: dict[str, Any] = {}
    exec(case, names)
    names["test_episode_1500"]()
    names["EPISODE"]["turns"][0]["observation"][1] = "3/4 pass"
    with pytest.raises(AssertionError):
        names["test_episode_1500"]()


@pytest.mark.medium
def test_a_run_as_static_files_shows_the_same(browser: Any, tmp_path: Path) -> None:
    write_bundle(make_run(tmp_path / "made").path, tmp_path / "page", most=50)
    wrong: list[str] = []
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "page"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        context = browser.new_context()
        context.set_default_timeout(DEADLINE_MS)
        page = context.new_page()
        page.on("console", lambda said: wrong.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.click(".run a[href='#/run/made']")
        page.wait_for_selector(".page-run .plot svg")
        page.wait_for_selector("p:has-text('Nothing is wrong')")
        assert page.locator(".legend:has-text('tasks') >> text=95% interval").count() == 1
        (ends,) = page.locator("line.whisker").evaluate_all(
            "all => all.map((one) => one.y2.baseVal.value - one.y1.baseVal.value)"
        )
        # Wilson's interval of one success in one task reaches from 1 / (1 + 1.96²) to 1; the axis is 146 px high
        assert abs(ends) == pytest.approx(146 * 1.96**2 / (1 + 1.96**2), abs=0.1)
        page.goto(f"{page.url.partition('#')[0]}#/compare?runs=made")
        page.wait_for_selector(".plot:has-text('Held-out success') .legend:has-text('95% interval')")
        page.go_back()
        page.wait_for_selector(".page-run .plot svg")
        page.keyboard.press("e")
        page.fill("input[aria-label='Search texts']", "onerror=")
        page.keyboard.press("Enter")
        page.wait_for_selector("p:has-text('of 1 episodes')")
        page.click("[aria-label='outcome 1: 1 episodes']")
        page.click("td[data-name=episode] a")
        page.wait_for_selector(".page-episode")
        assert page.locator(".turn .said pre").first.text_content().replace("\ufffd", "\ud800") == HOSTILE
        page.click("aside a:has-text('2')")
        until_shown(page)
        page.click("a:has-text('trained in step 1')")
        page.wait_for_selector(".page-step tbody tr")
        context.close()
        server.shutdown()
    assert wrong == []
