"""`agentrl canary`: does a server that somebody else started compute what a model folder says?

    probe.py         the tokens and conversations that are compared
    server.py        what a server answers, whichever API it has
    local_model.py   what the folder says: the one module here that imports torch
    sampling.py      which sampling settings turn a model's log-probs into a server's
    verdict.py       names the faults
    examine.py       all of it, in order

The canary of a run (`agentrl.engine.weight_sync.canary`) compares with the learner, after every sync; both judge
log-probs by the same functions there.
"""
