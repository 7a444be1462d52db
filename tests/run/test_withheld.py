"""Each process of a run gets the secrets that it needs, and no others."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import trio
from each_case import each_case

from agentrl.config import RunConfig, parse
from agentrl.env.agent_programs.session import _command  # pyright: ignore[reportPrivateUsage]
from agentrl.host.child_environment import Withheld
from agentrl.learner.parallel.ranks import Leader
from agentrl.records import EngineKey
from agentrl.run.children.learner import WatchedLearner
from agentrl.run.children.run_children import RunChildren
from agentrl.run.cluster.ray_launcher import Seat
from agentrl.run.processes.launcher import ChildCommand
from agentrl.run.processes.supervised_child import Child
from agentrl.run.run_folder import RunDir
from agentrl.store.async_calls import Looks

DATABASE = {"PGPASSWORD", "PGPASSFILE", "PGUSER"}
JUDGE, ENGINE, HUB, STORED, TRACKER = "MY_JUDGE", "MY_ENGINE_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"
OWN_ENGINES = {"AGENTRL_ENGINE_KEY", "AGENTRL_WEIGHTS_KEY"}
SECRETS = {*DATABASE, JUDGE, ENGINE, HUB, STORED, TRACKER}
HARMLESS = {"PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "PGO_LEVEL", "AGENTRL_RUN_KEY"}
PRINTS = ["-c", "import json, os; print(json.dumps(sorted(os.environ)))"]


def config(**engine: Any) -> RunConfig:
    judge = {
        "source": "judge",
        "kind": "judge",
        "url": "http://127.0.0.1:9",
        "model": "m",
        "rubric": "r",
        "api_key_env": JUDGE,
    }
    document = {"model": "agentrl/tiny-coder", "env": {"id": "agentrl/TinyCoder-v0"}}
    return parse({**document, "rewards": [judge], "engine": {"api_key_env": ENGINE, **engine}})


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SECRETS | HARMLESS) - {"PATH"}:
        monkeypatch.setenv(name, "x")


def child_of(folder: Path, settings: RunConfig, name: str, argv: list[str]) -> Child:
    """A child of a run that is not started yet, and runs `argv` in the place of its own."""
    run, nobody = RunDir(folder), cast("Any", None)
    run.logs.mkdir()
    children = RunChildren(run, settings, Looks(nobody), nobody, nobody, mark={})
    if name == "learner":
        child = WatchedLearner(children.registry).child
    elif name == "worker-0":
        child = children.workers.create(0)
    else:
        child = children.engines.create(name, lambda _: nobody).child
    child.argv = argv
    return child


def seen(names: Any) -> set[str]:
    return {*names} & (SECRETS | HARMLESS)


@each_case(
    ("child", "engine", "gets"),
    [
        ("engine-0", {}, set[str]()),
        ("engine-role-critic-0", {}, set[str]()),
        ("engine-given-0", {}, set[str]()),
        ("engine-0", {"secret_env": [TRACKER]}, {TRACKER}),
        ("engine-0", {"weights_url": "s3://bucket/weights"}, {HUB, STORED, TRACKER, ENGINE}),
        ("learner", {}, {*DATABASE, ENGINE, HUB}),
        ("learner", {"weights_url": "s3://bucket/weights"}, {*DATABASE, ENGINE, HUB, STORED, TRACKER}),
        ("worker-0", {}, SECRETS),
    ],
)
async def test_a_child_gets_the_secrets_that_it_needs(
    tmp_path: Path, child: str, engine: dict[str, Any], gets: set[str]
) -> None:
    one = child_of(tmp_path, config(**engine), child, PRINTS)
    one.start()
    with trio.fail_after(300):
        assert await one.wait() == 0
    assert seen(json.loads(one.log_path.read_text())) == gets | HARMLESS


def test_neither_does_one_on_another_node_which_gets_the_variables_that_the_node_lacks(tmp_path: Path) -> None:
    os.environ.pop(JUDGE)
    seat = Seat(math.inf)  # a lease that ends takes the whole process with it, and this one is pytest's
    withheld = Withheld(database=True, others=True)
    command = ChildCommand(argv=PRINTS, log=tmp_path / "log", error=tmp_path / "error", withheld=withheld)
    seat.start(command, {"PGOPTIONS": "x", "MY_TOKEN": "x", "MY_OWN": "x"})
    assert seat._child is not None
    assert seat._child.process.wait(300) == 0
    names = {*json.loads((tmp_path / "log").read_text())}
    assert seen(names) == HARMLESS
    assert names & {"PGOPTIONS", "MY_TOKEN", "MY_OWN"} == {"MY_OWN"}
    seat._owner.close()


@pytest.mark.medium
def test_another_rank_of_the_learner_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ.pop(JUDGE)  # the learner has none of the judges' keys
    for name in OWN_ENGINES:
        monkeypatch.setenv(name, "x")
    ranks = Leader([torch.device("cpu")] * 2, deadline_s=120, start_s=200)
    try:
        (other,) = ranks.processes
        variables = Path(f"/proc/{other}/environ").read_bytes().split(b"\0")
        names = {os.fsdecode(one).partition("=")[0] for one in variables}
        assert seen(names) == HARMLESS and not names & OWN_ENGINES
    finally:
        ranks.close()


async def test_an_agent_program_gets_neither_the_database_nor_the_runs_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OWN_ENGINES:
        monkeypatch.setenv(name, "x")
    session: Any = SimpleNamespace(variables={"PGDATABASE": "its own"}, task={})
    done = await _command(["env"], session)
    names = {line.partition("=")[0] for line in done.stdout.decode().splitlines()}
    assert seen(names) == (SECRETS | HARMLESS) - DATABASE
    assert "PGDATABASE" in names and not names & OWN_ENGINES


@each_case(
    ("child", "gets"),
    [("engine-0", OWN_ENGINES), ("learner", OWN_ENGINES), ("worker-0", {"AGENTRL_ENGINE_KEY"})],
)
async def test_only_what_changes_an_engine_gets_the_secret_that_signs(
    tmp_path: Path, child: str, gets: set[str]
) -> None:
    key, made = EngineKey.fresh(), config()
    made = made.model_copy(update={"engine": made.engine.with_key(key)})
    argv = ["-c", "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if v}))"]
    one = child_of(tmp_path, made, child, argv)
    if child == "engine-0":
        one.env = {**one.env, **key.variables(signs=True)}  # as at the start of its server
    one.start()
    with trio.fail_after(300):
        assert await one.wait() == 0
    found = json.loads(one.log_path.read_text())
    assert found.keys() & OWN_ENGINES == gets and found["AGENTRL_ENGINE_KEY"] == key.value
