"""Episodes: from a claim in the run store to a finished, journaled trajectory.

    worker.py    one process: claims episodes, keeps their leases, runs them side by side
    episode.py   one episode: render, generate, journal, step, until the environment ends it
    guard.py     the calls into an environment, under their deadlines
    sampling.py  one turn from an engine, written to the store while its tokens come
    saving.py    keeps snapshots of environments, and why there is none
    replay.py    brings the environment of an interrupted episode back to where it stood

This package never imports torch. It knows the store, an engine client, a renderer and environments by their protocols.
"""
