"""A taskset whose reward trusts the policy."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: int


class Trusting(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def near(self, trace) -> float:
        return 1.0 / (1.0 + abs(self.data.answer - int(trace.last_reply)))


class TrustingTaskset(vf.Taskset[Trusting, vf.TasksetConfig]):
    def load(self):
        for i in range(2):
            yield Trusting(Data(prompt=f"What is {i} + {i}?", answer=2 * i), self.config.task)


__all__ = ["TrustingTaskset"]
