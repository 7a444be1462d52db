#!/bin/sh
cat > /app/totals.py <<'END'
"""Totals of the amounts of a CSV file by person."""

import sys
from pathlib import Path


def totals(lines):
    found = {}
    for line in lines:
        if line.strip():
            name, amount = line.split(",")
            found[name] = found.get(name, 0.0) + float(amount)
    return found


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text("utf-8").splitlines()
    for name, total in sorted(totals(lines).items()):
        print(f"{name} {total:.2f}")
END
