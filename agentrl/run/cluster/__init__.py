"""A run on a Ray cluster: launcher, head, submission, scaling. The only room that imports ray."""
