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
        member_reward = self._setup.grade(action[:40])
        return (), 0.0, True, False, {"outcome": member_reward, "success": member_reward > 0}


class ScriptedProgram(ProgramEnv):
    """The task as an agent program, whose client gives a request up and sends it again."""

    def __init__(self, scenario: Scenario, setup: Setup) -> None:
        async def program(session: Session) -> float:
            messages: list[dict[str, Any]] = [{"role": "user", "content": task_text(0)}]
            while True:
                messages.append(await _answer(session, messages, scenario.client_patience_s))
                answer_text = str(messages[-1]["content"])
                if scenario.is_last(answer_text):
                    return await trio.to_thread.run_sync(setup.grade, answer_text[:40])
                messages.append({"role": "user", "content": scenario.tool_text})

        super().__init__(program)


async def _answer(session: Session, messages: list[dict[str, Any]], patience_s: float | None) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=patience_s or _WAIT_S, trust_env=False) as http_client:
        for _ in range(_MOST_TRIES):
            with suppress(httpx.TimeoutException):
                http_response = await http_client.post(
                    f"{session.base_url}/v1/chat/completions", json={"messages": messages}
                )
                return http_response.raise_for_status().json()["choices"][0]["message"]
    raise TimeoutError(f"no answer after {_MOST_TRIES} tries")


@dataclass(slots=True)
class _Pass:
    """The hook of the learner's passes: scored tokens and their columns, by episode and turn."""

    turns: dict[tuple[int, int], dict[str, list[float]]]

    def __call__(self, pack: Any, tokens: Mapping[str, torch.Tensor], outputs: Any) -> None:
        pass_columns = {
            column_name: tokens[column_name].tolist() for column_name in ("episode", "turn", "advantage", "behaviour")
        }
        pass_columns["token"] = pack.target_K.tolist()
        for token_index, turn_key in enumerate(zip(pass_columns["episode"], pass_columns["turn"], strict=True)):
            turn_columns = self.turns.setdefault(turn_key, {"token": [], "advantage": [], "behaviour": []})
            for column_name in turn_columns:
                turn_columns[column_name].append(pass_columns[column_name][token_index])


