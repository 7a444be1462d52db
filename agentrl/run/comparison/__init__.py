"""Comparison of models on the same tasks: results are read, paired by task, and judged by `agentrl.statistics`."""
