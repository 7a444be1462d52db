"""Engines by themselves: one that is served, and engines that several runs share."""
