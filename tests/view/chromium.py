"""A real browser for the tests of the page, and everything that goes wrong in one of its windows."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import closing, contextmanager
from typing import Any

DEADLINE_MS = 180_000
"""For the browser to start, and for whatever a page shows: reached only when something is broken."""


@contextmanager
def launched(*arguments: str) -> Generator[Any]:
    """The browser, with these arguments of its command."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium, path = play.chromium, shutil.which("chromium")
        words = ["--no-sandbox", *arguments]
        with closing(chromium.launch(executable_path=path, args=words, timeout=DEADLINE_MS)) as browser:
            yield browser


@contextmanager
def window(browser: Any, **given: Any) -> Generator[tuple[Any, list[str]]]:
    """A window without a past, and what its console, its errors and its policy said."""
    wrong: list[str] = []
    with closing(browser.new_context(**given)) as context:
        context.set_default_timeout(DEADLINE_MS)
        page = context.new_page()
        page.on("console", lambda said: wrong.append(f"{said.type}: {said.text}") if said.type != "info" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        yield page, wrong
