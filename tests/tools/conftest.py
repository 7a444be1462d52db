from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from agentrl.protocols import Limits, Sandbox, SandboxSpec
from agentrl.sandbox.bubblewrap.backend import Bubblewrap


@pytest.fixture
async def box() -> AsyncGenerator[Sandbox]:
    backend = Bubblewrap()
    yield await backend.create(SandboxSpec(limits=Limits(wall_s=60.0, cpu_s=60.0)))
    await backend.aclose()
