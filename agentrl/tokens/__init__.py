"""What an engine reports of each sampled token besides its log-prob: named columns, and the sampling mask."""
