"""A step of a run is trained again from the store alone, and gives the same bits. A real learner, no engine."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.config import RunConfig, parse
from agentrl.errors import ConfigError, ModelError, UsageError
from agentrl.learner.checkpoints.folders import complete, step_of
from agentrl.offline.retrain_step import retrain
from agentrl.records import Step, StopReason, Turn, VersionSpan, WeightVersion
from agentrl.run.learning.checkpoint_writer import CheckpointWriter
from agentrl.run.learning.weight_push import WeightPush
from agentrl.run.processes import learner_process
from agentrl.run.run_folder import RunDir
from agentrl.store import Claim, Ending, Quorum, RunStore
from agentrl.store.codec import pack_tokens
from tests.learner.making import VOCAB, tiny_qwen3
from tests.store.play import START, task

SIZE, PER_STEP = 3, 2


BY_THE_CLOCK = {"seconds", "use"}
"""Metrics that depend on the machine's time and memory."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("retrain") / "model")


class Played(WeightPush):
    """Pushes to engines that take each version at once. Their episodes are played between the learner's steps: of each
    group two members at once, the third after its group was taken."""

    run: RunDir
    store: RunStore

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self._rng, self._slow, self._config = random.Random(7), list[Claim](), self.run.config()
        algo = self._config.algo
        self._taught = getattr(algo, "distil_weight", 0.0) > 0 and not algo.slots.frozen

    async def is_behind(self, version: int) -> bool:
        return True

    async def start(self, row: dict[str, Any]) -> WeightVersion:
        version = self.store.versions.mint_version(self._parcels.step)
        self.store.versions.confirm_version(version)
        if row:
            self._telemetry.record("step", version.step, {**row, "version": version.version})
        self._play(version)
        return version

    def _play(self, version: WeightVersion) -> None:
        store, rng = self.store, self._rng
        for claim in self._slow:
            self._end(claim, version)
        envs = self._config.environments
        tasks = [replace(task(rng.randrange(100)), env=envs[at % len(envs)]) for at in range(PER_STEP)]
        store.groups.add_groups(tasks, size=SIZE, purpose="train")
        claims = store.leases.claim("w", 99, lease_s=1e6)
        self._slow = claims[SIZE - 1 :: SIZE]
        for claim in claims:
            store.journal.begin(claim.episode_id, claim.fence, START)
            self._act(claim, 0, version)
            if claim not in self._slow:
                self._end(claim, version)
        store.buffer.expire(1e12, 1e13, close_policy=Quorum(SIZE - 1, 0.0))

    def _end(self, claim: Claim, version: WeightVersion) -> None:
        """One more turn, under these weights."""
        self._act(claim, 1, version)
        failed = self._rng.random() < 0.1
        self.store.journal.finish(
            claim.episode_id,
            claim.fence,
            Ending(
                stop_reason=StopReason.ENGINE_FAILED if failed and claim in self._slow else StopReason.DONE,
                outcome=self._rng.choice([0.0, 1.0, 0.5]),
                success=True,
            ),
        )

    def _act(self, claim: Claim, index: int, version: WeightVersion) -> None:
        rng, n = self._rng, self._rng.randint(2, 5)
        turn = Turn(
            index=index,
            parent=index - 1 if index else None,
            prompt_ids=(7, 8, 9, claim.group_id % VOCAB) if index == 0 else (3, 4),
            token_ids=tuple(rng.randrange(VOCAB) for _ in range(n)),
            logprobs=tuple(-rng.uniform(0.5, 4.0) for _ in range(n)),
            spans=(VersionSpan(max(1, version.version - 1), 0, 1), VersionSpan(version.version, 1, n)),
            finish="stop",
            text="",
            columns={"teacher": [-rng.uniform(0.5, 4.0) for _ in range(n)]} if self._taught else {},
        )
        self.store.journal.journal_turn(claim.episode_id, claim.fence, turn)
        step = Step(observation=(), reward=rng.choice([0.0, 0.25]), terminated=index == 1)
        self.store.journal.journal_step(claim.episode_id, claim.fence, index, step)


