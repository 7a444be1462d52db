"""Agent programs as environments: any program that talks to a model over HTTP, unmodified, with exact tokens.

program_env  ProgramEnv: each request of the program is an observation, each action its answer
session      the program at work              api   the HTTP APIs it may speak
http         the server it talks to
"""

from agentrl.env.agent_programs.program_env import ProgramEnv
from agentrl.env.agent_programs.session import Exited, Program, Session

__all__ = ["Exited", "Program", "ProgramEnv", "Session"]
