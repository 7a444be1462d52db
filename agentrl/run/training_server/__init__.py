"""A training server that speaks the Tinker API: `agentrl serve MODEL --training`.

    tinker_api        HTTP: the routes, the key, futures that are waited for
    tinker_messages   requests and answers as the `tinker` client writes and reads them
    call_log          what was accepted and answered, in one SQLite file: every call once, also after a kill
    training_calls    calls of training clients, each client's in its order, sessions in fair turns
    target_losses     the losses that a call may name
    sampling_calls    samples and log-probs by an engine, with the adapter that a sampling client names
    held_adapters     the adapters that the engine holds, and their files for as long
    sessions          which sessions go on, and which have ended
    kept_engine       an engine that is started again when it ends
    fair_turns        places that sessions share
    training_server   the parts together

A call is journaled before its future is handed out; its answer, and what it changed, in one transaction. An adapter's
weights and Adam are a file that each optimizer step writes anew; after a kill the gradients since are computed again
from the journaled calls.
"""
