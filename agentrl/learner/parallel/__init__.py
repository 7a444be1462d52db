"""The learner over ranks: processes of one machine, each with a shard of every weight and a share of every step.

rank 0    the learner's own process: takes groups, lays passes, judges, sends weights, writes checkpoints
others    started by rank 0, with neither store nor engine: they do what it orders, and end with it

ranks         orders from rank 0 and their replies, deadlines, and who did not come
worker        the process of every other rank
meshes        the ranks in a row, and as tables for layers that several compute together
layers        such layers: heads and neurons divided (tensor parallel), experts kept apart (expert parallel)
portions      which tokens, and logits, of a pass each of the ranks has that compute it together
shards        FSDP2: how a model is cut, gathered and filled
shares        which rank computes which pass
traffic       what ranks of any number would send each other, without them
collectives   where each rank stands, in memory that all of them share
"""
