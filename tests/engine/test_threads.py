"""An embedded engine computes with the threads that it was given, or with the cores that are spare just then."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch

from agentrl.engine.embedded import architecture

from .conftest import make_model

main = importlib.import_module("agentrl.engine.embedded.__main__")


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "large", "threads"),
    [
        pytest.param((), 0, [2, 3], id="what is spare, at each request"),
        pytest.param((), 1 << 40, [1, 1], id="one for a small model"),
        pytest.param(("--threads", "2"), 0, [2, 2], id="what was asked for"),
    ],
)
def test_an_engine_computes_with(
    options: tuple[str, ...], large: int, threads: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = SimpleNamespace(now=2)
    monkeypatch.setattr(main, "SpareCores", lambda: SimpleNamespace(threads=lambda: spare.now))
    monkeypatch.setattr(architecture, "LARGE", large)
    engine, app = main.build(main.parse_arguments(["--model", str(make_model(tmp_path / "model")), *options]))

    async def ask() -> list[int]:
        seen: list[int] = []
        driving = asyncio.create_task(engine.loop.drive())
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
            for spare.now in (2, 3):
                answer = await asyncio.wait_for(client.post("/inference/v1/generate", json=body), 60)
                assert answer.status_code == 200, answer.text
                seen.append(torch.get_num_threads())
        driving.cancel()
        return seen

    assert asyncio.run(ask()) == threads


def test_no_threads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("0", "many"):
        with pytest.raises(SystemExit):
            main.parse_arguments(["--model", "m", "--threads", given])
        assert f"--threads: '{given}': give a number from 1, or auto" in capsys.readouterr().err
