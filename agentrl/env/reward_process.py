"""Reward functions in processes of their own, in whose main thread they run.

Some need that: math-verify ends a long comparison by a signal, which only a main thread gets. And a function that hangs
can be ended there, and costs its process alone. A process imports the functions once, and judges one answer after the
other.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentrl.env.child_processes import ChildProcesses, Hangs, serve
from agentrl.env.reward_functions import Answer, RewardFunction
from agentrl.errors import AgentRLError, UsageError, place_of


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """The functions' scores of an answer. `scores` has None where a function abstains; `late` functions had not judged
    it in time, and have no score."""

    scores: Mapping[str, float | None]
    late: Sequence[str] = ()


class RewardProcesses:
    """At most `most` processes, started as they are needed, for any number of threads that call `judge`.

    The wait for a process, and its start, which imports the functions, are no part of a function's time."""

    def __init__(self, names: Sequence[str], most: int = 1) -> None:
        self.names = names
        self._processes = ChildProcesses(__name__, names, name="the reward functions", most=most)

    def judge(self, answer: Answer, deadline_s: float) -> AnswerScores:
        """Have all functions judge an answer, one after the other, within `deadline_s` seconds altogether.

        Raises HostBusy where this machine has no process in time, or gives it no processor; else as a function does."""
        scores_by_name: dict[str, float | None] = {}
        left_s = deadline_s
        with self._processes.borrowed() as child:
            try:
                for function_name in self.names:
                    reply, used_s = child.ask({"name": function_name, **asdict(answer)}, left_s)
                    scores_by_name[function_name] = reply["score"]
                    left_s = max(0.0, left_s - used_s)
            except Hangs:
                pass
        return AnswerScores(
            scores_by_name, [function_name for function_name in self.names if function_name not in scores_by_name]
        )

    def close(self) -> None:
        """End the processes that are idle."""
        self._processes.close()


def main(names: Sequence[str]) -> None:
    """Serve the functions until standard input ends."""

    def start() -> Callable[[dict[str, Any]], dict[str, Any]]:
        functions = {function_name: RewardFunction.of(function_name) for function_name in names}

        def judge(request: dict[str, Any]) -> dict[str, Any]:
            function_name = str(request.pop("name"))
            try:
                return {"score": functions[function_name](Answer(**request))}
            except AgentRLError as call_error:
                return {"error": str(call_error), "usage": isinstance(call_error, UsageError)}
            except (Exception, SystemExit) as call_error:
                traceback.print_exc()
                problem = " ".join(f"{type(call_error).__name__}: {call_error}".split())
                return {"error": f"the reward function {function_name!r} raised {problem} ({place_of(call_error)})"}

        return judge

    serve(start)


if __name__ == "__main__":
    main(sys.argv[1:])
