"""`CodeRepair` and `RepoRepair` in containers of a named image, some of them made ahead; SWE tasks: `test_swe.py`."""

from __future__ import annotations

import pytest
from sandbox.conftest import IMAGE, docker_engine  # noqa: F401  (a fixture)

import agentrl
from agentrl.env.checks.oracles import judge

pytestmark = pytest.mark.docker


@pytest.mark.medium
@pytest.mark.parametrize("id", ["agentrl/CodeRepair-v0", pytest.param("agentrl/RepoRepair-v0", marks=pytest.mark.long)])
async def test_oracles_get_what_they_must(
    id: str,
    docker_engine: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    verdicts = await judge(lambda: agentrl.make(id, sandbox="docker", image=IMAGE, ready=2), 1)
    assert {verdict.name for verdict in verdicts} >= {"gold", "no-op"}
    assert all(verdict.holds for verdict in verdicts), verdicts
