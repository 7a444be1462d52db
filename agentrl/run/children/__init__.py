"""The children of a run as its supervisor keeps them.

`restart_loop` is the loop that watches and restarts one; each kind of child has a file of its own, and `run_children`
is all of them together. How a process begins, marks and ends is `agentrl.run.processes`.
"""
