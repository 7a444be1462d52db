"""The promises on the local boxes of SWE-ReX, in an environment that has it (`make test-remote`)."""

from __future__ import annotations

import warnings

import pytest

from agentrl.sandbox.remote.swe_rex import SweRex

from .promises import WITHOUT_WALLS, keep


@pytest.mark.slow
@pytest.mark.remote
@pytest.mark.parametrize("room", WITHOUT_WALLS)
async def test_a_local_box_keeps_promise(room: str) -> None:
    backend = SweRex(deployment="local", network=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no wall
        try:
            await keep(backend, WITHOUT_WALLS[room])
        finally:
            await backend.aclose()
