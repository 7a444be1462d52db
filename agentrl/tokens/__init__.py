"""Data that an engine reports of each sampled token besides its log-prob: named columns, the sampling mask, and the ids
that stand for images."""
