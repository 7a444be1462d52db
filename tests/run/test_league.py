"""The league of a run: who joins, who is made known, what was won; and a whole run against past selves."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import parse
from agentrl.config.league import FIRST, Member, from_json, past_self_roles, to_json
from agentrl.config.train import Train
from agentrl.engine.weight_sync import adapters
from agentrl.errors import EngineUnavailable, UsageError
from agentrl.learner.model import lora
from agentrl.learner.model.policy import PolicyModel
from agentrl.models.resolve import model_dir
from agentrl.records import Turn, WeightVersion
from agentrl.run.children.engine_process import current_weights
from agentrl.run.evaluation.of_checkpoint import measured
from agentrl.run.league import League, folders, game
from agentrl.run.run_folder import RunDir
from agentrl.run.start_point import start_point
from agentrl.run.trainer import Trainer, evaluate
from agentrl.store import RunStore
from agentrl.store.audit import audit
from agentrl.store.run_values import LEAGUE
from tests.learner.making import episode, group_of, turn

from .test_run import ENVS, SMALL

CONFIG: dict[str, Any] = {
    **SMALL,
    "rollout": {**SMALL["rollout"], "max_turns": 4},
    "train": {"steps": 2, "checkpoint_every": 2, "lora_rank": 2, "lr": 2e-2, "warmup_steps": 0},
    "roles": [{"name": "second", "plays": "league"}],
    "league": {"every": 1, "newest": 2},
    "eval": {"sets": [{"name": "held_out", "n": 2}]},
}


class Place:
    """A run folder with a store, and the engines that its league would call."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = parse({**CONFIG, "env": {"id": f"{ENVS}:Duel"}})
        self.path, self.store, self.away = folder, RunStore.create(folder / "store.sqlite", "{}"), False
        self.loaded: list[tuple[str, int]] = []
        monkeypatch.setattr(adapters, "load", self.load)

    async def load(self, engines: Any, folder: Path, version: int, *, kept: bool, deadline_s: float) -> None:
        if self.away:
            raise EngineUnavailable("it is being started again")
        assert kept and (folder / "weights").read_text() == str(version)
        self.loaded.append((engines[0].url, version))

    def league(self) -> League:
        return League(self.config, self, self.store)  # type: ignore[arg-type]

    def saved(self, step: int) -> tuple[WeightVersion, Path]:
        version = self.store.versions.mint_version(step)
        checkpoint = self.path / f"step-{step}"
        (checkpoint / "adapter").mkdir(parents=True)
        (checkpoint / "adapter" / "weights").write_text(str(version.version))
        return version, checkpoint

    @property
    def known(self) -> list[int]:
        return [member.version for member in from_json(self.store.meta(LEAGUE.key))]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


async def test_a_checkpoint_is_known_once_all_engines_have_it(place: Place) -> None:
    league = place.league()
    assert [step for step in range(4) if league.is_due(step)] == [1, 2, 3]
    version, checkpoint = place.saved(2)
    league.join(version, checkpoint)
    place.away = True
    await league.announce(["http://one", "http://two"])
    assert place.known == [0] and place.loaded == []
    place.away = False
    await league.announce(["http://one", "http://two"])
    assert place.known == [0, version.version]
    assert place.loaded == [("http://one", version.version), ("http://two", version.version)]
    again = place.league()  # the learner was started again: engines that were as well have all of `folders`
    again.join(version, checkpoint)
    assert place.known == [0, version.version] == [member.version for member in again.members]
    assert folders(place).keys() == {version.version}  # type: ignore[arg-type]


async def test_a_member_that_a_restart_undid_is_forgotten(place: Place) -> None:
    league = place.league()
    for step in (2, 4):
        version, checkpoint = place.saved(step)
        place.store.versions.confirm_version(version)
        place.store.lineage.checkpoint(step, version, checkpoint)
        league.join(version, checkpoint)
    await league.announce(["http://one"])
    first, second = sorted(folders(place))  # type: ignore[arg-type]
    place.store.lineage.rollback(2)
    assert [member.version for member in place.league().members] == [0, first]
    assert place.known == [0, first]
    assert folders(place).keys() == {first, second}, "an episode may have begun against it"  # type: ignore[arg-type]


