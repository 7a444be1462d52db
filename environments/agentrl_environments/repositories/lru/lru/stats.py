"""Counts of what a cache was asked."""


class Stats:
    """Hits, misses and evictions since the last reset."""

    def __init__(self):
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    def record(self, hit):
        """Count one lookup."""
        if hit:
            self.hits += 1
        else:
            self.misses += 1

    def rate(self):
        """Share of lookups that were hits; 0.0 before the first lookup."""
        lookups = self.hits + self.misses
        if lookups == 0:
            return 0.0
        return self.hits / lookups

    def reset(self):
        """Start counting anew."""
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    def as_dict(self):
        """The counts by name."""
        return {"hits": self.hits, "misses": self.misses, "evictions": self.evictions}
