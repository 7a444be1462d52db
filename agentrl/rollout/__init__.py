"""Episodes: from a claim in the run store to a finished, journaled trajectory.

    worker.py           one process: claims episodes, keeps their leases, runs them side by side
    context.py          the parts and settings that a worker gives to its episodes
    episode.py          one episode: render, generate, journal, step, until the environment ends it; lists its parts
    env_calls.py        the calls into an environment, under their deadlines
    generate_turn.py    one turn from an engine, written to the store while its tokens come
    compaction.py       the messages that a conversation goes on from when it outgrows its context
    branching.py        groups that play an episode on from one of its turns

This package never imports torch. It knows the store, an engine client, a renderer and environments by their protocols.
"""