def run_of(folder: Path, model: Path, steps: int = 4, **sections: Any) -> RunDir:
    """A run of `steps` steps, trained here and now."""
    run = RunDir.create(folder, config_of(model, steps, **sections))
    train(run)
    return run


def train(run: RunDir, pushes: type[Played] = Played, checkpoints: type[CheckpointWriter] = CheckpointWriter) -> None:
    with RunStore.open(run.store_path) as store, pytest.MonkeyPatch.context() as patch:
        store.set_meta("engine_urls", '["http://engine"]')  # it is there, and nobody asks it
        patch.setattr(learner_process, "WeightPush", type("Pushes", (pushes,), {"run": run, "store": store}))
        patch.setattr(learner_process, "CheckpointWriter", checkpoints)
        learner_process.train(run, store)


def config_of(model: Path, steps: int, **sections: Any) -> RunConfig:
    document: dict[str, Any] = {
        "model": str(model),
        "seed": 3,
        "env": {"id": "test/Env-v0"},
        "rollout": {"group_size": SIZE, "max_context": 64, "max_tokens_per_turn": 8, "group_deadline_s": 0.01},
        "buffer": {
            "groups_per_step": PER_STEP,
            "max_lag": 2,
            "close": 2,
            "skip_without_signal": False,  # no others would take their place
        },
        "train": {"steps": steps, "checkpoint_every": 2, "lr": 1e-2, "tokens_per_batch": 64},
        "engine": {"canary": False},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values} if isinstance(values, dict) else values
    return parse(document)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory, model: Path) -> RunDir:
    """A run that no test changes: four steps, checkpoints of steps 2 and 4."""
    return run_of(tmp_path_factory.mktemp("run") / "plain", model)


KINDS = [
    pytest.param({}, {}, id="grpo"),
    pytest.param({"kl_weight": 0.1}, {"minibatches": 2, "epochs": 2}, id="grpo-reference-updates"),
    pytest.param({"kind": "ppo", "critic_warmup_steps": 1}, {"minibatches": 2}, id="ppo-own"),
    pytest.param({"kind": "ppo", "critic": "shared", "critic_warmup_steps": 0}, {"epochs": 2}, id="ppo-shared"),
    pytest.param({}, {"lora_rank": 4, "lr": 1e-1}, id="adapter"),
    pytest.param({"kl_weight": 0.2, "reference": 0.5}, {}, id="moving-reference"),
    pytest.param({"kind": "distil", "teacher": "TEACHER"}, {}, id="teacher-in-the-learner"),
    pytest.param({"distil_weight": 0.5, "distil_level": "episode"}, {"minibatches": 2}, id="journaled-teacher"),
]
PPO = {"kind": "ppo", "critic_warmup_steps": 0}
SEVERAL = [
    pytest.param(PPO | {"kl_weight": 0.1}, id="critic-and-reference"),
    pytest.param({"distil_weight": 0.5, "teacher": "TEACHER"}, id="teacher"),
    pytest.param({"kl_weight": 0.2, "reference": 2}, id="moving-reference"),
]


@pytest.mark.parametrize(("algo", "of_train"), KINDS)
def test_every_step_is_trained_again_bit_for_bit(
    tmp_path: Path, model: Path, algo: dict[str, Any], of_train: dict[str, Any]
) -> None:
    if "teacher" in algo:
        algo = {**algo, "teacher": str(tiny_qwen3(tmp_path / "teacher", seed=5))}
    run = run_of(tmp_path / "run", model, algo=algo, train=of_train | {"steps": 4, "checkpoint_every": 2})
    every_step_is_equal(run)
    taught = [row["algorithm"]["untaught"] for row in metrics(run) if "distil_weight" in algo or "teacher" in algo]
    assert taught == [0.0] * len(taught)


@pytest.mark.medium
@pytest.mark.parametrize("algo", SEVERAL)
def test_every_step_of_several_algorithms_is_trained_again_bit_for_bit(
    tmp_path: Path, model: Path, algo: dict[str, Any]
) -> None:
    if "teacher" in algo:
        algo = {**algo, "teacher": str(tiny_qwen3(tmp_path / "teacher", seed=5))}
    run = run_of(tmp_path / "run", model, tasks=[{"id": "test/Env-v0"}, {"id": "test/Two-v0", "algo": algo}])
    every_step_is_equal(run)
    assert all(row["environments"].keys() == {"test/Env-v0", "test/Two-v0"} for row in metrics(run))


