"""Modules and classes under the names that they had before, for code of users: `import agentrl.columns` works, and
warns.

Owns the documented names only; `install` makes Python's import system know them. Never imports a module by itself.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

RENAMED: Final = {
    "agentrl.clock": "agentrl.host.clocks",
    "agentrl.columns": "agentrl.tokens.columns",
    "agentrl.kept": "agentrl.tokens.sampling_mask",
    "agentrl.league": "agentrl.config.league",
    "agentrl.engine.access": "agentrl.engine.auth",
    "agentrl.env.for_gymnasium": "agentrl.env.gymnasium_wrappers",
    "agentrl.env.oracles": "agentrl.env.checks.oracles",
    "agentrl.env.plugged": "agentrl.env.tools.by_name",
    "agentrl.env.programs": "agentrl.env.agent_programs",
    "agentrl.env.roles": "agentrl.env.multi_agent",
    "agentrl.env.rows": "agentrl.env.dataset_env",
    "agentrl.rollout.pivot": "agentrl.rollout.branching",
    "agentrl.sandbox.pool": "agentrl.sandbox.backend_pool",
    "agentrl.sandbox.process_box": "agentrl.sandbox.wrapped_process",
    "agentrl.sandbox.sharing": "agentrl.sandbox.shared_backend",
    "agentrl.sandbox.warm": "agentrl.sandbox.warm_python",
}


class _Renamed(MetaPathFinder, Loader):
    """Finds a module of `RENAMED` as the module of its new name: one object, whichever name it is imported by."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in RENAMED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = RENAMED[spec.name]
        warnings.warn(f"{spec.name} is named {new} now: import that", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed again; the module keeps the spec of its own name."""
        alias, module.__spec__ = module.__spec__, None
        assert alias is not None
        module.__spec__ = alias.loader_state


def install() -> None:
    """Make the old names importable in this process; a second call changes nothing."""
    if not any(isinstance(finder, _Renamed) for finder in sys.meta_path):
        sys.meta_path.append(_Renamed())


def renamed_names(module: str, new: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module some of whose names are renamed: `new` has today's by their earlier one."""

    def find(name: str) -> Any:
        if name not in new:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is named {new[name]} now: import that", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], new[name])

    return find
