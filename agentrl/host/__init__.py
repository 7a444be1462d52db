"""What a process needs of the machine it runs on: clocks, ports, disk space, a janitor, output that never blocks. Knows
no run."""
