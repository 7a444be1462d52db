"""Several engines as one: replicas, session affinity, hedging, concurrency, and the gateway that runs share."""