def every_step_is_equal(run: RunDir) -> None:
    for step in range(1, 5):
        again = retrain(run, step)
        assert again.equal and again.notes == ()
        assert again.compared == ((1, 2)[:step] if step < 3 else (3, 4)[: step - 2])
        assert again.recorded is not None
        assert {name: value for name, value in again.metrics.items() if name not in BY_THE_CLOCK} == {
            name: again.recorded[name] for name in again.metrics if name not in BY_THE_CLOCK
        }
    assert sum(row["episodes_late"] for row in metrics(run)) > 0
    assert all(row["updated"] for row in metrics(run))


def metrics(run: RunDir) -> list[dict[str, Any]]:
    with RunStore.read(run.store_path) as store:
        return [row.values for row in store.metrics.values("step")]


def test_every_step_that_skipped_groups_is_trained_again_bit_for_bit(tmp_path: Path, model: Path) -> None:
    """Two groups are played a step: one to skip, if it has no signal, and one to train."""
    buffer = {"groups_per_step": 1, "skip_without_signal": "auto"}
    run = run_of(tmp_path / "run", model, algo={"process_weight": 0.0}, buffer=buffer)
    every_step_is_equal(run)
    assert sum(row["groups_skipped"] for row in metrics(run)) > 0


def test_shares_of_a_prioritised_order_are_replayed(tmp_path: Path, model: Path) -> None:
    run = run_of(tmp_path / "run", model, steps=2, buffer={"order": "prioritised", "groups_per_step": 1})
    assert any(row["group_weights"] for row in metrics(run))
    assert retrain(run, 2).equal


@pytest.mark.medium
def test_one_wrong_number_in_the_journal_shows_with_its_tensors(
    tmp_path: Path, plain: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(plain, tmp_path)
    with RunStore.read(run.store_path) as store:
        episode = store.lineage.episodes_of(3)[0]
        turn = store.reads.trajectory(episode).turns[0]
    wrong = replace(turn, logprobs=(turn.logprobs[0] + 0.25, *turn.logprobs[1:]))
    with sqlite3.connect(run.store_path) as connection:
        connection.execute(
            "UPDATE tokens SET data = ? WHERE turn_id = (SELECT id FROM turns WHERE episode_id = ? AND idx = 0)",
            (pack_tokens(wrong), episode),
        )
    said, code = typed("retrain", run.path, "--step", 4)
    assert code == 1
    assert "the weights DIFFER since step 3 from the run's, in 24 of 24 tensors: policy.model.embed" in said
    said, code = typed("retrain", run.path, "--step", 2)  # a step that never saw it
    assert code == 0 and "the weights of all 24 tensors are bit-equal to those of the run" in said


def copied(run: RunDir, folder: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(run.path, folder / "copy")))


def typed(*words: object) -> tuple[str, int]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output, result.exit_code


def test_nothing_of_the_run_is_written(plain: RunDir) -> None:
    """SQLite keeps a reader's own notes beside the file."""

    def files() -> dict[Path, bytes]:
        notes = {".sqlite-shm", ".sqlite-wal"}
        found = [path for path in plain.path.rglob("*") if path.is_file() and path.suffix not in notes]
        return {path: path.read_bytes() for path in found}

    before = files()
    assert retrain(plain, 3).equal
    assert files() == before


def test_the_weights_of_a_step_are_written_as_a_model(plain: RunDir, tmp_path: Path) -> None:
    again = retrain(plain, 3, out=tmp_path / "three")
    assert again.out is not None
    retrained = AutoModelForCausalLM.from_pretrained(again.out).state_dict()
    assert retrain(plain, 4, out=tmp_path / "four").out is not None
    kept = AutoModelForCausalLM.from_pretrained(complete(plain.checkpoints)[-1]).state_dict()
    of_four = AutoModelForCausalLM.from_pretrained(tmp_path / "four" / "step-00000004").state_dict()
    assert all(torch.equal(of_four[name], kept[name]) for name in kept)
    assert not all(torch.equal(retrained[name], kept[name]) for name in kept)
    with pytest.raises(UsageError, match=r"--out .* is there already: give a new folder"):
        retrain(plain, 4, out=tmp_path / "four")
    with pytest.raises(UsageError, match="is inside the run, which must not change"):
        retrain(plain, 4, out=plain.checkpoints / "mine")


