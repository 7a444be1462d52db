"""Other people's environments as ours, and ours as theirs. Each module imports its package when it is imported.

text_gym     any gymnasium environment with small actions; FrozenLake, Blackjack, Taxi
"""
