"""The tools of this package are found by their ids."""

from __future__ import annotations

import pytest

from agentrl import registry

IDS = "apply_patch calculator fetch list_files mcp python read_file replace_text search shell write_file".split()  # noqa: SIM905


@pytest.mark.parametrize("id", IDS)
def test_id_resolves(id: str) -> None:
    assert registry.resolve("tools", id).__module__.startswith("agentrl_tools.")


def test_sandbox_ids_resolve() -> None:
    for id in ("bubblewrap", "docker", "local-unsafe"):
        assert registry.resolve("sandboxes", id).__module__.startswith("agentrl.sandbox.")
