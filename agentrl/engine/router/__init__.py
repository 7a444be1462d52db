"""Several engines as one: replicas, session affinity, hedging, concurrency."""
