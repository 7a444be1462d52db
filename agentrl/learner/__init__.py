"""The learner's side: groups to rows, rows to packed prefix trees, trees to gradients, weights to files.

Reads `records.Group`, writes model folders and weight files. Never knows environments, sandboxes, engines or HTTP.
"""
