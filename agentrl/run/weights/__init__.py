"""Weights of a run on their way to its engines: the publisher, policies by role, turns on a shared GPU."""
