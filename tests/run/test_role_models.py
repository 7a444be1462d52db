"""A role that trains a model of its own: where its weights go, who serves it, and a whole run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.config import RunConfig, parse
from agentrl.engine.router.router import Policies
from agentrl.engine.weight_sync.publisher import NotDelivered
from agentrl.engine.weight_sync.transport import Parcel
from agentrl.errors import ConfigError, RunFailed, UsageError
from agentrl.learner.checkpoints.folders import of_role
from agentrl.models.resolve import model_dir
from agentrl.offline.export_model import export
from agentrl.protocols import GenerateRequest
from agentrl.records import SamplingParams, WeightVersion
from agentrl.run.children.engine_process import current_weights
from agentrl.run.evaluation.of_checkpoint import measured
from agentrl.run.run_folder import RunDir
from agentrl.run.start_point import StartPoint
from agentrl.run.trainer import Trainer, check_startable
from agentrl.run.weights.role_policies import Publishers, file_of
from agentrl.store import RunStore
from agentrl.store.audit import audit
from tests.parts.fake_engine import FakeEngine

from .test_run import ENVS, SMALL

STEPS = 2
PAIR: dict[str, Any] = {
    "model": SMALL["model"],
    "rollout": {"group_size": 8, "max_running": 32, "max_tokens_per_turn": 2},
    "engine": {"max_batch": 16, "kv_cache_mb": 64},
    "buffer": {"groups_per_step": 4, "max_lag": 0},
    "train": {"steps": STEPS, "checkpoint_every": 1, "lr": 1e-3, "warmup_steps": 0},
}


def moved(before: Path, after: Path) -> bool:
    one, two = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert two.keys() <= one.keys()  # the first may name a tied layer twice
    return any(not torch.equal(one[name], two[name]) for name in two)


ROLES = [{"name": "short", "model": SMALL["model"], "algo": {"kind": "rloo"}}]


@pytest.fixture
def config() -> RunConfig:
    return parse({**PAIR, "roles": ROLES, "env": {"id": f"{ENVS}:Pair"}})


class Sends:
    """A publisher that notes what it is given; it fails where it has an error."""

    def __init__(self, cost: dict[str, float]) -> None:
        self.given: list[tuple[list[str], str]] = []
        self.cost, self.error = cost, ""

    async def deliver(self, urls: Callable[[], list[str]], parcel: Parcel, held: object) -> dict[str, float]:
        self.given.append((urls(), str(parcel.path)))
        if self.error:
            raise NotDelivered(self.error)
        return self.cost

    async def behind(self, urls: list[str], version: int) -> bool:
        return urls == ["http://theirs"] and version == 2


async def test_each_policys_engines_get_its_weights_under_one_version(config: RunConfig, tmp_path: Path) -> None:
    meta = {"engine_urls": '["http://ours"]', "role_urls": '{"short": ["http://theirs"]}'}
    publishers: Any = Publishers(config.engine, config.sync, meta.get, roles=tuple(config.role_models), locks=tmp_path)
    ours = Sends({"sync_s": 2.0, "engines_behind": 1, "sync_bytes": 10})
    theirs = Sends({"sync_s": 3.0, "engines_behind": 0, "sync_bytes": 5})
    assert publishers._of.keys() == {None, "short"}
    publishers._of = {None: ours, "short": theirs}
    path = tmp_path / "weights" / "7.safetensors"
    parcels = {role: Parcel(version=7, path=file_of(path, role)) for role in (None, "short")}
    assert await publishers.deliver(parcels) == {"sync_s": 3.0, "engines_behind": 1, "sync_bytes": 15}
    assert ours.given == [(["http://ours"], str(path))]
    assert theirs.given == [(["http://theirs"], str(tmp_path / "weights-short" / "7.safetensors"))]
    assert [await publishers.behind(version) for version in (1, 2)] == [False, True], "also where only a role's are"
    theirs.error = "no engine of the role took version 7"
    with pytest.raises(NotDelivered, match="no engine of the role took version 7"):
        await publishers.deliver(parcels)


async def test_a_turn_is_sampled_by_the_engines_of_its_role() -> None:
    shared, own = FakeEngine(version=3), FakeEngine(version=4)
    engine = Policies(shared, {"short": own})
    for role, sampler in (("short", own), ("long", shared), (None, shared)):
        request = GenerateRequest(
            request_id="r", session="s", token_ids=(1, 2), sampling=SamplingParams(max_tokens=2), policy=role
        )
        before = len(sampler.requests)
        assert (await engine.generate(request)).spans[0].version == sampler.version
        assert len(sampler.requests) == before + 1
    await engine.aclose()
    assert shared.closed and own.closed


def test_an_engine_of_a_role_starts_with_its_model_and_the_newest_file_of_it(config: RunConfig, tmp_path: Path) -> None:
    first = StartPoint(model=Path("/m"), checkpoint=None, version=WeightVersion(version=1, step=0))
    later = replace(first, checkpoint=tmp_path / "step-00000000")
    path = tmp_path / "weights" / "2.safetensors"
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        store.versions.confirm_version(store.versions.mint_version(0))
        assert current_weights(config, store, first).model == Path("/m")
        assert current_weights(config, store, first, "short").model == model_dir(SMALL["model"])
        assert current_weights(config, store, later, "short").model == tmp_path / "step-00000000" / "roles" / "short"
        store.versions.confirm_version(store.versions.mint_version(1, path))
        for role in (None, "short"):
            with pytest.raises(RunFailed, match="the weights of version 2 are gone"):
                current_weights(config, store, first, role)
            file_of(path, role).parent.mkdir()
            file_of(path, role).write_bytes(b"")
            assert current_weights(config, store, first, role).file == file_of(path, role)


def test_a_run_is_measured_and_exported_with_the_model_that_each_role_has_trained(
    config: RunConfig, tmp_path: Path
) -> None:
    run = RunDir.create(tmp_path / "run", config)
    checkpoint = run.checkpoints / "step-00000007"
    shutil.copytree(model_dir(SMALL["model"]), checkpoint)
    shutil.copytree(model_dir(SMALL["model"]), of_role(checkpoint, "short"))
    (checkpoint / "state.json").write_text('{"step": 7, "previous_step": 0, "episodes": []}')
    settings = of_role(checkpoint, "short") / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "marked": 1}))
    found, adapters = measured(str(run.path), None, 3)
    assert (found.model, found.role_models) == (str(checkpoint), {"short": str(of_role(checkpoint, "short"))})
    assert adapters is None
    assert export(run.path, tmp_path / "out", role="short").endswith("of step 7")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["marked"] == 1
    with pytest.raises(UsageError, match=r"--role long: .* has no model of its own for it; those that have one: short"):
        export(run.path, tmp_path / "other", role="long")


def test_a_model_of_another_tokenizer_is_refused_before_anything_starts(config: RunConfig, tmp_path: Path) -> None:
    other = shutil.copytree(model_dir(SMALL["model"]), tmp_path / "other")
    (other / "tokenizer.json").write_text("{}")
    roles = [config.roles[0].model_copy(update={"model": str(other)})]
    with pytest.raises(ConfigError, match=r"roles\.0\.model = '.*other': .* has another tokenizer\.json than"):
        check_startable(config.model_copy(update={"roles": roles}))


@pytest.mark.long
def test_a_role_trains_a_model_of_its_own_on_engines_of_its_own(tmp_path: Path) -> None:
    """Both models move, each in its own way; the engines of each sample under every version that was minted, and under
    no older one, after the learner's canary was passed by both."""
    out, first = tmp_path / "run", model_dir(SMALL["model"])
    Trainer(env=f"{ENVS}:Pair", config={**PAIR, "roles": ROLES}, out=out).train()
    run = RunDir.open(out)
    last = run.checkpoints / f"step-{STEPS:08d}"
    assert moved(first, last) and moved(first, of_role(last, "short")) and moved(last, of_role(last, "short"))
    with RunStore.open(run.store_path) as store:
        assert audit(store).violations == []
        assert {row.values["engines_behind"] for row in store.metrics.values("step")} == {0}
        turns = [turn for one in store.reads.trajectories("train") for turn in one.turns]
        for role in ("long", "short"):
            steps = {store.versions.step_of(span.version) for turn in turns if turn.role == role for span in turn.spans}
            assert steps == set(range(STEPS)), role
