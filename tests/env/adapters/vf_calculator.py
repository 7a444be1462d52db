"""An environment of ours as a plugin of verifiers."""

import agentrl
from agentrl.env.adapters.verifiers_env import export

Tasks, Game = export(lambda: agentrl.make("agentrl/Calculator-v0"), size=10)
__all__ = ["Game", "Tasks"]
