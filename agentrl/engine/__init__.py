"""Engines sample tokens: the client side of inference engines, exact-token rendering, and two servers.

`client`, `fleet`, `transport`, `renderer`, `weights` and `launch` never import torch; `embedded` is a server process
of its own and does.
"""
