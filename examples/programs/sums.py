"""Six agent programs, unmodified, on one small task: a number has to stand in a file.

    kwargs = { agent = "codex" }

Each runs in a box that reaches its model and nothing else. `make programs-all` installs them; the box finds them at
/opt/programs and /opt/programs-all.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.env.agent_programs import ProgramEnv
from agentrl.errors import ConfigError

ANY, ALL = "/opt/programs", "/opt/programs-all"
SCRIPT = "/workspace/.agent/program.py"
CODEX = [
    "codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox",  # the box is the sandbox
    "-c model=policy -c model_provider=policy -c model_providers.policy.name=policy",
    """-c "model_providers.policy.base_url='$OPENAI_BASE_URL'" -c model_providers.policy.env_key=OPENAI_API_KEY""",
    "-c model_providers.policy.wire_api=responses",
]
COMMANDS = {
    "openai-agents": [f"{ANY}/bin/python", SCRIPT],
    "langgraph": [f"{ANY}/bin/python", SCRIPT],
    "qwen-code": ["sh", "-c", 'exec qwen --auth-type openai --model policy --yolo "$ISSUE"'],
    "codex": ["sh", "-c", f'exec {" ".join(CODEX)} "$ISSUE"'],
    "openhands": [f"{ALL}/bin/python", SCRIPT],
    "terminus": [f"{ALL}/bin/python", SCRIPT],
}
SCRIPTS = {"openai-agents": "openai_agents.py", "langgraph": "langgraph_agent.py"} | {
    "openhands": "openhands_agent.py",
    "terminus": "terminus.py",
}
REPLAYABLE = ("openai-agents", "langgraph", "openhands")  # the others answer with random ids, or as time has it
SETTINGS = {
    "PATH": f"{ANY}/bin:{ANY}/node_modules/.bin:{ALL}/bin:{ALL}/node_modules/.bin:/usr/local/bin:/usr/bin:/bin",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else OpenHands and Terminus ask the network for prices
    "OPENHANDS_SUPPRESS_BANNER": "1",
}


class Sums(ProgramEnv):
    """`agent` is one of COMMANDS. The outcome is 1 if the sum is in answer.txt."""

    def __init__(self, agent: str, **settings: Any) -> None:
        if agent not in COMMANDS:
            raise ConfigError("env.kwargs.agent", agent, f"choose one of {', '.join(COMMANDS)}")
        self._agent = agent
        box = {"memory_bytes": 8 << 30, "pids": 512, **settings.pop("box", {})}
        words = [f"{name}={value}" for name, value in SETTINGS.items()]
        read = "ISSUE=$(python3 -c \"import json, os; print(json.loads(os.environ['AGENTRL_TASK'])['issue'])\")"
        start = ["sh", "-c", f'export {read}; exec "$@"', "sh"]
        chosen = {"sandbox": "bubblewrap", "replayable": agent in REPLAYABLE, **settings}
        super().__init__(["env", *words, *start, *COMMANDS[agent]], **chosen, box=box)

    def make_task(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        a, b = (int(number) for number in self.np_random.integers(100, 1000, 2))
        return {"issue": f"Write the sum of {a} and {b} into answer.txt.", "sum": a + b}

    def box_files(self, task: Mapping[str, Any]) -> Mapping[str, bytes]:
        script = SCRIPTS.get(self._agent)
        return {".agent/program.py": Path(__file__).with_name(script).read_bytes()} if script else {}

    async def grade(self, task: Mapping[str, Any], result: Any) -> bool:
        return (await self.box.read("answer.txt", most_bytes=100)).split() == [str(task["sum"]).encode()]
