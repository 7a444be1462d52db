"""Simulation of a run with other slots, another lag bound or another way to close groups, in virtual time.

    service      how long episodes and steps take: from the user, or measured in a finished run
    memory       the store's rules on groups, in memory
    policies     ours, and those of other systems
    simulation   one run in virtual time
    ideal        what no schedule of such a run exceeds

Standard library and the store only.
"""
