"""A small inference engine for CPUs: one process, one thread of arithmetic, vLLM's HTTP API.

    __main__      command line, port, lifeline
    server, wire  HTTP: requests checked, chunks streamed, weights staged and swapped, metrics
    batching      which requests run in the next forward pass, and which version each token carries
    slots         whose keys and values lie where, and whose prefix can be shared
    model         the forward pass; sampler: the draw
    architecture, checkpoint   the configuration and weights of a model folder

Each layer knows the ones below it only. After new weights a running request either keeps its keys and values
(`clear_cache=false`: they were computed under older weights; each token's log-prob and version are still those of the
weights that sampled it) or has them computed anew (`clear_cache=true`). A cached prefix is shared between requests in
neither case once it is older than the weights.
"""
