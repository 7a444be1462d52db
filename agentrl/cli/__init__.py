"""The command line: a thin shell, one module for each group of commands. Heavy imports wait until a command runs."""
