"""The tools of this package are found by their ids."""

from __future__ import annotations

from each_case import each_case

import agentrl
from agentrl import registry

IDS = "apply_patch calculator fetch list_files mcp python read_file replace_text search shell write_file".split()  # noqa: SIM905


class Ask(agentrl.ToolEnv):
    def prompt(self, task):
        return "Go."


@each_case("id", IDS)
def test_id_resolves(id: str) -> None:
    assert registry.resolve("tools", id).__module__.startswith("agentrl_tools.")


@each_case("id", sorted({*IDS} - {"mcp"}))
def test_the_model_reads_the_id(id: str) -> None:
    """Unless the run names it otherwise."""
    env = Ask(tools=[{"id": id, "allow": []} if id == "fetch" else id])
    assert [schema["name"] for schema in env.schemas] == [id]


def test_sandbox_ids_resolve() -> None:
    for id in ("bubblewrap", "docker", "local-unsafe"):
        assert registry.resolve("sandboxes", id).__module__.startswith("agentrl.sandbox.")
