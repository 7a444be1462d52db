"""verifiers' rollouts, as a trainer gets them: the branches of traces, with tokens, masks and log-probs.

A trace with an error is left out, as prime-rl does with it. verifiers is no trainer: what computes advantages, steps
and checkpoints lies behind what this adapter sees. The plugin that verifiers loads is beside this file.
"""

# pyright: reportMissingTypeStubs=false, reportCallIssue=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (verifiers leaves parts of its signatures untyped)

from __future__ import annotations

import asyncio
import os
import sys
from functools import cache
from typing import Any, Final

from agentrl.conformance.adapters.adapter import Adapter, Setup
from agentrl.conformance.observation import Recorder
from agentrl.conformance.scenario import Scenario, task_text

_PLUGIN: Final = "agentrl_conformance_plugin"
_STALLED_S: Final = 20.0  # a rollout's time where the engine stands still
_NO_TRAINER: Final = "verifiers plays episodes; what it hands on is trained elsewhere"
_NO_ADVANTAGES: Final = "verifiers hands rewards on; advantages are the trainer's"


def train(scenario: Scenario, setup: Setup, recorder: Recorder) -> None:
    """Play the group and record what is handed on."""
    os.environ.setdefault("AGENTRL_NO_KEY", "EMPTY")
    _loop().run_until_complete(_play(scenario, setup, recorder))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One loop for all cases of a process: verifiers keeps clients and locks of the first one."""
    return asyncio.new_event_loop()


async def _play(scenario: Scenario, setup: Setup, recorder: Recorder) -> None:
    import verifiers.v1 as vf
    from renderers import Qwen3RendererConfig
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.utils import loaders

    from agentrl.conformance.adapters import verifiers_plugin

    verifiers_plugin.CASE.set((scenario, setup))
    sys.modules[_PLUGIN] = verifiers_plugin  # plugins are loaded by a name without dots
    timeout_config = (
        {"rollout": _STALLED_S} if any(scenario_fault.kind == "stalls" for scenario_fault in scenario.faults) else {}
    )
    agent_config = {"harness": {"id": _PLUGIN}, "runtime": {"type": "subprocess"}, "timeout": timeout_config}
    environment_config = {
        "id": "",
        "taskset": {"id": _PLUGIN},
        "interception": {"type": "server"},
        "agent": agent_config,
    }
    environment = loaders.load_environment(loaders.resolve_env_config(environment_config))
    client_config = TrainClientConfig(
        base_url=f"{setup.url}/v1",
        api_key_var="AGENTRL_NO_KEY",
        renderer=Qwen3RendererConfig(),
        renderer_model_name=str(setup.model),
    )
    model_context = vf.ModelContext(model="tiny", client=client_config, sampling=vf.SamplingConfig())
    (only_task,) = environment.taskset
    assert only_task.data.prompt == task_text(0)
    async with environment.serving():
        episodes = await asyncio.gather(*(environment.run_episode(only_task, model_context) for _ in scenario.members))
    for episode_trace in (episode_trace for played_episode in episodes for episode_trace in played_episode.traces):
        if episode_trace.errors:
            recorder.excluded(f"{episode_trace.errors[-1].type}: {episode_trace.errors[-1].message}"[:300])
            continue
        for trace_branch in episode_trace.branches:
            _record(trace_branch, recorder)


def _record(branch: Any, recorder: Recorder) -> None:
    recorder.row(1, branch.token_ids, branch.sampled_mask, branch.advantages, branch.logprobs)


ADAPTER = Adapter(
    packages=("verifiers", "renderers"),
    train=train,
    unseen={"advantages": _NO_ADVANTAGES},
    not_applicable=dict.fromkeys(("kill-resume", "late-weights", "lost-weights"), _NO_TRAINER),
    not_observed={
        "equal-rewards": _NO_ADVANTAGES,
        "nan-reward": _NO_ADVANTAGES,
        "dropped-answer": "the adapter uses the renderer for Qwen3, which has its template in code",
    },
)
