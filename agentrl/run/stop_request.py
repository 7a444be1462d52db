"""A wish that a run end, made by any thread of the supervisor's own process: `Trainer.stop`, callbacks. The supervisor
looks at it as often as it ticks. `agentrl stop` is another process, and has a signal or the store."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.errors import RunFailed


@dataclass(slots=True)
class StopRequest:
    """`finish` is why training ends after its step under way, evaluations and summary included; `interrupt` why the run
    ends at once, as by Ctrl-C; `error` what the run ends with, once the learner has saved its step. The first wish of a
    kind counts."""

    finish: str | None = None
    interrupt: str | None = None
    error: RunFailed | None = None

    # Plain assignments, without a lock: they come from any thread, the first one counts, and whoever reads looks again
    # in a quarter of a second.
    def ask_to_finish(self, reason: str) -> None:
        self.finish = self.finish or reason

    def ask_to_interrupt(self, reason: str) -> None:
        self.interrupt = self.interrupt or reason

    def fail(self, error: RunFailed) -> None:
        self.error = self.error or error

    @property
    def ends_training(self) -> bool:
        return self.finish is not None or self.error is not None
