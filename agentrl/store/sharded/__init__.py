"""A run store of several databases."""
