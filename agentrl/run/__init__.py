"""A run: the trainer, its supervisor and processes, evaluation, weights on their way, a cluster."""
