"""The promises on the local boxes of inspect_ai, in an environment that has it (`make test-remote`)."""

from __future__ import annotations

import warnings

import pytest

from agentrl.sandbox.remote.inspect_sandboxes import Inspect

from .promises import WITHOUT_WALLS, keep


@pytest.mark.slow
@pytest.mark.remote
@pytest.mark.parametrize("room", WITHOUT_WALLS)
async def test_a_local_box_keeps_promise(room: str) -> None:
    backend = Inspect(kind="local", network=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no wall
        try:
            await keep(backend, WITHOUT_WALLS[room])
        finally:
            await backend.aclose()
