#!/bin/sh
# Everything is judged here, in a box that the agent has not seen.
mkdir -p /logs/verifier
if python3 -I -S /tests/check.py; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
