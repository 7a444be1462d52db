"""Other people's environments as ours, and ours as theirs. A module asks for its package when something is made.

text_gym     any gymnasium environment with small actions; FrozenLake, Blackjack, Taxi
trl_class    environment classes written for TRL
reasoning    reasoning-gym
bfcl_tasks   the Berkeley Function Calling Leaderboard; its package in child processes (bfcl_package)
text_arena   TextArena's games, with roles
petting_zoo  PettingZoo's AEC environments, with roles
open_env     OpenEnv servers, and an environment of ours as one
verifiers_env  verifiers' environments, and an environment of ours as one of its
"""
