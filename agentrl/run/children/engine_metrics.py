"""Keeps what engines say of themselves at `/metrics` in the run's folder, for `agentrl metrics`.

A run's engines have a key that only its processes know, so nobody else can ask them; and who asks Prometheus's question
must not wait for an engine. So the supervisor asks, each engine by itself and under a deadline, and writes the newest
answer to `engines/NAME.json`. An engine that hangs or is gone costs nobody anything: its failures are counted. Never
knows what a figure means.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import trio

from agentrl.engine.client import EngineClient
from agentrl.errors import EngineError

EVERY_S = 10.0
DEADLINE_S = 5.0
_MOST = 4 << 20  # bytes of an answer


class ScrapedEngine(Protocol):
    """An engine: where it serves now, and its client."""

    url: str

    def client(self) -> EngineClient: ...


@dataclass(slots=True)
class EngineFigures:
    """Figures of an engine: `text` is its newest answer ("" if it gave none), from `time_s`. It counts the requests
    since the supervisor started, and those that `failed`."""

    engine: str
    time_s: float = 0.0
    scrapes: int = 0
    failed: int = 0
    text: str = ""

    def document(self) -> dict[str, Any]:
        """The figures as their file has them."""
        document = asdict(self)
        document["asked"] = document.pop("scrapes")
        return document


@dataclass(slots=True)
class EngineMetrics:
    """Asks `engines`, which may come and go, again and again. `clock` gives seconds since the epoch."""

    engines: Mapping[str, ScrapedEngine]
    folder: Path
    clock: Callable[[], float] = time.time
    _known: dict[str, EngineFigures] = field(default_factory=dict[str, EngineFigures])

    async def run(self) -> None:
        """Request figures until cancelled. A round takes as long as a deadline at most."""
        while True:
            await trio.sleep(EVERY_S)
            async with trio.open_nursery() as nursery:
                for engine_name, engine in list(self.engines.items()):
                    nursery.start_soon(self._ask, engine_name, engine)

    async def _ask(self, name: str, engine: ScrapedEngine) -> None:
        engine_figures = self._known.setdefault(name, EngineFigures(name))
        # The old text goes before the question: an engine that hangs shows no figures, rather than those of ten minutes
        # ago that look like now.
        engine_figures.scrapes, engine_figures.text = engine_figures.scrapes + 1, ""
        with trio.move_on_after(DEADLINE_S), suppress(EngineError):
            async with aclosing(engine.client()) as client:
                response_body = await client.call("GET", "/metrics", deadline_s=DEADLINE_S)
            engine_figures.text = response_body.decode(errors="replace") if len(response_body) <= _MOST else ""
        engine_figures.failed += not engine_figures.text
        engine_figures.time_s = self.clock()
        with suppress(OSError):  # a full disk keeps no figures
            await trio.to_thread.run_sync(_write, self.folder, engine_figures.document(), abandon_on_cancel=True)


def _write(folder: Path, document: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    figures_path = folder / f"{quote(document['engine'], safe='')}.json"
    draft_path = figures_path.with_suffix(".draft")
    draft_path.write_text(json.dumps(document), encoding="utf-8")
    # Renamed into place, as a reader may come at any instant and half a file is no JSON.
    draft_path.replace(figures_path)


def figures(folder: Path) -> list[EngineFigures]:
    """Read the figures of all engines of a run. Files that cannot be read are left out."""
    engine_figures: list[EngineFigures] = []
    for figures_path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError, TypeError, AttributeError):
            document = json.loads(figures_path.read_text(encoding="utf-8"))
            engine_figures.append(EngineFigures(scrapes=document.pop("asked", 0), **document))
    return engine_figures
