"""Prediction of what a run would do, hold and cost, before anything starts."""
