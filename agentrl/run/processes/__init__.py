"""The processes of one run: how each starts, shows signs of life, is restarted within a budget, and ends."""
