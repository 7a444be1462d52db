"""The `[[roles]]` of the run file: what trains each role of an environment.

Never knows the environment: `agentrl.runtime.trainer` compares names with its roles.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import SerializeAsAny

from agentrl.algos.algorithm import Algorithm
from agentrl.errors import ConfigError
from agentrl.settings import Section


class RoleTable(Section):
    """One role of the environment. Roles without a table are played and trained as `[algo]` and `[[tasks]]` say."""

    name: str  # the role, as the environment names it
    algo: SerializeAsAny[Algorithm] | None = None  # what trains it, as a table like [algo]; default: its task's


def check(tables: Sequence[RoleTable], frozen: Sequence[str]) -> None:
    """`frozen` roles are not trained. Raises ConfigError."""
    seen: set[str] = set()
    for at, table in enumerate(tables):
        if table.name in seen:
            raise ConfigError(f"roles.{at}.name", table.name, "another [[roles]] table has this name: join the two")
        seen.add(table.name)
        if table.algo is not None and table.name in frozen:
            hint = f"rollout.roles gives {table.name} to a policy that does not learn: leave one of the two out"
            raise ConfigError(f"roles.{at}.algo", table.algo.kind, hint)
