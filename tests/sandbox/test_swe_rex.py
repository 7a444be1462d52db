"""The promises on the local boxes of SWE-ReX, in an environment that has it (`make test-remote`)."""

from __future__ import annotations

import warnings

import pytest

from agentrl.sandbox.remote.swe_rex import SweRex
from agentrl.testing.sandbox import CASES, Case


@pytest.mark.slow
@pytest.mark.remote
@pytest.mark.parametrize("case", [each for each in CASES if not each.isolation], ids=str)
async def test_a_local_box_keeps_promise(case: Case) -> None:
    backend = SweRex(deployment="local", network=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no wall
        try:
            await case.run(backend)
        finally:
            await backend.aclose()
