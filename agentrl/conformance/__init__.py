"""`agentrl conformance`: the ways to train on the wrong thing, as black-box tests of any trainer.

    scenario.py         what the scripted engine, tool and grader do in a case
    scripted_engine.py  a server without a model that speaks vLLM's API: the judge's record of what was sampled
    tiny_model.py       a model folder that any trainer can load, from the standard library alone
    tiny_forward.py     its log-probs in plain Python: an engine that shows which weights it has
    observation.py      what a trainer did: the vocabulary between adapters and judges
    adapters/           one module per trainer
    child.py            runs an adapter in a process of its own, by any Python
    judges.py           holds, breaks, or why it cannot be judged
    cases.py            the cases: a promise, a scenario and its judge
    conduct.py          all of it, in order

Only the adapters import a trainer, and only in the child. Everything else here but `conduct.py` needs the standard
library alone, so that a trainer's own environment can run it without agentrl's requirements.
"""
