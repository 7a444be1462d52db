"""Frees engines of somebody else that a run left paused: `python -m agentrl.run.children.attached_engines RUN LABEL`.

A pusher pauses an engine while it sends weights, and may die before it resumes it, perhaps with half of them loaded. An
engine of ours dies with its run. One that the run attached to must not stay paused for its other users, nor sample from
half-loaded weights: it gets those of the run's newest checkpoint, whole, and goes on. The janitor of a supervisor calls
this once all processes of the run are gone, however they ended. What it did is in `logs/attached.log`.

An engine that gets its weights from memory to memory is left paused: only a learner can send them. The next start of
the run does it.
"""

from __future__ import annotations

import sys
from contextlib import aclosing
from datetime import datetime
from pathlib import Path

import trio

from agentrl.config import RunConfig
from agentrl.engine.client import EngineClient
from agentrl.errors import AgentRLError
from agentrl.learner.checkpoints.folders import newest, step_of
from agentrl.models.resolve import model_dir
from agentrl.records import WeightVersion
from agentrl.run.children.engine_process import ServedWeights, attach, halts
from agentrl.run.run_folder import RunDir
from agentrl.run.weights.role_policies import objects_of
from agentrl.store import RunStore

_ASK_S = 5.0  # for an engine to say whether it is paused
_PUSH_S = 10.0  # for it to take the weights: a janitor has no more patience


async def free(run: RunDir) -> list[str]:
    """Give each attached engine that is paused whole weights, and resume it. Returns one line on each such engine.

    Call it only while no process of the run lives."""
    run_config = run.config()
    if not halts(run_config):
        return []
    return [
        report_line
        for engine_url in run_config.engine.urls
        if (report_line := await _free_one(engine_url, run, run_config)) is not None
    ]


async def _free_one(url: str, run: RunDir, config: RunConfig) -> str | None:
    try:
        async with aclosing(EngineClient(url, api_key=config.engine.key_of(url), kind=config.engine.kind)) as client:
            # An engine that is not paused is left alone, whatever its weights: its owner may have other users by now,
            # and those weights are whole.
            if not await client.paused(deadline_s=_ASK_S):
                return None
        weights = _weights(run, config)
        deadline_s = min(config.engine.admin_deadline_s, _PUSH_S)
        # Short deadlines throughout: the janitor that calls this also removes scratch and ends stray processes, and a
        # server that is gone must not keep it from that.
        short_settings = config.engine.model_copy(update={"liveness_deadline_s": 2 * deadline_s})
        await attach(url, weights, config.model_copy(update={"engine": short_settings}), fresh=False)
    except AgentRLError as error:
        return f"{url} may still be paused ({error}): go on with agentrl train --resume {run.path}, or restart it"
    return f"{url} was left paused: it has the weights of step {weights.current.step} now and goes on"


def _weights(run: RunDir, config: RunConfig) -> ServedWeights:
    """Return the weights of the newest checkpoint, or the ones that the run began with. The store is only read."""
    checkpoint = newest(run.checkpoints)
    saved_step = 0 if checkpoint is None else step_of(checkpoint)
    with RunStore.open(run.store_path) as run_store:
        saved_version = run_store.versions.version_at(saved_step) or WeightVersion(version=0, step=0)
        object_folder = objects_of(config.engine, config.name, run_store.meta, None)
    return ServedWeights(
        model=checkpoint or model_dir(config.model), base=saved_version, current=saved_version, store=object_folder
    )


def main() -> None:
    run_folder = RunDir.open(Path(sys.argv[1]))
    report_lines = trio.run(free, run_folder)
    if report_lines:
        with (run_folder.logs / "attached.log").open("a") as log_file:
            log_file.writelines(
                f"{datetime.now().isoformat(timespec='seconds')} {report_line}\n" for report_line in report_lines
            )


if __name__ == "__main__":
    main()
