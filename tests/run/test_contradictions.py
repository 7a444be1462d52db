"""Settings that another one takes back are said before anything starts, with what to type; doing so silences them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl import config as configuration
from agentrl.config.contradictions import contradictions
from agentrl.errors import RunFailed
from agentrl.run.trainer import check_startable

ROOT = Path(__file__).resolve().parents[2]
RUN = {"model": "agentrl/tiny-coder", "env": {"id": "agentrl/Combination-v0"}}
SOURCE = {"source": "s", "kind": "prm", "url": "http://h"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["rollout.step_deadline_s=900"], "the run ends after train.stall_deadline_s = 600"),
        (["rollout.turn_deadline_s=700", "train.stall_deadline_s=800"], "lost to rollout.group_deadline_s = 600"),
        (["rollout.episode_deadline_s=3600"], "longer episodes are lost to rollout.group_deadline_s = 600"),
        (["buffer.close=quorum", "buffer.max_lag=0"], "leaves the late members of a quorum untrained"),
        (["engine.hedge_after=2", "engine.stream_tokens=1"], "while there is one engine"),
        (["engine.kind=vllm", "train.lora_rank=8", "engine.weights_url=s3://b/x"], "only adapters travel"),
        (["train.optimizer=sgd", "train.betas=[0.9, 0.99]"], "no effect with train.optimizer = 'sgd'"),
        (["algo.kl_form=reward"], "algo.kl_form has no effect without algo.kl_weight"),
        (["algo.reject_bounds=[0.5, 1.5]"], "algo.reject_bounds has no effect without algo.reject"),
        (["algo.importance=none", "algo.importance_bounds=[0.5, 2.0]"], "with algo.importance = 'none'"),
        (["algo.importance=none", "algo.importance_bounds=[0.0, 1.5]"], "with algo.importance = 'none'"),
        (["algo.distil_level=episode"], "without algo.distil_weight"),
        (["league.share=0.3"], "no [[roles]] table has plays"),
        (["alarms.actions.entropy=stop"], "without alarms.entropy_below"),
        (["alarms.actions.clip=stop", "alarms.clip_above=false"], "without alarms.clip_above"),
        (["train.steps=20", "train.warmup_steps=20"], "the rate never reaches train.lr within train.steps = 20"),
    ],
)
def test_it_is_said_and_what_it_says_to_type_mends_it(given: list[str], said: str) -> None:
    (line,) = contradictions(parsed(given))
    assert said in line
    _, typed = line.split("--set ")
    assert list(contradictions(parsed([*given, typed]))) == []


def test_engines_of_others_take_no_settings_of_the_runs_own() -> None:
    urls = ["engine.kind=vllm", 'engine.urls=["http://h:8000"]']
    (line,) = contradictions(parsed([*urls, "engine.threads=2", "engine.replicas=3"]))
    assert "[engine] replicas, threads: no effect" in line
    assert list(contradictions(parsed(urls))) == []


def parsed(given: list[str], **sections: Any) -> configuration.RunConfig:
    document = {**RUN, **sections}
    for one in given:
        configuration.apply_override(document, one)
    return configuration.parse(document)


@pytest.mark.parametrize(
    ("changes", "useless"),
    [
        ({"rubric": "Is it short?", "gamma": 0.5}, "gamma, rubric"),
        ({"kind": "callable", "call": "m:f"}, "url"),
        ({"kind": "shaping", "call": "m:f", "image": "python:3.12"}, "image, url"),
        ({"kind": "teacher", "late": "partial", "weight": 2.0}, "weight"),
    ],
)
def test_a_source_says_what_its_kind_has_no_use_for(changes: dict[str, Any], useless: str) -> None:
    (line,) = contradictions(parsed([], rewards=[SOURCE | changes]))
    assert line.endswith(f"has no use for {useless}: leave it out")
    assert list(contradictions(parsed([], rewards=[SOURCE]))) == []


def test_rewards_that_no_algorithm_weighs_are_said() -> None:
    off = {"algo": {"process_weight": 0.0}}
    (line,) = contradictions(parsed([], rewards=[SOURCE], **off))
    assert "algo.process_weight = 0 leaves reward source 's' without effect" in line
    assert list(contradictions(parsed([line.split("--set ")[1]], rewards=[SOURCE], **off))) == []
    weighs = [{"id": "agentrl/Combination-v0"}, {"id": "agentrl/Calculator-v0", "algo": {"kind": "grpo"}}]
    assert list(contradictions(parsed([], rewards=[SOURCE], tasks=weighs, **off))) == []


def test_an_algorithm_of_one_table_is_named_by_it() -> None:
    (line,) = contradictions(parsed([], tasks=[{"algo": {"reject_bounds": [0.1, 2.0]}}]))
    assert line == "tasks.0.algo.reject_bounds has no effect without tasks.0.algo.reject: leave it out"


def test_no_example_contradicts_itself() -> None:
    files = [*ROOT.glob("examples/*.toml"), *ROOT.glob("examples/*/*.toml"), *ROOT.glob("examples/*/*/*.toml")]
    files = [file for file in files if "[env]" in (text := file.read_text()) or "[[tasks]]" in text]
    assert len(files) > 5
    for file in files:
        assert list(contradictions(configuration.load(file))) == [], file


def test_a_run_says_it_before_it_starts_anything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: object) -> None:
        raise RunFailed("far enough")

    monkeypatch.setattr("agentrl.run.trainer.renderer_of", stop)
    with pytest.raises(RunFailed, match="far enough"):
        check_startable(parsed(["algo.kl_form=reward"]))
    assert capsys.readouterr().err == (
        "agentrl: warning: algo.kl_form has no effect without algo.kl_weight: --set algo.kl_form=k3\n"
    )
