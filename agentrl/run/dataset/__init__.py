"""A run of a data set and reward functions, written from Python: its run file, the functions of a notebook."""
