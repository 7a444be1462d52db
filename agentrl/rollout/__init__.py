"""Episodes: from a claim in the run store to a finished, journaled trajectory.

    worker.py           one process: claims episodes, keeps their leases, runs them side by side
    episode.py          one episode: render, generate, journal, step, until the environment ends it
    env_calls.py        the calls into an environment, under their deadlines
    generate_turn.py    one turn from an engine, written to the store while its tokens come
    compaction.py       a conversation that outgrows its context goes on from less of it
    take_snapshots.py   keeps snapshots of environments, and why there is none
    restore.py          brings the environment of an interrupted episode back to where it stood
    branching.py        groups that play an episode on from one of its turns

This package never imports torch. It knows the store, an engine client, a renderer and environments by their protocols.
"""
