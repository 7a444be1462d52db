"""The models of a learner: the policy, references, critics, adapters, attention over prefix trees, log-probs."""
