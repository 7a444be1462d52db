"""Verdicts on the tasks of a set: `verdicts` names them, `task_checks` finds them, `check_set` plays the tasks."""
