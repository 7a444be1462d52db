"""The names under which engines know the adapters of weight versions: `policy-7`, `policy-7-solver`, `league-3`.

Apart from what loads adapters, because the canary names them too and a transport carries a canary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

POLICY: Final = "policy"
LEAGUE: Final = "league"


def adapter_name(version: int, role: str | None = None, *, kept: bool = False) -> str:
    """The name of a weight version's adapter: that of a `role`, or the one of all roles without weights of their own;
    of a past self that is `kept` for a league, or of the policy."""
    return f"{LEAGUE if kept else POLICY}-{version}" + (f"-{role}" if role else "")


def versions_in(names: Iterable[str]) -> frozenset[int]:
    """The versions of the policy's adapters among these names, of any role."""
    # Digits as in `vllm_api.parse_version`.
    name_matches = (re.fullmatch(rf"{POLICY}-([0-9]{{1,18}})(-.*)?", name) for name in names)
    return frozenset(int(name_match[1]) for name_match in name_matches if name_match)
