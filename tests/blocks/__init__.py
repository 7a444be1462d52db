"""The blocks of a loop of one's own, against an engine process and the tiny coder."""
