"""The learner over ranks: processes of one machine, each with a shard of every weight and a share of every step.

rank 0    the learner's own process: takes groups, lays passes, judges, sends weights, writes checkpoints
others    started by rank 0, with neither store nor engine: they do what it orders, and end with it

ranks             orders from rank 0 and their replies, deadlines, and who did not come
rank_process      the process of every other rank
collectives       where each rank stands, in memory that all of them share; the ranks in a row and as tables
layers            layers that several ranks compute together: tensor and expert parallel
fsdp              FSDP2: how a model is cut, gathered and filled
pass_schedule     which rank computes which pass
pass_shards       which tokens, and logits, of a pass each of the ranks has that compute it together
optimizer_state   the optimizers' numbers over ranks
collective_trace  what ranks of any number would send each other, without them
"""
