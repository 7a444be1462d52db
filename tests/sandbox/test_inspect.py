"""The promises on the local boxes of inspect_ai, in an environment that has it (`make test-remote`)."""

from __future__ import annotations

import warnings

import pytest

from agentrl.sandbox.remote.inspect_sandboxes import Inspect
from agentrl.testing.sandbox import CASES, Case


@pytest.mark.slow
@pytest.mark.remote
@pytest.mark.parametrize("case", [each for each in CASES if not each.isolation], ids=str)
async def test_a_local_box_keeps_promise(case: Case) -> None:
    backend = Inspect(kind="local", network=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no wall
        try:
            await case.run(backend)
        finally:
            await backend.aclose()
