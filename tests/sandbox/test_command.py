"""A deadline that is none begins no command, in any box; it is a result, as a tool may pass a model's number on."""

from __future__ import annotations

from typing import cast

import pytest

from agentrl.protocols import SandboxSpec
from agentrl.sandbox import backend
from agentrl.sandbox.docker.container import Container
from agentrl.sandbox.docker.container_commands import ContainerEngine


class Never:
    """An engine that nothing is asked of."""

    def next_uid(self) -> int:
        return 1000


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), -float("inf")])
@pytest.mark.parametrize("name", ["local-unsafe", pytest.param("bubblewrap", marks=pytest.mark.bubblewrap), "docker"])
async def test_a_deadline_that_is_none_is_refused_by_name(name: str, timeout_s: float) -> None:
    boxes = None if name == "docker" else backend(name)
    box = await boxes.create() if boxes else Container(cast(ContainerEngine, Never()), SandboxSpec(), set())
    try:
        result = await box.exec(["true"], timeout_s=timeout_s)
        assert result.exit_code == 126
        assert result.stderr.decode() == f"sandbox: timeout_s = {timeout_s!r}: give 0 seconds or more\n"
    finally:
        if boxes:
            await boxes.aclose()
