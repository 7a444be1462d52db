"""Has the installed vLLM check `[engine.vllm]` before anything starts: its server's own parser, and its configuration
of the run's model, in a child of its interpreter. See `plugin.arguments`, which is that child."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from agentrl.config.vllm_arguments import RESERVED, words
from agentrl.engine.vllm.launch import VLLMServer
from agentrl.errors import ConfigError, UsageError

_MODULE = "agentrl.engine.vllm.plugin.argument_parser"
_DEADLINE_S = 300.0  # importing vLLM takes ten seconds, from a slow disk a minute


def check(server: VLLMServer) -> None:
    """Raises ConfigError for the first of the server's `arguments` that its vLLM does not know or take, and what vLLM
    says of it; UsageError if vLLM cannot be asked."""
    python = server.build.python
    server.prepare()
    given = {name: words({name: value}) for name, value in server.arguments.items()}
    asked = {"base": server.argv(bare=True)[2:], "given": given, "reserved": RESERVED}
    try:
        done = subprocess.run(
            [python, "-m", _MODULE],
            input=json.dumps(asked),
            env={**os.environ, **server.env()},
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"cannot ask the vLLM of {python} about [engine.vllm]: {error}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UsageError(f"cannot ask the vLLM of {python} about [engine.vllm]: {last[:300]}")
    if problem := json.loads(done.stdout.strip().splitlines()[-1]):
        raise _refused(server, problem)


def _refused(server: VLLMServer, problem: dict[str, Any]) -> ConfigError:
    key, says = problem["key"], problem["says"]
    if key is None:
        return ConfigError("engine.vllm", dict(server.arguments), f"vLLM {server.build.version} says: {says}")
    if says is None:
        near = "".join(f"did you mean {name!r}? " for name in problem["near"])
        hint = f"vLLM {server.build.version} has no such argument; {near}`{_help(server, 'all')}` lists them"
    elif says in RESERVED.values():
        hint = says
    else:
        hint = f"vLLM {server.build.version} says: {says} (see `{_help(server, key)}`)"
    return ConfigError(f"engine.vllm.{key}", server.arguments[key], hint)


def _help(server: VLLMServer, word: str) -> str:
    return f"{server.build.python} -m vllm.entrypoints.openai.api_server --help={word}"
