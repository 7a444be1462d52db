"""One process of a run: how it starts, shows signs of life, is restarted within a budget, and ends; and the bodies of
worker and learner. Which processes a run has, and who keeps them, is in `agentrl.run.children`."""
