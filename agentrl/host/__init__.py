"""Services of the machine that a process runs on: clocks, ports, disk space, a janitor, output that never blocks. Knows
no run."""
