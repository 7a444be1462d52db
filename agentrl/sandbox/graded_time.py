"""The rule for a grader that ran out of time: whose time was it?

A grader runs the policy's code, so its deadline is the policy's: code that loops or sleeps in a test gets 0. Time in
which the code was ready to run and its host gave it no processor is the host's. The boxes of this project move their
deadlines by that time (`agentrl.host.cpu_time`) and raise HostBusy where it does not end. A backend from elsewhere may
only report it (`ExecResult.starved_s`): then the time-out is the host's if the host withheld half of the time or more.
A backend that reports nothing leaves the time-out with the policy, as nobody can tell a sleeping program from a starved
one by its wall time, and a program may choose to sleep.
"""

from __future__ import annotations

from agentrl.host.cpu_time import starved_out
from agentrl.protocols import ExecResult


def own_time_out(result: ExecResult) -> bool:
    """Whether a command used up its own time. Raises HostBusy where its host kept it from running."""
    # Half, as a program may start threads that wait for a processor on purpose: a small share of starved seconds must
    # not make its own time-out an excuse.
    if result.timed_out and result.starved_s > 0 and result.starved_s >= result.duration_s / 2:
        raise starved_out(result.starved_s, result.cpu_s or 0.0)
    return result.timed_out
