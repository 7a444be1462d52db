"""The benchmark of leaks: it finds nothing where nothing is left, and finds what is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import episodes
import pytest


@pytest.mark.bubblewrap
async def test_nothing_is_left_of_a_few_episodes() -> None:
    found = await episodes.measure("bubblewrap", {}, 12, 4)
    assert (found["episodes"], found["right"], found["left"]) == (12, 12, {})
    assert len(found["memory_kib"]) == 12


@pytest.mark.medium
@pytest.mark.bubblewrap
async def test_a_box_that_nobody_closed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool closes its backend, which closes all boxes: what is left here is a descriptor that a teardown forgot."""
    left: list[Any] = []

    def forgotten() -> Any:
        return Path("/dev/null").open()

    async def forget(env: episodes.Boxed) -> None:
        left.append(forgotten())
        await env._box.close()

    monkeypatch.setattr(episodes.Boxed, "teardown", forget)
    monkeypatch.setattr(episodes, "PATIENCE_S", 2.0)
    try:
        found = await episodes.measure("bubblewrap", {}, 3, 2)
        assert found["left"] == {"descriptors": 3}
    finally:
        for file in left:
            file.close()
