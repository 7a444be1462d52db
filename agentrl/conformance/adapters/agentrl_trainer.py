"""agentrl's own trainer: the blocks of a loop, over the scripted engine.

Rows are what the passes of the learner got, by its hook for them; the context around a row's scored tokens is the
journal's.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import httpx
import torch
import trio

from agentrl import notices
from agentrl.blocks import Batch, Buffer
from agentrl.blocks.publishing import Weights
from agentrl.blocks.sync import EngineFleet, publish, rollout
from agentrl.config import Train
from agentrl.config.roles import LearnerSettings
from agentrl.conformance.adapters.adapter import Adapter, Setup
from agentrl.conformance.observation import Recorder
from agentrl.conformance.scenario import NAME, Scenario, task_text
from agentrl.env import Env
from agentrl.env.agent_programs import ProgramEnv, Session
from agentrl.env.core import ResetResult, StepResult
from agentrl.learner.build_learner import build_learner
from agentrl.learner.learner import Learner
from agentrl.learner.weight_proof import proof_of
from agentrl.models.resolve import model_dir
from agentrl.records import Message, Task, Trajectory, Turn

_WAIT_S: Final = 30.0
_MOST_TRIES: Final = 20
_STALLED_S: Final = 6.0  # a group waits so long for a member in whose turn the engine stands still


class ScriptedTask(Env):
    """The task as an environment: it answers with the tool's text, and asks the grader at the end."""

    replayable = True

    def __init__(self, scenario: Scenario, setup: Setup) -> None:
        self._scenario, self._setup = scenario, setup

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        return (Message(role="user", content=task_text(seed or 0)),), {}

    def step(self, action: str) -> StepResult:
        if not self._scenario.is_last(action):
            return (Message(role="tool", content=self._scenario.tool_text),), 0.0, False, False, {}
        reward = self._setup.grade(action[:40])
        return (), 0.0, True, False, {"outcome": reward, "success": reward > 0}


class ScriptedProgram(ProgramEnv):
    """The task as an agent program, whose client gives a request up and sends it again."""

    def __init__(self, scenario: Scenario, setup: Setup) -> None:
        async def program(session: Session) -> float:
            messages: list[dict[str, Any]] = [{"role": "user", "content": task_text(0)}]
            while True:
                messages.append(await _answer(session, messages, scenario.client_patience_s))
                text = str(messages[-1]["content"])
                if scenario.is_last(text):
                    return await trio.to_thread.run_sync(setup.grade, text[:40])
                messages.append({"role": "user", "content": scenario.tool_text})

        super().__init__(program)


async def _answer(session: Session, messages: list[dict[str, Any]], patience_s: float | None) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=patience_s or _WAIT_S, trust_env=False) as client:
        for _ in range(_MOST_TRIES):
            with suppress(httpx.TimeoutException):
                answer = await client.post(f"{session.base_url}/v1/chat/completions", json={"messages": messages})
                return answer.raise_for_status().json()["choices"][0]["message"]
    raise TimeoutError(f"no answer after {_MOST_TRIES} tries")


@dataclass(slots=True)
class _Pass:
    """The hook of the learner's passes: scored tokens and their columns, by episode and turn."""

    turns: dict[tuple[int, int], dict[str, list[float]]]

    def __call__(self, pack: Any, tokens: Mapping[str, torch.Tensor], outputs: Any) -> None:
        columns = {name: tokens[name].tolist() for name in ("episode", "turn", "advantage", "behaviour")}
        columns["token"] = pack.target_K.tolist()
        for place, key in enumerate(zip(columns["episode"], columns["turn"], strict=True)):
            values = self.turns.setdefault(key, {"token": [], "advantage": [], "behaviour": []})
            for name in values:
                values[name].append(columns[name][place])


