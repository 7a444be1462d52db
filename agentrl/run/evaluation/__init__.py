"""Evaluation: held-out tasks in a run, a checkpoint or a model by itself, a model behind an endpoint."""
