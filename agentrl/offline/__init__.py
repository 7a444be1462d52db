"""Work beside a run: supervised training, demonstrations, export, training a step again."""
