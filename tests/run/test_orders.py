"""The settings of the buffer reach the store: the order of groups, and what is skipped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from each_case import each_case
from rich.console import Console
from store.play import admit, play, serve

from agentrl import config as configuration
from agentrl import registry
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, FormatError
from agentrl.rollout.admitter import bounds_of
from agentrl.run.alarms import LagBound
from agentrl.run.learning.take_batches import BatchTaker
from agentrl.run.reporting import report
from agentrl.run.take_orders import returns_of, take_order
from agentrl.store import Freshest, Oldest, Prioritised, RunStore, Windowed

from .loop_parts import InlineCalls


class Mine(Oldest):
    """An order of a user."""


def run_config(**buffer: Any) -> RunConfig:
    return configuration.parse({"model": "m", "env": {"id": "test/none"}, "seed": 7, "buffer": buffer})


def test_an_order_is_found_by_its_name_or_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    assert take_order(run_config()) == Oldest()
    assert take_order(run_config(order="windowed")) == Windowed(0.3)
    assert take_order(run_config(order="freshest")) == Freshest()
    assert take_order(run_config(order="prioritised")) == Prioritised(seed=7)
    assert isinstance(take_order(run_config(order=f"{__name__}:Mine")), Mine)
    registry.register("orders", "mine", Mine)
    assert isinstance(take_order(run_config(order="mine")), Mine)


def test_an_unknown_order_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"buffer\.order = 'newest': give oldest, windowed, freshest, prioritised"):
        take_order(run_config(order="newest"))


def test_skipping_needs_a_baseline() -> None:
    with pytest.raises(
        ConfigError,
        match=r"buffer\.skip_without_signal = True: algo\.kind = 'grpo' learns from a group whose returns are equal",
    ):
        configuration.parse(
            {
                "model": "m",
                "env": {"id": "test/none"},
                "algo": {"baseline": "none"},
                "buffer": {"skip_without_signal": True},
            }
        )


def test_skipping_is_refused_where_sources_are_scaled_apart() -> None:
    """Two sources may disagree about members whose sums are equal; scaled apart, that is an advantage."""
    document = {"model": "m", "env": {"id": "test/none"}, "algo": {"scale": "std_by_source"}}
    with pytest.raises(ConfigError, match="learns from a group whose returns are equal"):
        configuration.parse({**document, "buffer": {"skip_without_signal": True}})


def test_returns_are_those_of_the_run_file() -> None:
    document = {"model": "m", "env": {"id": "test/none"}, "algo": {"process_weight": 0.25, "discount": 0.5}}
    config = configuration.parse({**document, "rollout": {"roles": {"judge": "frozen", "solver": "trained"}}})
    found = returns_of(config)
    assert (found.process_weight, found.discount, found.frozen) == (0.25, 0.5, {"judge"})


def test_each_environment_has_the_returns_of_its_own_algorithm() -> None:
    tables = [
        {"id": "test/none"},
        {"id": "test/half", "algo": {"process_weight": 0.5, "discount": 0.9}},
        {"id": "test/same", "algo": {"clip_low": 0.1}},
        {"id": "test/critic", "algo": {"kind": "ppo"}},
        {"id": "test/taught", "algo": {"distil_weight": 1.0, "teacher": "t"}},
        {"id": "test/world", "algo": {"observation_weight": 0.1}},
    ]
    config = configuration.parse({"model": "m", "tasks": tables, "algo": {"process_weight": 0.25}})
    found = returns_of(config)
    assert found.for_env("test/none") == found.for_env("test/unknown") == found
    half = found.for_env("test/half")
    assert (half.process_weight, half.discount, half.skips) == (0.5, 0.9, True)
    assert found.for_env("test/same").process_weight == 1.0
    assert [found.for_env(f"test/{name}").skips for name in ("none", "critic", "taught", "world")] == [
        True, False, False, False
    ]  # fmt: skip


def test_each_role_has_the_returns_of_its_own_algorithm() -> None:
    roles = [{"name": "critic", "algo": {"process_weight": 0.5, "discount": 0.9}}, {"name": "solver"}]
    document = {"model": "m", "env": {"id": "test/none"}, "roles": roles}
    found = returns_of(configuration.parse(document))
    assert (found.weight_and_discount("critic"), found.weight_and_discount("solver"), found.skips) == (
        (0.5, 0.9),
        (1.0, 1.0),
        True,
    )
    roles[0]["algo"] = {"kind": "ppo"}
    assert not returns_of(configuration.parse(document)).skips


@pytest.mark.parametrize("algo", [{"distil_weight": 1.0, "teacher": "t"}, {"observation_weight": 0.1}])
def test_skipping_is_refused_where_equal_returns_leave_something_to_learn(algo: dict[str, Any]) -> None:
    document = {"model": "m", "env": {"id": "test/none"}, "algo": algo}
    with pytest.raises(ConfigError, match="learns from a group whose returns are equal"):
        configuration.parse({**document, "buffer": {"skip_without_signal": True}})


@each_case("algo", [{"kind": "ppo"}, {"distil_weight": 1.0, "teacher": "t"}, {"baseline": "none"}])
def test_by_default_a_run_that_learns_from_equal_returns_skips_none(algo: dict[str, Any]) -> None:
    config = configuration.parse({"model": "m", "env": {"id": "test/none"}, "algo": algo})
    assert config.buffer.skip_without_signal == "auto"
    assert not returns_of(config).skips


def test_by_default_a_step_skips_as_many_groups_as_it_takes() -> None:
    assert run_config(groups_per_step=6).buffer.skips == 6
    assert run_config(groups_per_step=6, skip_without_signal=False).buffer.skips == 0


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"format": 2}', '{"format": "1"}'])
def test_a_stored_run_of_another_format_is_refused(text: str) -> None:
    with pytest.raises(FormatError) as refused:
        configuration.from_json(text, "config.json")
    assert refused.value.expected == 1 and str(refused.value).startswith("config.json has run format ")


def test_a_stored_run_with_a_wrong_setting_is_refused() -> None:
    with pytest.raises(ConfigError):
        configuration.from_json('{"format": 1, "buffer": []}')


def test_the_capacity_in_tokens_reaches_admission() -> None:
    assert bounds_of(run_config(max_tokens=5000)).max_tokens == 5000
    assert bounds_of(run_config()).max_tokens is None


@each_case(
    ("skipping", "expected"),
    [
        ({}, [(2, False), (3, True)]),
        ({"skip_without_signal": True}, [(2, False), (3, True)]),
        ({"skip_without_signal": False}, [(3, False)]),
    ],
)
async def test_the_learner_takes_by_the_settings_of_the_buffer(
    tmp_path: Path, skipping: dict[str, Any], expected: list[tuple[int, bool]]
) -> None:
    config = run_config(groups_per_step=1, order="freshest", **skipping)
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        serve(store, 0)
        admit(store, limit=3)
        for claim in store.leases.claim("w", 6, lease_s=1e6):
            play(store, claim, outcome=float(claim.group_id == 3 or claim.member))
        batches = BatchTaker(
            cast("Any", SimpleNamespace(apply_settings=_nothing, make_way=_nothing)),
            InlineCalls(store),
            LagBound(config.buffer.max_lag, now=config.buffer.max_lag),
            buffer=config.buffer,
            quorum=config.quorum,
            steps=config.train.steps,
            stall_deadline_s=config.train.stall_deadline_s,
            group_deadline_s=config.rollout.group_deadline_s,
            order=take_order(config),
            returns=returns_of(config),
        )
        batch = await batches.take(1)
    assert batch is not None
    assert [(one.id, one.skipped) for one in batch.groups] == expected


async def _nothing() -> None: ...


def side(**changes: Any) -> dict[str, Any]:
    lengths = dict.fromkeys(("mean", "p25", "p50", "p75", "p95"), 2.0)
    same = {"turns": lengths, "tokens": lengths, "seconds": lengths, "weighted_tokens": 2.0}
    return {"episodes": 8, **same, "advantage_by_quartile": [None, 0.5, 0.25, -0.5], **changes}


def test_the_summary_shows_what_was_trained_beside_what_was_played() -> None:
    console = Console(record=True, width=120)
    tokens = {"mean": 6.0, "p25": 3.0, "p50": 3.0, "p75": 9.0, "p95": 12.0}
    bias = {"admitted": side(tokens=tokens), "trained": side(episodes=4)}
    report.show_bias(console, {"bias": bias, "buffer": {"order": "freshest", "close": "full"}})
    text = console.export_text()
    assert "trained / played: order freshest, close full" in text
    (row,) = [line for line in text.splitlines() if "tokens of an episode" in line]
    assert [cell.strip() for cell in row.split("│")[2:7]] == ["2 / 6", "2 / 3", "2 / 3", "2 / 9", "2 / 12"]
    assert "episodes: 4 of 8 that ended" in text


def test_a_run_that_trained_every_episode_shows_no_bias() -> None:
    console = Console(record=True)
    report.show_bias(console, {"bias": {"admitted": side(), "trained": side()}, "buffer": {}})
    assert console.export_text() == ""
