"""Boxes that are containers of a Docker engine. The only room that imports docker."""
