"""The algorithms as pure functions of tensors: advantages, credit, losses, corrections.

Knows nothing of models, groups or files: it imports torch and nothing of agentrl. Who judges whom (`judging`) is plain
Python, for processes without torch. Suffixes name shapes: G members of a group, T turns of an episode or tokens of a
batch (each docstring says which), V vocabulary.
"""
