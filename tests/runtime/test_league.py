"""The league of a run: who joins, who is made known, what was won; and a whole run against past selves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import parse
from agentrl.engine import adapters
from agentrl.errors import EngineUnavailable
from agentrl.league import META, from_json
from agentrl.records import WeightVersion
from agentrl.runtime.league import League, folders, game
from agentrl.runtime.models import model_dir
from agentrl.runtime.rundir import RunDir
from agentrl.runtime.trainer import Trainer
from agentrl.store import RunStore
from agentrl.store.audit import audit
from agentrl.train import lora
from agentrl.train.model import PolicyModel
from agentrl.train_settings import Train

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
        version = self.store.mint_version(step)
        checkpoint = self.path / f"step-{step}"
        (checkpoint / "adapter").mkdir(parents=True)
        (checkpoint / "adapter" / "weights").write_text(str(version.version))
        return version, checkpoint

    @property
    def known(self) -> list[int]:
        return [member.version for member in from_json(self.store.meta(META))]


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
        place.store.confirm_version(version)
        place.store.checkpoint(step, version, checkpoint)
        league.join(version, checkpoint)
    await league.announce(["http://one"])
    first, second = sorted(folders(place))  # type: ignore[arg-type]
    place.store.rollback(2)
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
    place.store.record("step", 1, {"league": {"0": [3, 1.5]}})
    place.store.record("step", 2, {"league": {"0": [2, 2.0]}})
    (first,) = place.league().members
    assert (first.version, first.played, first.won) == (0, 5, 3.5)
    assert first.beaten == 4.5 / 7


@pytest.mark.slow
def test_a_run_against_its_past_selves(tmp_path: Path) -> None:
    """Opponents are drawn from the checkpoints, their tokens have the log-probs of these weights, none is trained, and
    the run goes on with them after it was stopped."""
    out = tmp_path / "run"
    Trainer(env=f"{ENVS}:Duel", config=CONFIG, out=out).train()
    summary = Trainer.resume(out, settings=["train.steps=4"])
    assert summary["steps"] == 4 and summary["eval"]["after"]["n"] == 2
    run, model = RunDir.open(out), PolicyModel(model_dir(SMALL["model"]), adapter=Train(lora_rank=2))
    with RunStore.open(run.store_path) as store:
        assert audit(store).violations == []
        members = from_json(store.meta(META))
        assert [member.step for member in members][:3] == [0, 1, 2]
        episodes = [one for one in store.trajectories("train") if one.scored]
        theirs = [turn for one in episodes for turn in one.turns if turn.role == "second"]
        assert not any(turn.learns for turn in theirs)
        drawn = Counter(version for turn in theirs for version in {*turn.versions})
        assert {0} < drawn.keys() <= {member.version for member in members}
        for version in drawn:
            turn = next(turn for turn in theirs if set(turn.versions) == {version} and turn.parent is None)
            if version:
                lora.load(model.module, folders(run)[version])
                scores = model.score([*turn.prompt_ids, *turn.token_ids])
            else:
                with lora.switched_off(model.module):
                    scores = model.score([*turn.prompt_ids, *turn.token_ids])
            assert turn.logprobs == pytest.approx(scores[len(turn.prompt_ids) - 1 :], abs=1e-3)
        trained = [store.trajectory(id) for step in range(1, 5) for id in store.lineage(step)]
        played, won = Counter[int](), Counter[int]()
        for one in trained:
            if one.scored and (found := game(one, ["second"])) is not None:
                played[found[0]] += 1
                won[found[0]] += 2 * found[1]
        assert {member.version: member.played for member in members if member.played} == played
        assert {member.version: 2 * member.won for member in members if member.won} == +won
        rates = [row.values["league_win_rate"] for row in store.metrics("step")]
        assert len(rates) == 4 and all(0 <= rate <= 1 for rate in rates)
