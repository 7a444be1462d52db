"""Statistics of results on the same tasks: intervals, tests, a confidence sequence, power. Arrays in, numbers out.

Never knows a run, a file or a model. Needs scipy, which the extra `compare` brings.
"""
