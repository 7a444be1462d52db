"""Repository repair: small projects with something wrong or missing, and the tools that a large model gets.

repository   what there is to break       breaking      how it can be broken
catalogue    what breaks which tests      tasks         a seed makes a task
texts        what the policy reads        environment   `RepoRepair`
"""

from agentrl_environments.repo_repair.environment import RepoRepair
from agentrl_environments.repo_repair.tasks import RepoTask, make_task

__all__ = ["RepoRepair", "RepoTask", "make_task"]
