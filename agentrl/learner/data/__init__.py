"""Finished groups become rows, rows become packed prefix trees.

batch          a group to rows: judged, built, held to the lag bound
siblings       a group's members as tensors, and the columns that each role's algorithm makes of them
rows           the turns of an episode as rows of tokens
lag_bound      tokens that are too old leave the loss (law 5)
shares         the share of a step's loss that each token has
prefix_trees   rows that begin alike share the tokens of their beginning
shared_prompt  a prompt that several passes need is computed once
ragged         columns whose tokens have different numbers of values
device_copy    to the device and back, without a wait
"""
