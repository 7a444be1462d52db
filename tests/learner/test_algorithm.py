"""The seam between learner and algorithm: the loss is the algorithm's, the learner knows none of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from each_case import each_case

from agentrl import config, registry
from agentrl.algos.algorithm import Algorithm
from agentrl.algos.credit import turn_advantages
from agentrl.algos.grpo import GRPO
from agentrl.algos.importance import importance_weights
from agentrl.algos.kl_penalty import kl_penalty
from agentrl.algos.losses import clipped_surrogate, policy_loss, token_weights
from agentrl.algos.ppo import PPO
from agentrl.config import Rollout, RunConfig, Train
from agentrl.errors import ConfigError
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.learner import Learner
from agentrl.learner.model.policy import PolicyModel
from agentrl.records import Group
from tests.closeness import assert_gradients_alike

from .making import random_group, run_config, tiny_qwen3

STEP_OF = {1: 0, 2: 0}.__getitem__
SHORT = Rollout(max_context=30, max_tokens_per_turn=16)
RUN_FILE = {"model": "m", "env": {"id": "test/none"}}


# --- GRPO is what it was before there were algorithms ---------------------------------------------------------------


def kept_run(folder: Path, batches: list[list[Group]], settings: RunConfig) -> dict[str, torch.Tensor]:
    """The learner as it was: advantages before the passes, one loss, one update per step."""
    torch.set_num_threads(settings.train.threads)
    torch.manual_seed(settings.seed)
    algo, train, temperature = settings.algo, settings.train, settings.rollout.temperature
    assert isinstance(algo, GRPO)
    model, reference = PolicyModel(folder), PolicyModel(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.lr, betas=train.betas, weight_decay=train.weight_decay)
    for step, groups in enumerate(batches):
        laid, every = [], []
        for group in groups:
            members, advantages = group.trajectories, {}
            width = max(len(member.turns) for member in members)
            of_group = turn_advantages(
                torch.tensor([member.outcome for member in members]).double(),
                torch.tensor([[*m.rewards, *[0.0] * (width - len(m.turns))] for m in members], dtype=torch.float64),
                torch.tensor([len(member.turns) for member in members]),
                torch.ones(len(members), dtype=torch.bool),
                baseline=algo.baseline,
                scale=algo.scale,
                process_weight=algo.process_weight,
            )
            for member, advantage_T in zip(members, of_group, strict=True):
                per_token = [float(advantage_T[t.index]) for t in member.turns for _ in t.token_ids]
                advantages[member.episode_id] = torch.tensor(per_token)
            rows = group_rows(group, algo, step_of=STEP_OF, step_now=step, max_lag=99).rows
            laid.append([row.having(advantage=advantages[row.episode_id]) for row in rows])
            every += laid[-1]
        episodes = torch.cat([torch.full_like(row.place_S, row.episode_id) for row in every])
        shares = iter(token_weights(episodes, algo.normalise).split([len(row.place_S) for row in every]))
        laid = [[row.having(weight=next(shares)) for row in rows] for rows in laid]
        needed = algo.kl_weight > 0 or algo.entropy_weight > 0
        kept = [[r for r in rows if needed or bool((r.columns["advantage"].abs() > 1e-9).any())] for rows in laid]
        for pack in packs(kept, train.tokens_per_batch):
            logprobs, entropy = model.logprobs(pack, temperature=temperature, entropy_grad=algo.entropy_weight > 0)
            proximal, columns = logprobs.detach(), pack.columns
            surrogate, _ = clipped_surrogate(
                logprobs, proximal, columns["advantage"], clip_low=algo.clip_low, clip_high=algo.clip_high
            )
            kl = None
            if algo.kl_weight > 0:
                with torch.no_grad():
                    other = reference.logprobs(pack, temperature=temperature)[0]
                kl = kl_penalty(logprobs, other, algo.kl_form)
            policy_loss(
                surrogate,
                columns["weight"],
                importance_weights(proximal, columns["behaviour"], algo.importance_bounds[1]),
                kl_T=kl,
                kl_weight=algo.kl_weight,
                entropy_T=entropy if algo.entropy_weight > 0 else None,
                entropy_weight=algo.entropy_weight,
            ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
        for part in optimizer.param_groups:
            part["lr"] = train.lr * min(1.0, (step + 1) / (train.warmup_steps + 1))
        optimizer.step()
        optimizer.zero_grad()
    return model.module.state_dict()


@pytest.mark.parametrize(
    ("algo", "train"),
    [
        (GRPO(), Train(warmup_steps=0)),
        (
            GRPO(kl_weight=0.1, entropy_weight=0.05, importance_bounds=(0.0, 1.2), normalise="sequence", scale="std"),
            Train(warmup_steps=2, lr=1e-2, tokens_per_batch=64),
        ),
    ],
    ids=["default", "penalties"],
)
def test_grpo_trains_bit_for_bit_as_before_there_were_algorithms(qwen3_dir: Path, algo: GRPO, train: Train) -> None:
    settings = run_config(algo=algo, train=train, rollout=SHORT, seed=3)
    batches = [[random_group(10 * step + id, seed=10 * step + id) for id in range(4)] for step in range(3)]
    learner = Learner(settings.learner, qwen3_dir)
    for groups in batches:
        learner.step(groups, step_of=STEP_OF)
    expected = kept_run(qwen3_dir, batches, settings)
    got = learner.model.module.state_dict()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    begun = PolicyModel(qwen3_dir).module.state_dict()
    assert not all(torch.equal(begun[name], tensor) for name, tensor in expected.items())  # the test can fail


# --- normalisation --------------------------------------------------------------------------------------------------


@pytest.mark.medium
@each_case("normalise", ["token", "sequence", 8])
def test_the_gradient_of_a_step_is_the_same_however_it_is_divided(
    qwen3_dir: Path, normalise: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into passes and into minibatches: the gradients of its updates average to that of one update of one pass."""
    groups = [random_group(id, seed=id) for id in range(1, 6)]
    algo = GRPO.model_validate({"normalise": normalise})

    def gradient(train: Train) -> torch.Tensor:
        learner = Learner(run_config(algo=algo, train=train, rollout=SHORT).learner, qwen3_dir)
        seen: list[torch.Tensor] = []

        def keep() -> None:
            seen.append(torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]))

        monkeypatch.setattr(learner.optimizer, "step", keep)
        learner.step(groups, step_of=STEP_OF)
        assert len(seen) == train.minibatches
        return torch.stack(seen).mean(0)

    whole = gradient(Train(grad_clip=1e9))
    passes = gradient(Train(grad_clip=1e9, tokens_per_batch=30))
    minibatches = gradient(Train(grad_clip=1e9, minibatches=2))
    assert whole.abs().max() > 1e-3
    for divided in (passes, minibatches):
        assert_gradients_alike({"all": divided}, {"all": whole})


