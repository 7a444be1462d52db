"""Weights of a run on their way to its engines: policies by role, turns on a shared GPU, room for their files."""
