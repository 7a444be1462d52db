"""Optimizers, their master weights, and where their state is between two steps."""
