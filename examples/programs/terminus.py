"""Terminus 2 of Harbor. Its environment is the box that it runs in: commands are plain processes here."""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

PIPE, NOTHING = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL


class Here(BaseEnvironment):
    """Harbor's contract of an environment, for the machine that this program runs on."""

    @staticmethod
    def type() -> str:
        return "here"

    def _validate_definition(self) -> None: ...

    async def start(self, force_build: bool) -> None: ...

    async def stop(self, delete: bool) -> None: ...

    async def upload_file(self, source_path, target_path) -> None:
        shutil.copy(source_path, target_path)

    async def upload_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

    download_file, download_dir = upload_file, upload_dir

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None) -> ExecResult:
        given = {**os.environ, **(env or {})}
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", command, cwd=cwd, env=given, stdin=NOTHING, stdout=PIPE, stderr=PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        texts = {"stdout": out.decode(errors="replace"), "stderr": err.decode(errors="replace")}
        return ExecResult(**texts, return_code=process.returncode)


async def main() -> None:
    folder = Path(tempfile.mkdtemp())
    here = Here(
        environment_dir=folder,
        environment_name="here",
        session_id="here",
        trial_paths=TrialPaths(trial_dir=folder),
        task_env_config=EnvironmentConfig(),
    )
    agent = Terminus2(
        logs_dir=folder,
        model_name="openai/policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        record_terminal_session=False,
        enable_summarize=False,  # the run bounds the context
        model_info={"max_input_tokens": 1 << 20, "max_output_tokens": 1 << 20},
    )
    await agent.setup(here)
    await agent.run(os.environ["ISSUE"], here, AgentContext())


asyncio.run(main())
