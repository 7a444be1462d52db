"""Totals of the amounts of a CSV file by person."""

import sys
from pathlib import Path


def totals(lines):
    found = {}
    for line in lines:
        name, amount = line.split(",")
        found[name] = float(amount)
    return found


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text("utf-8").splitlines()
    for name, total in totals(lines).items():
        print(name, total)