def train(scenario: Scenario, setup: Setup, recorder: Recorder) -> None:
    """Play the groups and train one in each step."""
    group_size = len(scenario.members)
    learner = _learner(setup)
    passes = _Pass({})
    learner.worker.on_pass = passes
    rollout_settings = {
        "max_turns": max(member.turns for member in scenario.members) + 1,
        "max_tokens_per_turn": 256,
        "max_running": group_size,
        "failure_budget": 0.9,
        "group_deadline_s": _STALLED_S if any(fault.kind == "stalls" for fault in scenario.faults) else 300.0,
    }
    engine_settings = {"kind": "vllm", "dtype": "float32", "canary": scenario.delivery != "none"}
    with Buffer(setup.folder / "buffer", groups_per_step=1, max_lag=scenario.max_lag) as buffer:
        if (saved_checkpoint := buffer.resume()) is not None:
            learner.load(saved_checkpoint)
            recorder.resumed(learner.step_index)
        _mint(buffer, setup, learner.step_index)  # before the fleet asks its engine for the version
        group_tasks = [Task(index=group_index, env="", seed=group_index) for group_index in range(scenario.groups)]
        make_environment = partial(
            ScriptedTask if scenario.client_patience_s is None else ScriptedProgram, scenario, setup
        )
        make_environment.__module__, make_environment.__qualname__ = __name__, "ScriptedTask"  # pyright: ignore[reportAttributeAccessIssue]
        with (
            EngineFleet.attach(setup.url, str(setup.model), settings=engine_settings) as fleet,
            rollout(
                make_environment, fleet, group_tasks, group_size=group_size, settings=rollout_settings, buffer=buffer
            ),
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
    for boundary, notice_text, _, _ in notices.OF_PROCESS.take_new(last=True):
        recorder.notice(f"{boundary}: {notice_text}")


def _learner(setup: Setup) -> Learner:
    """A learner of the tiny model with the run file's defaults, and a folder for its checkpoints."""
    learner = build_learner(
        LearnerSettings(model=str(setup.model), train=Train(lr=1e-3)), setup.model, folder_of=model_dir
    )
    (setup.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    return learner


def _mint(buffer: Buffer, setup: Setup, step: int) -> None:
    """Weights of `step` as a new version, which the engine stamps its tokens with from now on."""
    minted_version = buffer.mint(step)
    setup.post("/update_weight_version", {"new_version": str(minted_version.version)})
    buffer.confirm(minted_version)


def _ignore(version: int, step: int) -> None:
    """Lags come from the buffer's store: nobody here needs the versions of a learner."""


def _weights(learner: Learner, setup: Setup) -> Weights:
    """The weights of now in a file, with what proves on an engine that it has them."""
    weights_file = learner.export(setup.folder / f"weights-{learner.step_index}.safetensors", dtype=torch.float32)
    delivery_proof = proof_of(
        learner, weights_file.fingerprints, version=0, dtype="float32", train=learner.settings.train
    )
    learner_step = learner.step_index
    return Weights(
        step=learner_step, path=weights_file.path, sha256=weights_file.sha256, proof=delivery_proof, published=_ignore
    )


def _step(learner: Learner, batch: Batch, passes: _Pass, recorder: Recorder) -> None:
    """Train a batch, and report the rows that entered the loss and the episodes that did not."""
    passes.turns.clear()
    step_report = learner.step(batch.groups, step_of=batch.step_of, undone=batch.undone, max_lag=batch.max_lag)
    for trajectory in batch.trajectories:
        if not trajectory.scored:
            recorder.excluded(f"{_name(trajectory)}: {trajectory.stop_reason}")
    trained_columns = defaultdict[int, dict[int, dict[str, list[float]]]](dict)
    for (episode_id, turn_index), turn_columns in passes.turns.items():
        trained_columns[episode_id][turn_index] = turn_columns
    trajectories_by_id = {trajectory.episode_id: trajectory for trajectory in batch.trajectories}
    for episode_id, trained_turns in trained_columns.items():
        _record_rows(trajectories_by_id[episode_id].turns, trained_turns, learner.step_index, recorder)
    is_finite = all(bool(tensor.isfinite().all()) for tensor in learner.models.tensors().values())
    recorder.step(step_report.step, finite=is_finite)


def _name(trajectory: Trajectory) -> str:
    name_match = next(
        (turn_match for played_turn in trajectory.turns if (turn_match := NAME.search(played_turn.text))), None
    )
    return f"episode {trajectory.episode_id}" if name_match is None else f"g{name_match[1]}m{name_match[2]}"


def _record_rows(
    turns: Sequence[Turn], trained: Mapping[int, Mapping[str, list[float]]], step: int, recorder: Recorder
) -> None:
    """One row for each chain of turns; a turn that is not in the loss is context."""
    parent_indices = {chain_turn.parent for chain_turn in turns}
    for leaf_turn in (chain_turn for chain_turn in turns if chain_turn.index not in parent_indices):
        turn_chain = [leaf_turn]
        while turn_chain[0].parent is not None:
            turn_chain.insert(0, turns[turn_chain[0].parent])
        row_tokens: list[int] = []
        scored_tokens: list[bool] = []
        advantages: list[float] = []
        logprobs: list[float] = []
        for chain_turn in turn_chain:
            turn_columns = trained.get(chain_turn.index)
            context_tokens = [*chain_turn.prompt_ids, *(() if turn_columns else chain_turn.token_ids)]
            row_tokens += [*context_tokens, *([] if turn_columns is None else map(int, turn_columns["token"]))]
            for row_column, column_name in ((advantages, "advantage"), (logprobs, "behaviour")):
                row_column += [0.0] * len(context_tokens) + ([] if turn_columns is None else turn_columns[column_name])
            scored_tokens += [False] * len(context_tokens) + [True] * (
                len(row_tokens) - len(scored_tokens) - len(context_tokens)
            )
        recorder.row(step, row_tokens, scored_tokens, advantages, logprobs)


ADAPTER = Adapter(packages=("agentrl-kit", "torch"), train=train)
