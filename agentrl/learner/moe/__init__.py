"""Mixtures of experts in the learner: routers, and the replay of the experts that engines chose."""