@pytest.mark.medium
def test_a_step_is_trained_otherwise_and_the_steps_before_it_are_not(plain: RunDir) -> None:
    said, code = typed("retrain", plain.path, "--step", 4, "--set", "algo.importance=none", "--set", "train.epochs=2")
    assert code == 0
    assert "step 4: trained otherwise on purpose (algo.importance=none, train.epochs=2)" in said
    again = retrain(plain, 4, settings=["algo.importance=none"])
    assert again.compared == (3,) and again.difference is None and not again.equal
    assert again.recorded is not None and again.metrics["grad_norm"] != again.recorded["grad_norm"]
    same = retrain(plain, 4, settings=[f"train.lr={plain.config().train.lr}"])  # the same step, through the other way
    assert same.metrics["loss"] == again.recorded["loss"] and same.metrics["grad_norm"] == again.recorded["grad_norm"]
    critic = retrain(plain, 4, settings=["algo.kind=ppo"])
    assert critic.metrics["algorithm"]["value_mean"] == 0
    with pytest.raises(ConfigError, match=r"--set = 'rollout.temperature=2': a step is trained again with"):
        retrain(plain, 4, settings=["rollout.temperature=2"])


@pytest.mark.medium
def test_a_step_trained_otherwise_has_the_moving_reference_of_the_run(tmp_path: Path, model: Path) -> None:
    algo = {"kl_weight": 0.5, "reference": 0.5}
    run = run_of(tmp_path / "run", model, algo=algo, train={"steps": 4, "checkpoint_every": 4})
    recorded = retrain(run, 4).metrics
    same = retrain(run, 4, settings=["algo.kl_weight=0.5"]).metrics  # the same step, through the other way
    assert same["algorithm"] == recorded["algorithm"] and same["grad_norm"] == recorded["grad_norm"]
    with pytest.raises(ConfigError, match=r"^algo = {'kl_weight': 0, 'reference': 0.5}: .* or leave it out$"):
        retrain(run, 4, settings=["algo.kl_weight=0"])
    none = retrain(run, 4, settings=["algo.kl_weight=0", "algo.reference=start"])
    assert "kl_reference" not in none.metrics["algorithm"]
    new = retrain(run_of(tmp_path / "plain", model), 4, settings=["algo.kl_weight=0.5", "algo.reference=1"])
    assert new.notes == ("the moving reference is new: the run has none of this kind",)


def test_a_teacher_that_is_gone_is_named(tmp_path: Path, model: Path) -> None:
    teacher = tiny_qwen3(tmp_path / "teacher", seed=5)
    run = run_of(tmp_path / "run", model, steps=1, algo={"kind": "distil", "teacher": str(teacher)})
    shutil.rmtree(teacher)
    with pytest.raises(ModelError, match=r"there is no folder .*teacher"):
        retrain(run, 1)


def test_what_happens_to_each_token_is_written(plain: RunDir, tmp_path: Path) -> None:
    again = retrain(plain, 3, dump=tmp_path / "tokens.jsonl")
    assert again.equal  # looking changes nothing
    rows = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    assert sum(len(row["token_ids"]) for row in rows) == again.metrics["tokens_computed"] > 0
    assert sum(sum(row["loss"]) for row in rows) == pytest.approx(again.metrics["loss"], abs=1e-6)
    cap = plain.config().algo.importance_bounds[1]
    with RunStore.read(plain.store_path) as store:
        for row in rows:
            turn = store.reads.trajectory(row["episode"]).turns[row["turn"]]
            assert tuple(row["token_ids"]) == turn.token_ids
            assert row["behaviour"] == pytest.approx(turn.logprobs)
            assert row["ratio"] == [1.0] * len(turn.token_ids)  # one update a step
            for at, gradient in enumerate(row["gradient"]):  # - weight rho A, as the loss of GRPO at ratio 1
                rho = min(cap, 2.718281828459045 ** (row["logprob"][at] - row["behaviour"][at]))
                assert gradient == pytest.approx(-row["weight"][at] * rho * row["advantage"][at], rel=1e-4, abs=1e-7)