def train(scenario: Scenario, setup: Setup, recorder: Recorder) -> None:
    """Play the groups and train one in each step."""
    members = len(scenario.members)
    learner = _learner(setup)
    passes = _Pass({})
    learner.worker.on_pass = passes
    settings = {
        "max_turns": max(member.turns for member in scenario.members) + 1,
        "max_tokens_per_turn": 256,
        "max_running": members,
        "failure_budget": 0.9,
        "group_deadline_s": _STALLED_S if any(fault.kind == "stalls" for fault in scenario.faults) else 300.0,
    }
    engine = {"kind": "vllm", "dtype": "float32", "canary": scenario.delivery != "none"}
    with Buffer(setup.folder / "buffer", groups_per_step=1, max_lag=scenario.max_lag) as buffer:
        if (saved := buffer.resume()) is not None:
            learner.load(saved)
            recorder.resumed(learner.step_index)
        _mint(buffer, setup, learner.step_index)  # before the fleet asks its engine for the version
        tasks = [Task(index=group, env="", seed=group) for group in range(scenario.groups)]
        make = partial(ScriptedTask if scenario.client_patience_s is None else ScriptedProgram, scenario, setup)
        make.__module__, make.__qualname__ = __name__, "ScriptedTask"  # pyright: ignore[reportAttributeAccessIssue]
        with (
            EngineFleet.attach(setup.url, str(setup.model), settings=engine) as fleet,
            rollout(make, fleet, tasks, group_size=members, settings=settings, buffer=buffer),
        ):
            while learner.step_index < scenario.groups:
                batch = buffer.take(timeout_s=_WAIT_S)
                _step(learner, batch, passes, recorder)
                if scenario.delivery == "none":
                    _mint(buffer, setup, learner.step_index)
                else:
                    publish(_weights(learner, setup), fleet, buffer)
                if scenario.checkpoint_every and learner.step_index % scenario.checkpoint_every == 0:
                    buffer.checkpoint(learner.step_index, learner.save(setup.folder / "checkpoints"))
    for boundary, case, _, _ in notices.OF_PROCESS.take_new(last=True):
        recorder.notice(f"{boundary}: {case}")


def _learner(setup: Setup) -> Learner:
    learner = build_learner(
        LearnerSettings(model=str(setup.model), train=Train(lr=1e-3)), setup.model, folder_of=model_dir
    )
    (setup.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    return learner


def _mint(buffer: Buffer, setup: Setup, step: int) -> None:
    """Weights of `step` as a new version, which the engine stamps its tokens with from now on."""
    version = buffer.mint(step)
    setup.post("/update_weight_version", {"new_version": str(version.version)})
    buffer.confirm(version)


def _ignore(version: int, step: int) -> None:
    """Lags come from the buffer's store: nobody here needs the versions of a learner."""


def _weights(learner: Learner, setup: Setup) -> Weights:
    """The weights of now in a file, with what proves on an engine that it has them."""
    file = learner.export(setup.folder / f"weights-{learner.step_index}.safetensors", dtype=torch.float32)
    proof = proof_of(learner, file.fingerprints, version=0, dtype="float32", train=learner.settings.train)
    step = learner.step_index
    return Weights(step=step, path=file.path, sha256=file.sha256, proof=proof, published=_ignore)


def _step(learner: Learner, batch: Batch, passes: _Pass, recorder: Recorder) -> None:
    passes.turns.clear()
    report = learner.step(batch.groups, step_of=batch.step_of, undone=batch.undone, max_lag=batch.max_lag)
    for trajectory in batch.trajectories:
        if not trajectory.scored:
            recorder.excluded(f"{_name(trajectory)}: {trajectory.stop_reason}")
    trained = defaultdict[int, dict[int, dict[str, list[float]]]](dict)
    for (episode, turn), values in passes.turns.items():
        trained[episode][turn] = values
    by_id = {trajectory.episode_id: trajectory for trajectory in batch.trajectories}
    for episode, turns in trained.items():
        _record_rows(by_id[episode].turns, turns, learner.step_index, recorder)
    finite = all(bool(tensor.isfinite().all()) for tensor in learner.models.tensors().values())
    recorder.step(report.step, finite=finite)


def _name(trajectory: Trajectory) -> str:
    name = next((match for turn in trajectory.turns if (match := NAME.search(turn.text))), None)
    return f"episode {trajectory.episode_id}" if name is None else f"g{name[1]}m{name[2]}"


def _record_rows(
    turns: Sequence[Turn], trained: Mapping[int, Mapping[str, list[float]]], step: int, recorder: Recorder
) -> None:
    """One row for each chain of turns; a turn that is not in the loss is context."""
    parents = {turn.parent for turn in turns}
    for leaf in (turn for turn in turns if turn.index not in parents):
        chain = [leaf]
        while chain[0].parent is not None:
            chain.insert(0, turns[chain[0].parent])
        tokens: list[int] = []
        scored: list[bool] = []
        advantages: list[float] = []
        logprobs: list[float] = []
        for turn in chain:
            values = trained.get(turn.index)
            context = [*turn.prompt_ids, *(() if values else turn.token_ids)]
            tokens += [*context, *([] if values is None else map(int, values["token"]))]
            for line, of_turn in ((advantages, "advantage"), (logprobs, "behaviour")):
                line += [0.0] * len(context) + ([] if values is None else values[of_turn])
            scored += [False] * len(context) + [True] * (len(tokens) - len(scored) - len(context))
        recorder.row(step, tokens, scored, advantages, logprobs)


ADAPTER = Adapter(packages=("agentrl-kit", "torch"), train=train)
