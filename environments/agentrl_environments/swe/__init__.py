"""Coding tasks that others collected: rows of SWE-bench or SWE-smith, and Harbor task folders, played in boxes.

task              what a task is
jsonl             SWE rows as tasks
harbor            task folders as tasks
trees             the work folder at the start
dockerfile        what needs no building
submitted_files   what is taken to grading
verdicts          test logs, of pytest and unittest
other_runners     and of others
reward_files      what a Harbor verifier left
separate_grading  the tests in one box, the sources in another
environment       `SWE` and `Harbor`
"""

from agentrl_environments.swe.environment import SWE, CodingTasks, Harbor
from agentrl_environments.swe.task import CodingTask

__all__ = ["SWE", "CodingTask", "CodingTasks", "Harbor"]
