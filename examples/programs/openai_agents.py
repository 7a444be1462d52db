"""An agent of the OpenAI Agents SDK, which speaks the responses API as a stream. Its tool calls may be parallel."""

import asyncio
import os
import subprocess

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def shell(command: str) -> str:
    """Run a shell command: what it writes."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, errors="replace")
    return done.stdout + done.stderr


async def main() -> None:
    set_tracing_disabled(True)
    model = OpenAIResponsesModel("policy", AsyncOpenAI(max_retries=0, timeout=3600))
    agent = Agent(name="shell", instructions="You work in a shell.", tools=[shell], model=model)
    run = Runner.run_streamed(agent, os.environ["ISSUE"], max_turns=50)
    async for _ in run.stream_events():
        pass
    print(run.final_output)


asyncio.run(main())
