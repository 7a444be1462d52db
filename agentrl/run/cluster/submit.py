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
    agentrl, copy = Path(sys.executable).parent / "agentrl", out.with_name(f"{out.name}.toml")
    all_settings = ["cluster.launcher=ray", "cluster.address=auto", *settings]
    words = [
        str(agentrl),
        "train",
        str(copy),
        "--out",
        str(out),
        *(word for setting in all_settings for word in ("--set", setting)),
    ]
    # The run file travels as text inside the command: the machine that submits need not share a disk with the cluster,
    # and Ray's own upload of a working folder would take everything beside the file along.
    text = shlex.quote(file.read_text(encoding="utf-8"))
    write_file = f"mkdir -p {shlex.quote(str(out.parent))} && printf %s {text} > {shlex.quote(str(copy))}"
    return f"{write_file} && exec {shlex.join(words)}"


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
    token = os.environ.get(TOKEN)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(base_url=address, timeout=_CALL_S, transport=transport, headers=headers) as client:
        job = str(_call(client, "POST", "/api/jobs/", {"entrypoint": command})["submission_id"])
        deadline = time.monotonic() + deadline_s
        while True:
            state = _call(client, "GET", f"/api/jobs/{job}")
            if state["status"] in _OVER:
                log_lines = str(_call(client, "GET", f"/api/jobs/{job}/logs").get("logs", "")).strip().splitlines()
                why = " | ".join(log_lines[-_LINES:]) or str(state.get("message"))
                raise UsageError(f"job {job} at {address} has ended ({state['status']}): {why}")
            if state["status"] == "RUNNING" or time.monotonic() > deadline:
                return job
            sleep(_POLL_S)


def _call(client: httpx.Client, method: str, path: str, body: Any = None) -> dict[str, Any]:
    address = str(client.base_url).rstrip("/")
    try:
        answer = client.request(method, path, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        hint = "give that of the head's dashboard, http://HEAD:8265 (pip install 'ray[default]' on the head)"
        raise UsageError(f"--address = {address!r} does not answer ({error or type(error).__name__}): {hint}") from None
    if answer.status_code in (401, 403):
        raise UsageError(f"{address} asks for its token: set {TOKEN} (on the head: ray get-auth-token)")
    content: Any = None
    with suppress(ValueError):
        content = answer.json() if answer.is_success else None
    if not isinstance(content, dict):
        lines = answer.text.strip().splitlines() or [""]
        raise UsageError(f"{address}{path} answered {answer.status_code}: {lines[-1][:200]}")
    return cast("dict[str, Any]", content)