async def test_members_that_no_group_can_meet_any_more_are_dropped(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are drawn from. A group may have been admitted max_lag + 1 = 5 steps ago, before 5 others joined."""
    dropped: list[int] = []

    async def forget(engines: Any, version: int, *, deadline_s: float) -> None:
        dropped.append(version)

    monkeypatch.setattr(adapters, "forget", forget)
    league = place.league()
    for step in range(1, 11):
        version, checkpoint = place.saved(step)
        league.join(version, checkpoint)
        await league.announce(["http://one"])
    versions = [one for one, _ in sorted((version, url) for url, version in place.loaded)]
    assert dropped == versions[:2] and sorted(folders(place)) == versions[2:]  # type: ignore[arg-type]
    assert place.known == [0, *versions[2:]]


def test_what_was_won_is_counted_from_the_steps_that_stand(place: Place) -> None:
    place.store.metrics.record("step", 1, {"league": {"0": [3, 1.5]}})
    place.store.metrics.record("step", 2, {"league": {"0": [2, 2.0]}})
    (first,) = place.league().members
    assert (first.version, first.played, first.won) == (0, 5, 3.5)
    assert first.beaten == 4.5 / 7


BOTH = [{"name": "first", "plays": "either", "adapter": True}, {"name": "second", "plays": "either"}]


def test_a_game_that_ends_before_one_side_has_acted_counts(place: Place) -> None:
    """By hand: the policy is `first`, a past self `second`. Who breaks the rules loses, 1 to -1."""
    place.config = parse({**CONFIG, "env": {"id": f"{ENVS}:Duel"}, "roles": [{"name": "second", "plays": "league"}]})
    won, lost, draw = {"first": 1.0, "second": -1.0}, {"first": -1.0, "second": 1.0}, {"first": 0.0, "second": 0.0}
    ours, theirs = turn(0, [1], [2], role="first"), turn(0, [1], [2], role="second", learns=False, version=0)
    games = [((ours, theirs), won), ((ours,), lost), ((ours,), lost), ((theirs,), won), ((ours, theirs), draw)]
    members = [replace(episode(at, turns, 0.0), outcomes=outcomes) for at, (turns, outcomes) in enumerate(games)]
    league = place.league()
    assert league.count([group_of(members)]) == {"league": {"0": [5, 2.5]}, "league_win_rate": 0.5}
    alone = [member for member in members if member.turns == (ours,)]
    assert league.count([group_of(alone)]) == {"league": {"0": [2, 0.0]}, "league_win_rate": 0.0}
    (first,) = league.members
    assert (first.played, first.won) == (7, 2.5)


@pytest.mark.long
def test_a_run_against_its_past_selves(tmp_path: Path) -> None:
    """Either role is played by past selves, one with adapters of its own: they are drawn from the checkpoints, their
    tokens have the log-probs of these weights, none is trained. The run goes on with them after it was stopped, and
    `agentrl eval` plays the newest checkpoint against them."""
    out = tmp_path / "run"
    config = {**CONFIG, "roles": BOTH, "buffer": {**SMALL["buffer"], "max_lag": 0}}
    Trainer(env=f"{ENVS}:Duel", config=config, out=out).train()
    summary = Trainer.resume(out, settings=["train.steps=4"])
    assert summary["steps"] == 4 and summary["eval"]["after"]["n"] == 2
    (result,) = evaluate(*measured(str(out), None, 4, ["league.measured=latest"]), out=tmp_path / "eval")
    assert result.n == 4
    settings = RunDir.open(out).config()
    run, model = RunDir.open(out), PolicyModel(model_dir(SMALL["model"]), adapter=Train(lora_rank=2))

    def proved(turn: Turn, adapters: Path | None) -> None:
        """A turn without context has the log-probs of the adapters in a folder, or of the model below."""
        tokens = [*turn.prompt_ids, *turn.token_ids]
        if adapters is None:
            with lora.switched_off(model.module):
                scores = model.score(tokens)
        else:
            lora.load(model.module, adapters / "first" if turn.role == "first" else adapters)
            scores = model.score(tokens)
        assert turn.logprobs == pytest.approx(scores[len(turn.prompt_ids) - 1 :], abs=1e-3)

    with RunStore.open(run.store_path) as store:
        assert audit(store).violations == []
        members = from_json(store.meta(LEAGUE.key))
        assert [member.step for member in members] == [0, 1, 2, 3]
        episodes = [one for one in store.reads.trajectories("train") if one.scored]
        assert {tuple(sorted({turn.role for turn in one.turns if turn.learns})) for one in episodes} == {
            ("first",),
            ("second",),
        }
        theirs = [turn for one in episodes for turn in one.turns if not turn.learns]
        drawn = {(turn.role, version) for turn in theirs for version in turn.versions}
        assert {0} < {version for _, version in drawn} <= {member.version for member in members}
        for role, version in drawn:
            turn = next(one for one in theirs if (one.role, {*one.versions}, one.parent) == (role, {version}, None))
            proved(turn, folders(run)[version] if version else None)
        trained = [store.reads.trajectory(id) for step in range(1, 5) for id in store.lineage.episodes_of(step)]
        played, won = Counter[int](), Counter[int]()
        for one in trained:
            if one.scored:
                theirs = past_self_roles(
                    {"first": "either", "second": "either"}, settings.league, seed=settings.seed, group_id=one.group_id
                )
                version, points = game(one, theirs, -1)
                played[version] += 1
                won[version] += 2 * points
        assert {member.version: member.played for member in members if member.played} == played
        assert {member.version: 2 * member.won for member in members if member.won} == +won
        rates = [row.values["league_win_rate"] for row in store.metrics.values("step")]
        assert len(rates) == 4 and all(0 <= rate <= 1 for rate in rates)
    with RunStore.open(tmp_path / "eval" / "store.sqlite") as store:
        turns = [
            turn for one in store.reads.trajectories("eval:held_out:now") for turn in one.turns if turn.parent is None
        ]
        assert {turn.versions[0] for turn in turns if not turn.learns} == {members[-1].version}
        for turn in turns:
            proved(
                turn, run.checkpoints / "step-00000004" / "adapter" if turn.learns else folders(run)[turn.versions[0]]
            )


def test_a_run_with_adapters_is_measured_over_the_model_that_it_began_with(tmp_path: Path) -> None:
    config = parse({**CONFIG, "roles": BOTH, "env": {"id": f"{ENVS}:Duel"}})
    source = RunDir.create(tmp_path / "run", config)
    assert measured(str(source.path), None, 3)[1] is None, "nothing is trained yet"
    checkpoint = source.checkpoints / "step-00000007"
    for folder in (checkpoint / "adapter" / "first", source.path / "league" / "5"):
        folder.mkdir(parents=True)
        (folder / "weights").write_text(folder.name)
    (checkpoint / "state.json").write_text('{"step": 7, "episodes": [[1, 2]]}')
    with RunStore.open(source.store_path) as store:
        store.set_meta(LEAGUE.key, to_json([FIRST, Member(version=5, step=3)]))
    found, adapters = measured(str(source.path), None, 3)
    assert adapters is not None
    assert (found.model, found.sync, [one.n for one in found.eval.sets]) == (SMALL["model"], "adapter", [3])
    run = RunDir.create(tmp_path / "eval", found)
    adapters.copy_into(run)
    with RunStore.open(run.store_path) as store:
        start = start_point(run, store)
        weights = current_weights(found, store, start)
        assert (start.version.step, weights.current.step, weights.base.version) == (7, 7, 0)
        assert weights.adapter is not None and (weights.adapter / "first" / "weights").read_text() == "first"
        assert from_json(store.meta(LEAGUE.key))[-1].version == 5 and folders(run).keys() == {5}
        assert store.groups.counts() == {}
    shutil.rmtree(checkpoint)
    with pytest.raises(UsageError, match=r"cannot be copied .*give the same command again"):
        adapters.copy_into(RunDir.create(tmp_path / "late", found))
