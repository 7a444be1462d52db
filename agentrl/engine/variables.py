"""Which environment variables the processes of a run get: see `agentrl.owner`."""

from agentrl.owner import DATABASE, NOTHING, SECRETS, Withheld

__all__ = ["DATABASE", "NOTHING", "SECRETS", "Withheld"]
