"""An agent of OpenHands' SDK with its terminal, over chat completions."""

import os
from pathlib import Path

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

key = SecretStr(os.environ["OPENAI_API_KEY"])
llm = LLM(model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=key, num_retries=0, timeout=3600)
conversation = Conversation(
    agent=Agent(llm=llm, tools=[Tool(name=TerminalTool.name)]), workspace=str(Path.cwd()), visualizer=None
)
conversation.send_message(os.environ["ISSUE"])
conversation.run()
print(conversation.state.execution_status)