# --- how a run chooses ----------------------------------------------------------------------------------------------


def test_a_run_file_without_a_kind_means_grpo() -> None:
    assert config.parse(RUN_FILE).algo == GRPO()
    assert config.parse({**RUN_FILE, "algo": {"clip_low": 0.1}}).algo == GRPO(clip_low=0.1)
    read = config.parse({**RUN_FILE, "algo": {"kind": "grpo", "scale": "std"}})
    assert config.from_json(config.to_json(read)) == read


@each_case("base", [Algorithm, GRPO])
def test_an_algorithm_of_a_package_needs_no_kind_of_its_own(
    base: type[Algorithm], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(base):
        strength: float = 1.0

    monkeypatch.setattr(registry, "_registered", {**registry._registered, ("algorithms", "mine"): Mine})
    read = config.parse({**RUN_FILE, "algo": {"kind": "mine", "strength": 0.5}})
    assert (type(read.algo), read.algo.kind, read.algo.strength) == (Mine, "mine", 0.5)
    assert config.from_json(config.to_json(read, defaults=False)) == read


@each_case(
    ("algo", "wrong"),
    [
        ({"kind": "grbo"}, "algo.kind.*'grbo' is registered; known: grpo, .*ppo"),
        ({"clip_lo": 0.1}, "algo.clip_lo.*did you mean 'clip_low'"),
        ({"clip_low": -1}, "algo.clip_low.*greater than 0"),
    ],
)
def test_a_wrong_algorithm_says_what_to_type(algo: dict[str, object], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        config.parse({**RUN_FILE, "algo": algo})


def test_an_algorithm_that_compares_siblings_needs_two() -> None:
    with pytest.raises(ConfigError, match=r"rollout.group_size.*compares siblings: give at least 2"):
        config.parse({**RUN_FILE, "rollout": {"group_size": 1}})
    assert config.parse({**RUN_FILE, "rollout": {"group_size": 1}, "algo": {"baseline": "none"}})


def test_a_quorum_too_small_for_the_algorithm_is_refused() -> None:
    """One sibling has no spread: every advantage would be 0, and nothing would be trained."""
    file = {**RUN_FILE, "rollout": {"group_size": 3}, "algo": {"scale": "leave_one_out_by_source"}}
    with pytest.raises(ConfigError, match=r"buffer\.close = 2: .*give buffer\.close = 3"):
        config.parse({**file, "buffer": {"close": 2}})
    assert config.parse({**file, "buffer": {"close": "quorum"}}).quorum == 3
    assert config.parse({**file, "buffer": {"close": 3}}).quorum == 3
    assert config.parse({**file, "buffer": {"close": "full"}}).quorum is None


def test_another_kind_on_the_command_line_leaves_the_settings_of_the_files_own(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "m"\nenv.id = "test/none"\n[algo]\nbaseline = "none"\nclip_low = 0.1\n')
    assert config.load(file, ["algo.kind=ppo"]).algo == PPO(clip_low=0.1)
    file.write_text('model = "m"\nenv.id = "test/none"\n[algo]\nbasline = "none"\n')
    with pytest.raises(ConfigError, match=r"algo\.basline"):
        config.load(file, ["algo.kind=ppo"])
    with pytest.raises(ConfigError, match=r"algo\.kind"):
        config.load(file, ["algo.kind=pppo"])


THEIRS = '''
"""REINFORCE with the outcome alone, scaled."""
from typing import Literal

from agentrl.algos.algorithm import Algorithm, Loss, Positive


class Theirs(Algorithm):
    kind: Literal["theirs"] = "theirs"
    strength: Positive = 1.0  # of the update

    def prepare(self, siblings):
        outcomes_GT = siblings.outcomes_G[:, None].expand_as(siblings.rewards_GT)
        return {"advantage": outcomes_GT, "doubled": 2 * outcomes_GT}

    def loss(self, tokens, outputs, step):
        assert (tokens["doubled"] == 2 * tokens["advantage"]).all()
        loss_K = -self.strength * tokens["weight"] * tokens["advantage"] * outputs.logprobs_K
        return Loss(total=loss_K.sum(), clipped_K=loss_K > 9e9, gauges={"doubled": tokens["doubled"].sum()})
'''


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that offers an algorithm."""
    (tmp_path / "their_algorithms.py").write_text(THEIRS)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentrl.algorithms]\ntheirs = their_algorithms:Theirs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._offered.cache_clear()
    yield
    registry._offered.cache_clear()


@pytest.mark.usefixtures("theirs")
def test_a_package_offers_an_algorithm_by_an_entry_point(qwen3_dir: Path) -> None:
    document = {**RUN_FILE, "algo": {"kind": "theirs", "strength": 3.0}, "train": {"warmup_steps": 0}}
    parsed = config.parse(document)
    assert config.from_json(config.to_json(parsed)) == parsed
    learner = Learner(parsed.learner, qwen3_dir)
    before = [parameter.clone() for parameter in learner.model.parameters()]
    report = learner.step([random_group(1, seed=1)], step_of=STEP_OF)
    assert not all(map(torch.equal, before, learner.model.parameters()))
    assert report.algorithm["doubled"] > 0
    with pytest.raises(ConfigError, match=r"algo.strenth.*did you mean 'strength'"):
        config.parse({**RUN_FILE, "algo": {"kind": "theirs", "strenth": 3.0}})


@pytest.mark.medium
@each_case("kind", [kind for kind in registry.ids("algorithms") if kind not in ("ppo", "distil")])
@each_case("epochs", [1, 2])
def test_every_kind_trains(qwen3_dir: Path, kind: str, epochs: int) -> None:
    document = {**RUN_FILE, "algo": {"kind": kind}, "train": {"warmup_steps": 0, "epochs": epochs, "lr": 1e-2}}
    learner = Learner(config.parse(document).learner, qwen3_dir)
    before = [parameter.clone() for parameter in learner.model.parameters()]
    report = learner.step([random_group(id, seed=id) for id in (1, 2)], step_of=STEP_OF)
    assert not all(map(torch.equal, before, learner.model.parameters()))
    assert report.advantage_std is not None and report.advantage_std > 0
    assert report.updated and report.groups_without_signal == 0


TAUGHT = """
from typing import Literal

from agentrl.algos.algorithm import Algorithm, Loss, Slots


class Taught(Algorithm):
    kind: Literal["taught"] = "taught"
    teacher: str  # its folder

    @property
    def slots(self):
        return Slots(frozen={"teacher": self.teacher})

    def prepare(self, siblings):
        return {}

    def loss(self, tokens, outputs, step):
        gap_K = outputs.logprobs_K - tokens["teacher"]
        return Loss(total=(tokens["weight"] * gap_K.square()).sum(), clipped_K=gap_K > 9e9)
"""


def test_an_algorithm_names_a_slot_for_a_teacher(
    qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probs of sampled tokens go to those of another model; nothing of the learner knows why."""
    file = tmp_path / "taught.py"
    file.write_text(TAUGHT)
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry.register("algorithms", "taught", f"{file}:Taught")
    teacher = str(tiny_qwen3(tmp_path / "teacher", seed=5))
    settings = {"warmup_steps": 0, "lr": 1e-2}
    learner = Learner(
        config.parse({**RUN_FILE, "algo": {"kind": "taught", "teacher": teacher}, "train": settings}).learner, qwen3_dir
    )
    losses = [learner.step([random_group(1, seed=1)], step_of=STEP_OF).loss or 0.0 for _ in range(30)]
    assert losses[-1] < losses[0] / 10
