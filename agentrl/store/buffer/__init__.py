"""The buffer between rollout and learner: admission, closing of groups, the order in which they are taken."""
