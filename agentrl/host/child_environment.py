"""Which environment variables a child process gets: those of this process without the secrets that it does not need.

A process's environment is read by whoever reaches the process: code that it loads, a crash report, a debugger.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.records import EngineKey

_ENGINES = {EngineKey.VALUE, EngineKey.SIGNING}
_DATABASE = re.compile(r"PG[A-Z]+")  # libpq's: where the database is, and how to get in
_WORDS = {
    *("KEY", "KEYS", "APIKEY", "TOKEN", "SECRET", "SECRETS", "AUTH", "CREDENTIAL", "CREDENTIALS"),
    *("PASS", "PASSWD", "PASSWORD", "PASSPHRASE", "PASSFILE"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Withheld:
    """The secrets that a child does not get: variables of these `names`, PostgreSQL's (`database`), those of the run's
    own engines (`engines`), and all whose name says that they hold one (`others`), save those that are `needed`."""

    names: frozenset[str] = frozenset()
    database: bool = False
    engines: bool = False
    others: bool = False
    needed: frozenset[str] = frozenset()

    def without(self, variables: Mapping[str, str]) -> dict[str, str]:
        """These variables, but for what is withheld."""
        return {
            variable_name: variable_value
            for variable_name, variable_value in variables.items()
            if not self._has(variable_name)
        }

    def _has(self, name: str) -> bool:
        """Whether the child does not get the variable `name`. The first rule that knows the name decides."""
        if name in self.names:
            return True
        if _DATABASE.fullmatch(name):
            return self.database
        if name in _ENGINES:
            return self.engines
        # Our own variables are decided by their names above: what a child of ours may read must not depend on which
        # words such a name happens to have.
        is_ours = name.startswith("AGENTRL_")
        return (
            self.others and not is_ours and name not in self.needed and not _WORDS.isdisjoint(name.upper().split("_"))
        )


NOTHING = Withheld()
OF_THE_RUN = Withheld(database=True, engines=True)
"""For a program of the user's, which a worker starts."""

SECRETS = Withheld(database=True, engines=True, others=True)
"""For a process that only computes."""
