"""Checkpoints of a learner: one folder a step, written whole or not at all."""
