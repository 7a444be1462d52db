"""Finished groups become rows, rows become packed prefix trees."""
