"""Law 3 over whole runs: from a tool's failure, or another role's move, to what enters the loss."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from each_case import each_case

from agentrl.algos.grpo import GRPO
from agentrl.config import parse
from agentrl.errors import ConfigError
from agentrl.host.ports import free_port
from agentrl.learner.data.batch import group_rows
from agentrl.models.resolve import frozen_model_dir, model_dir
from agentrl.records import GroupState, StopReason
from agentrl.run.evaluation.of_checkpoint import measured
from agentrl.run.run_folder import RunDir
from agentrl.run.trainer import Trainer, evaluate
from agentrl.store import RunStore
from agentrl.store.audit import audit

from .test_run import DEADLINE_S, ENVS, SMALL, started

TRAINING: dict[str, Any] = {**SMALL, "train": {"steps": 2, "checkpoint_every": 2}, "eval": {}}


@pytest.mark.slow
def test_law_3_an_episode_that_its_judge_cannot_score_is_not_scored(tmp_path: Path) -> None:
    """The run file names the judge; nothing of the environment knows it."""
    config = {**TRAINING, "rollout": {**TRAINING["rollout"], "failure_budget": 0.9}}
    Trainer(env=f"{ENVS}:Vowels", config=config, reward=f"{ENVS}:judge", out=tmp_path / "run").train()
    with RunStore.open(RunDir.open(tmp_path / "run").store_path) as store:
        assert audit(store).violations == []
        ended = [one for one in store.reads.trajectories("train") if one.stop_reason not in (None, StopReason.EXPIRED)]
        unscored = [one for one in ended if one.stop_reason is StopReason.ENGINE_FAILED]
        assert {one.outcome for one in unscored} == {None}
        assert {one.outcome for one in ended if one not in unscored} <= {0.2, 0.7, 0.4, 0.9}
        assert len(ended) >= 16 and abs(len(unscored) - len(ended) / 5) <= 2  # the run's end cuts a few off, judged
        assert "the judge gave no verdict" in store.metrics.failures().detail


@pytest.mark.slow
def test_law_3_a_broken_host_leaves_loss_and_baseline_a_missing_file_stays(tmp_path: Path) -> None:
    config = {**TRAINING, "rollout": {**TRAINING["rollout"], "failure_budget": 0.9}}
    Trainer(env=f"{ENVS}:Boxes", config=config, out=tmp_path / "run").train()
    with RunStore.open(RunDir.open(tmp_path / "run").store_path) as store:
        assert audit(store).violations == []
        lost = kept = 0
        for group_id in {
            store.reads.trajectory(id).group_id for step in (1, 2) for id in store.lineage.episodes_of(step)
        }:
            group = store.reads.group(group_id)
            for member in group.trajectories:
                if member.stop_reason is StopReason.SANDBOX_FAILED:
                    assert (member.outcome, member.turns[-1].step) == (None, None)
                    lost += 1
                else:
                    (message,) = member.turns[-1].step.observation  # type: ignore[union-attr]
                    assert message["content"] == "error: 'gone.txt': No such file or directory"
                    assert (member.stop_reason, member.outcome) == (StopReason.DONE, len(member.turns[-1].text) / 100)
                    kept += 1
            rows = group_rows(group, GRPO(), step_of=store.versions.step_of, step_now=1, max_lag=9)
            scored = [member for member in group.trajectories if member.scored]
            assert {row.episode_id for row in rows.rows} <= {member.episode_id for member in scored}
            for row in rows.rows:  # the baseline is that of the scored siblings alone
                others = [m.outcome for m in scored if m.episode_id != row.episode_id]
                own = next(m.outcome for m in scored if m.episode_id == row.episode_id)
                assert row.columns["advantage"][0].item() == pytest.approx(own - sum(others) / len(others), abs=1e-6)  # type: ignore[arg-type,operator]
        assert lost and kept
        assert sum(row.values["episodes_left_out"] for row in store.metrics.values("step")) == lost


@contextmanager
def served() -> Iterator[str]:
    """The address of an engine that somebody else runs."""
    port = free_port()
    os.environ["TEST_ROLE_KEY"] = "their key"
    with started("serve", SMALL["model"], "--port", port, "--api-key-env", "TEST_ROLE_KEY") as process:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + DEADLINE_S
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", headers={"authorization": "Bearer their key"}, timeout=5).is_success:
                    break
            assert process.poll() is None and time.monotonic() < deadline, "the engine does not come up"
            time.sleep(0.05)
        try:
            yield url
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(DEADLINE_S)


@pytest.mark.slow
def test_a_role_may_be_played_by_an_engine_of_ones_own(tmp_path: Path) -> None:
    with served() as url:
        config = {**TRAINING, "rollout": {**TRAINING["rollout"], "roles": {"first": url}, "max_turns": 4}}
        config["rollout"]["roles_api_key_env"] = "TEST_ROLE_KEY"
        Trainer(env=f"{ENVS}:Duel", config=config, out=tmp_path / "run").train()
    with RunStore.open(RunDir.open(tmp_path / "run").store_path) as store:
        assert audit(store).violations == []
        turns = [turn for trajectory in store.reads.trajectories("train") for turn in trajectory.turns]
        assert {(turn.role, turn.learns) for turn in turns} == {("first", False), ("second", True)}
        one = next(each for each in store.reads.trajectories("train") if each.scored)
        assert one.outcome == one.outcomes["second"]


@pytest.mark.long
def test_a_frozen_opponent_plays_and_is_not_trained(tmp_path: Path) -> None:
    config = {**TRAINING, "rollout": {**TRAINING["rollout"], "roles": {"second": "frozen"}, "max_turns": 4}}
    config["eval"] = {"sets": [{"name": "held_out", "n": 4}]}
    summary = Trainer(env=f"{ENVS}:Duel", config=config, out=tmp_path / "run").train()
    assert summary["eval"]["after"]["n"] == 4
    with RunStore.open(RunDir.open(tmp_path / "run").store_path) as store:
        assert audit(store).violations == []
        assert store.groups.counts()[GroupState.TRAINED] == 4
        scored = sum(row.values["tokens_scored"] for row in store.metrics.values("step"))
        turns = [
            turn
            for step in (1, 2)
            for episode_id in store.lineage.episodes_of(step)
            for turn in store.reads.trajectory(episode_id).turns
        ]
        assert {(turn.role, turn.learns) for turn in turns} == {("first", True), ("second", False)}
        assert scored == sum(len(turn.token_ids) for turn in turns if turn.role == "first")
        assert {version for turn in turns if turn.role == "second" for version in turn.versions} == {0}
    trained, adapters = measured(str(tmp_path / "run"), None, 2)
    assert trained.model == str(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert trained.rollout.roles == {"second": "agentrl/tiny-coder"}, "the opponent stays what it was"
    (result,) = evaluate(trained, adapters, out=tmp_path / "eval")
    assert result.n == 2


def test_a_model_with_another_tokenizer_cannot_play_a_role(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_dir(SMALL["model"]), other)
    assert frozen_model_dir(parse({**TRAINING, "env": {"id": "agentrl/NimTable-v0"}}), str(other)) == other
    (other / "tokenizer.json").write_text("{}")
    config = {**TRAINING, "rollout": {**TRAINING["rollout"], "roles": {"second": str(other)}}}
    with pytest.raises(ConfigError, match=r"has another tokenizer.json than 'agentrl/tiny-coder'"):
        Trainer(env="agentrl/NimTable-v0", config=config, out=tmp_path / "run").train()


@each_case(
    ("roles", "said"),
    [
        ({"third": "frozen"}, r"rollout.roles.third = 'frozen': agentrl/NimTable-v0 has the roles first, second"),
        (
            {"second": "random"},
            r"rollout.roles.second = 'random': give 'trained', 'frozen', the URL of an engine, or",
        ),
        ({"first": "frozen", "second": "http://127.0.0.1:1"}, r"no role is left to learn"),
        ({"policy": "frozen"}, r"agentrl/Nim-v0 names no roles: leave it out"),
    ],
)
def test_roles_that_cannot_be_bound_are_refused(tmp_path: Path, roles: dict[str, str], said: str) -> None:
    config = {**TRAINING, "rollout": {**TRAINING["rollout"], "roles": roles}}
    env = "agentrl/Nim-v0" if "policy" in roles else "agentrl/NimTable-v0"
    with pytest.raises(ConfigError, match=said):
        Trainer(env=env, config=config, out=tmp_path / "run").train()
    assert not (tmp_path / "run").exists()


def test_a_roles_table_of_a_role_that_the_environment_lacks_is_refused(tmp_path: Path) -> None:
    config = {**TRAINING, "roles": [{"name": "first"}, {"name": "third"}]}
    with pytest.raises(ConfigError, match=r"roles.1.name = 'third': agentrl/NimTable-v0 has the roles first, second"):
        Trainer(env="agentrl/NimTable-v0", config=config, out=tmp_path / "run").train()
