"""The episodes of `agentrl bench running --beside`, played by verifiers (v1): its plugin and a script.

The harness runs its loop in this process, as verifiers allows: a program for each of thousands of episodes would cost
far more. Each turn goes through verifiers' interception server to the model's server, and into its trace.

    python _running_verifiers.py URL EPISODES    prints a line of JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp
import verifiers.v1 as vf
from _running_shape import ANSWER, PROMPT, TOKENS, TURNS, memory_kib
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils import loaders


class LinesTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def one(self, trace: Any) -> float:
        return 1.0


class LinesTaskset(vf.Taskset[LinesTask, vf.TasksetConfig]):
    def load(self) -> Any:
        for index in range(1 << 20):
            yield LinesTask(vf.TaskData(name=str(index), prompt=PROMPT), self.config.task)  # pyright: ignore[reportCallIssue]


class LinesHarnessConfig(vf.HarnessConfig):
    pass


class LinesHarness(vf.Harness[LinesHarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    http: aiohttp.ClientSession

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        messages: list[dict[str, str]] = [{"role": "user", "content": data.prompt}]
        headers = {"authorization": f"Bearer {secret}"}
        for _ in range(TURNS):
            body = {"model": ctx.model, "messages": messages, "max_tokens": TOKENS, "logprobs": True}
            async with LinesHarness.http.post(f"{endpoint}/chat/completions", json=body, headers=headers) as answer:
                answer.raise_for_status()
                said = (await answer.json())["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": ANSWER}]
        return ProgramResult(0, "", "")


__all__ = ["LinesHarness", "LinesTaskset"]


async def main(url: str, n: int) -> None:
    seat = {"harness": {"id": "_running_verifiers"}, "runtime": {"type": "subprocess"}}
    config = {"id": "", "taskset": {"id": "_running_verifiers"}, "interception": {"type": "server"}, "agent": seat}
    env = loaders.load_environment(loaders.resolve_env_config(config))
    tasks = [task for task, _ in zip(env.taskset, range(n), strict=False)]
    client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="AGENTRL_NO_KEY")
    context = vf.ModelContext(model="m", client=client, sampling=vf.SamplingConfig())  # pyright: ignore[reportCallIssue]
    before, peak = memory_kib(), 0
    import _running_verifiers as plugin  # the module that verifiers loads

    async with env.serving(), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        plugin.LinesHarness.http = session
        began, cpu = time.perf_counter(), time.process_time()
        playing = [asyncio.create_task(env.run_episode(task, context)) for task in tasks]
        done = asyncio.gather(*playing)
        while not done.done():
            await asyncio.wait([done], timeout=0.5)
            peak = max(peak, memory_kib())
        episodes = done.result()
        spent, seconds = time.process_time() - cpu, time.perf_counter() - began
    errors = [error for one in episodes for trace in one.traces for error in trace.errors]
    whole = sum(
        len(trace.branches[-1].messages) >= 2 * TURNS for one in episodes for trace in one.traces if trace.branches
    )
    assert not errors and whole == n, f"{whole} of {n} episodes are whole: {errors[:1]}"
    found = {
        "cpu_ms_a_turn": 1000 * spent / (n * TURNS),
        "kib_an_episode": (peak - before) / n,
        "turns_s": n * TURNS / seconds,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
