"""Tools, the calls that a model writes, and the parsers of each model family's format."""
