"""The `[cluster]` table: numbers of processes, and what Ray cannot do."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agentrl import config as configuration
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.run.run_folder import RunDir


def parsed(**sections: Any) -> RunConfig:
    return configuration.parse({"model": "m", "env": {"id": "test/none"}, **sections})


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"engine": {"kind": "vllm", "replicas": [[0]]}}, "engine.replicas"),
        ({"cluster": {"engine": {"gpus": 1}}}, "cluster.engine.gpus"),
        ({"engine": {"kind": "vllm", "sync": "ipc"}, "train": {"device": "cuda"}}, "engine.sync"),
        ({"train": {"device": "cuda"}}, "cluster.learner.gpus"),
    ],
)
def test_what_ray_cannot_do_is_refused_by_name(sections: dict[str, Any], field: str) -> None:
    cluster = {"launcher": "ray", **sections.pop("cluster", {})}
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        parsed(cluster=cluster, **sections)


@pytest.mark.parametrize("part", ["engine", "learner"])
def test_gpus_that_nobody_gives_away_are_refused(part: str) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.{part}\.gpus = 1: .*cluster\.launcher = 'ray'"):
        parsed(cluster={part: {"gpus": 1}}, engine={"kind": "vllm"})


@pytest.mark.parametrize("store", ["", "sqlite", "runs/store.sqlite", [], ["postgresql://h/a", "postgresql://h/b"]])
def test_a_store_that_is_none_is_refused_before_anything_is_made(store: str | list[str]) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.store = .*give postgresql://user@host/database"):
        parsed(cluster={"store": store})


def test_engines_and_learner_of_different_hosts_may_have_gpus_of_one_number() -> None:
    sections = {"engine": {"kind": "vllm", "sync": "nccl"}, "train": {"device": "cuda"}}
    with pytest.raises(ConfigError, match="give the learner another one"):
        parsed(**sections)
    parsed(cluster={"launcher": "ray", "engine": {"gpus": 1}, "learner": {"gpus": 1}}, **sections)


def test_weights_on_their_way_lie_where_all_nodes_see_them(tmp_path) -> None:
    config = parsed(cluster={"launcher": "ray"})
    run = RunDir.create(tmp_path / "run", config)
    assert run.scratch.parent == run.path
    local = RunDir.create(tmp_path / "local", parsed())
    assert local.scratch.parent != local.path


@pytest.mark.parametrize(
    ("key", "store"),
    [
        ("store", "mysql://me:pa@ss-word@host/runs"),
        ("store", ["postgresql://me@host/runs", "redis://me:ss-word/@host"]),
        ("store", "postgresql:/me:pa@ss-word@host/runs"),
        ("store", "me:pa@ss-word@host/runs?sslpassword=ss-word"),
        ("store", "postgres:me@host/runs?password=ss-word"),
        ("store", "host=there dbname=runs password='a ss-word'"),
        ("store", {"url": "postgresql://me:pa@ss-word@host/runs"}),
        ("store", [{"url": "postgresql://me:pa@ss-word@host/runs"}]),
        ("stores", "postgresql://me:pa ss-word@host/runs"),
        ("address", ["postgresql://me:pa@ss-word@host/runs"]),
    ],
)
def test_no_part_of_a_password_is_printed(key: str, store: object) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.{key}") as raised:
        parsed(cluster={key: store})
    assert not re.search("ss-|word(?!=)", str(raised.value)), raised.value
    assert "host" in str(raised.value) or key == "store", "what helps to find it is said"
