"""Starts a run on a Ray cluster from a machine that need not belong to it: by the job API of the cluster's dashboard.

The job is the supervisor: `agentrl train` on the head, with the text of the run file. Speaks HTTP alone, so it needs
no Ray here. Never looks at the run afterwards: `agentrl status`, `logs` and `stop` do, by its folder and its store.

The API: docs.ray.io, "Ray Jobs REST API" (POST /api/jobs/, GET /api/jobs/ID and /api/jobs/ID/logs).
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import httpx

from agentrl.errors import UsageError

TOKEN = "RAY_AUTH_TOKEN"
"""Names the variable with the token of a cluster that asks for one; Ray's own tools read it too."""

_CALL_S = 30.0
_POLL_S = 0.5
_LINES = 5  # of the log of a job that failed
_OVER = ("FAILED", "STOPPED", "SUCCEEDED")


def entrypoint(file: Path, out: Path, settings: Sequence[str]) -> str:
    """The shell command that trains in `out` from the text of `file`, which is kept beside it."""
    executable, copied_file = Path(sys.executable).parent / "agentrl", out.with_name(f"{out.name}.toml")
    all_settings = ["cluster.launcher=ray", "cluster.address=auto", *settings]
    command_words = [
        str(executable),
        "train",
        str(copied_file),
        "--out",
        str(out),
        *(option_word for setting in all_settings for option_word in ("--set", setting)),
    ]
    # The run file travels as text inside the command: the machine that submits need not share a disk with the cluster,
    # and Ray's own upload of a working folder would take everything beside the file along.
    quoted_text = shlex.quote(file.read_text(encoding="utf-8"))
    write_file = f"mkdir -p {shlex.quote(str(out.parent))} && printf %s {quoted_text} > {shlex.quote(str(copied_file))}"
    return f"{write_file} && exec {shlex.join(command_words)}"


def submit(
    address: str,
    command: str,
    *,
    deadline_s: float,
    transport: httpx.BaseTransport | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Have the cluster at `address` (http://HEAD:8265) run the command. Returns the job's id once it runs, or still
    waits after `deadline_s`. `transport` takes the place of the network.

    Raises UsageError if there is no such cluster, or with the last lines of a job that failed at once."""
    api_token = os.environ.get(TOKEN)
    headers = {"Authorization": f"Bearer {api_token}"} if api_token else {}
    with httpx.Client(base_url=address, timeout=_CALL_S, transport=transport, headers=headers) as http_client:
        job_id = str(_call(http_client, "POST", "/api/jobs/", {"entrypoint": command})["submission_id"])
        deadline = time.monotonic() + deadline_s
        while True:
            job_state = _call(http_client, "GET", f"/api/jobs/{job_id}")
            if job_state["status"] in _OVER:
                log_lines = (
                    str(_call(http_client, "GET", f"/api/jobs/{job_id}/logs").get("logs", "")).strip().splitlines()
                )
                failure_text = " | ".join(log_lines[-_LINES:]) or str(job_state.get("message"))
                raise UsageError(f"job {job_id} at {address} has ended ({job_state['status']}): {failure_text}")
            if job_state["status"] == "RUNNING" or time.monotonic() > deadline:
                return job_id
            sleep(_POLL_S)


def _call(client: httpx.Client, method: str, path: str, body: Any = None) -> dict[str, Any]:
    address = str(client.base_url).rstrip("/")
    try:
        response = client.request(method, path, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        correction = "give that of the head's dashboard, http://HEAD:8265 (pip install 'ray[default]' on the head)"
        raise UsageError(
            f"--address = {address!r} does not answer ({error or type(error).__name__}): {correction}"
        ) from None
    if response.status_code in (401, 403):
        raise UsageError(f"{address} asks for its token: set {TOKEN} (on the head: ray get-auth-token)")
    content: Any = None
    with suppress(ValueError):
        content = response.json() if response.is_success else None
    if not isinstance(content, dict):
        text_lines = response.text.strip().splitlines() or [""]
        raise UsageError(f"{address}{path} answered {response.status_code}: {text_lines[-1][:200]}")
    return cast("dict[str, Any]", content)
