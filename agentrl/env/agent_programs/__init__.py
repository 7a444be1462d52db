"""Agent programs as environments: any program that talks to a model over HTTP, unmodified, with exact tokens.

program_env      ProgramEnv: each request of the program is an observation, each action its answer
session          the program at work
model_apis       the HTTP APIs that it may speak
text_completions the older one of them, for a text without a template
open_requests    its requests that wait for an answer
transcripts      digests by which a request is known to continue a conversation
branches         which earlier answer a request goes on from, and edges between conversations
request_checks   what a request must be before any part of it becomes an observation
"""

from agentrl.env.agent_programs.program_env import ProgramEnv
from agentrl.env.agent_programs.session import Exited, Program, Session

__all__ = ["Exited", "Program", "ProgramEnv", "Session"]
