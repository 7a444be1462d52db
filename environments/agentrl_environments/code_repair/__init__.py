"""Code repair: small Python modules with a bug, tests that pin it down, tools to repair it.

mutation    which bugs there are             templates   which functions there are
tasks       a seed makes a task              texts       what the policy reads
running     tests in a box                   environment `CodeRepair`
demonstrations  episodes of a noisy expert, for a warm start
"""

from agentrl_environments.code_repair.environment import CodeRepair
from agentrl_environments.code_repair.tasks import Check, RepairTask, make_task

__all__ = ["Check", "CodeRepair", "RepairTask", "make_task"]