def test_a_step_that_cannot_be_trained_again_says_why_and_which_can(plain: RunDir, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--step 9: the run has no such step: it has trained 1 to 4"):
        retrain(plain, 9)
    run = copied(plain, tmp_path)
    with RunStore.open(run.store_path) as store:
        store.lineage.retain(4, keep_steps=2, keep_sample=0.0)
    dropped = (
        r"--step 2 cannot be trained again: from its initial weights on it needs steps 1 to 2, and retention has "
        r"dropped tokens of 1 to 2 \(buffer.keep_steps = 50; train.keep_checkpoints = 2.*; steps that can be: 3 to 4"
    )
    with pytest.raises(UsageError, match=dropped):
        retrain(run, 2)
    assert retrain(run, 4).equal
    for folder in complete(run.checkpoints):
        shutil.rmtree(folder)
    with pytest.raises(UsageError, match=r"needs steps 1 to 4, and retention has dropped tokens of 1 to 2 .*; no step"):
        retrain(run, 4)


def test_what_is_not_as_it_was_is_named(plain: RunDir, tmp_path: Path) -> None:
    run = copied(plain, tmp_path)
    with sqlite3.connect(run.store_path) as connection:
        connection.execute("UPDATE metrics SET data = json_set(data, '$.with.torch', '1.0') WHERE kind = 'weights'")
    again = retrain(run, 2)
    assert again.equal and again.notes == (f"torch: 1.0 in the run, {torch.__version__} here",)


def test_a_run_that_recorded_no_hash_has_nothing_to_compare(tmp_path: Path, model: Path) -> None:
    run = run_of(tmp_path / "run", model, steps=1, train={"steps": 1})
    with sqlite3.connect(run.store_path) as connection:  # its disk was full just then
        connection.execute("DELETE FROM metrics WHERE kind = 'weights'")
    said, code = typed("retrain", run.path, "--step", 1)
    assert code == 1 and "the run recorded no hash of its weights, nothing was compared" in said


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code under test catches it."""


class DiesBeforeTheCheckpoint(Played):
    """A learner that is killed at step 3, before its checkpoint is begun."""

    async def start(self, row: dict[str, Any]) -> WeightVersion:
        if self._parcels.step == 3:
            raise Killed
        return await super().start(row)


class DiesBeforeTheStoreKnows(CheckpointWriter):
    """A learner that is killed at step 3, when its checkpoint is written and the store does not know it."""

    async def start(self, version: WeightVersion) -> None:
        if version.step == 3:
            await self.settle()
            self._learner.save(self._root)
            raise Killed
        await super().start(version)


@pytest.mark.parametrize("algo", [{}, {"kind": "ppo", "critic_warmup_steps": 1, "kl_weight": 0.1}], ids=["grpo", "ppo"])
@pytest.mark.parametrize(
    ("pushes", "checkpoints", "every"),
    [(DiesBeforeTheCheckpoint, CheckpointWriter, 2), (Played, DiesBeforeTheStoreKnows, 1)],
    ids=["checkpoint", "the store knows it"],
)
def test_a_killed_learner_goes_on_with_the_same_bits(
    tmp_path: Path,
    model: Path,
    pushes: type[Played],
    checkpoints: type[CheckpointWriter],
    every: int,
    algo: dict[str, Any],
) -> None:
    """Its next life goes on from the newest checkpoint; every step of the lineage is that of an unharmed learner."""
    run = RunDir.create(tmp_path / "run", config_of(model, 4, algo=algo, train={"steps": 4, "checkpoint_every": every}))
    with pytest.raises(Killed):
        train(run, pushes, checkpoints)
    train(run)
    for folder in complete(run.checkpoints):
        if step_of(folder) > 1:
            shutil.rmtree(folder)  # so that a step before the kill and those after it are trained in one life
    last = retrain(run, 4)
    assert last.equal and last.compared == (1, 2, 3, 4)
