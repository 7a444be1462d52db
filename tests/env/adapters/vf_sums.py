"""A taskset as verifiers wants it, with nothing of ours: sums of two numbers, rewarded by a `@vf.reward`."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(str(self.data.answer) in trace.last_reply)

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        return float(len(trace.last_reply) < 5)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for i in range(6):
            data = SumData(prompt=f"What is {i} + {i}?", system_prompt="Answer with the number.", answer=2 * i)
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
