"""Which environment variables the processes of a run get: see `agentrl.host.janitor`."""

from agentrl.host.janitor import NOTHING, OF_THE_RUN, SECRETS, Withheld

__all__ = ["NOTHING", "OF_THE_RUN", "SECRETS", "Withheld"]
