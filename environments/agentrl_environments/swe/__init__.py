"""Coding tasks that others collected: rows of SWE-bench or SWE-smith, and Harbor task folders, played in boxes.

task              what a task is
jsonl             SWE rows as tasks
harbor            task folders as tasks
trees             the work folder at the start
dockerfile        what needs no building
submitted_files   what is taken to grading
verdicts          test logs
separate_grading  the tests in one box, the sources in another
environment       `SWE` and `Harbor`
"""

from typing import TYPE_CHECKING

from agentrl.host.renamed_modules import renamed_names
from agentrl_environments.swe.environment import SWE, CodingTasks, Harbor
from agentrl_environments.swe.task import CodingTask

__all__ = ["SWE", "CodingTask", "CodingTasks", "Harbor"]

if not TYPE_CHECKING:
    __getattr__ = renamed_names(__name__, {"Task": "CodingTask"})
