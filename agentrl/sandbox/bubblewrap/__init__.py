"""Boxes made with bubblewrap, the default backend."""
