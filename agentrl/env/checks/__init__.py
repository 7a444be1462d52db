"""Checks of environments: `check_env`, oracles, leaks, and `agentrl validate`."""
