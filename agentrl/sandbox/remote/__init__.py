"""Boxes elsewhere: made by another package (SWE-ReX, inspect_ai) on a machine that need not be this one.

box          a box of ours behind calls that carry text only            helper     the program that serves it there
loop         asyncio libraries called from trio
swe_rex      the backend `swe-rex`          inspect_sandboxes     the backend `inspect`
"""
