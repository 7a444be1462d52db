"""Settings that another one takes back are said before anything starts, with what to type; doing so silences them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl import config as configuration
from agentrl.errors import RunFailed
from agentrl.runtime.contradictions import contradictions
from agentrl.runtime.trainer import check_startable

ROOT = Path(__file__).resolve().parents[2]
RUN = {"model": "agentrl/tiny-coder", "env": {"id": "agentrl/Combination-v0"}}
SOURCE = {"source": "s", "kind": "prm", "url": "http://h"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["rollout.step_deadline_s=900"], "the run ends after train.stall_deadline_s = 600"),
        (["rollout.turn_deadline_s=700", "train.stall_deadline_s=800"], "lost to rollout.group_deadline_s = 600"),
        (["rollout.episode_deadline_s=3600"], "longer episodes are lost to rollout.group_deadline_s = 600"),
        (["buffer.quorum=3", "buffer.close=full"], "groups wait for all members: "),
        (["buffer.quorum=3", "buffer.max_lag=0"], "groups wait for all members at buffer.max_lag = 0"),
        (["buffer.close=quorum", "buffer.max_lag=0"], "leaves the late members of a quorum untrained"),
        (["buffer.window=0.1"], "no effect with buffer.order = 'oldest'"),
        (["rollout.pivot.below=1"], "no effect with rule = 'uniform'"),
        (["engine.hedge_after=2", "engine.stream_tokens=1"], "while there is one engine"),
        (["engine.kind=vllm", "train.lora_rank=8", "engine.weights_url=s3://b/x"], "only adapters travel"),
        (["engine.canary=false", "engine.canary_tolerance=0.1"], "no effect without the canary"),
        (["engine.stage=file"], "vLLM alone stages"),
        (["engine.kind=vllm", "train.lora_rank=8", "engine.stage=file"], "only what is a file"),
        (["engine.dtype=bfloat16"], "the embedded engine computes in float32"),
        (["train.optimizer=sgd", "train.betas=[0.9, 0.99]"], "no effect with train.optimizer = 'sgd'"),
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
        ({"kind": "shaping", "call": "m:f", "box_s": 5.0}, "box_s, url"),
        ({"kind": "teacher", "late": "partial", "weight": 2.0}, "weight"),
    ],
)
def test_a_source_says_what_its_kind_has_no_use_for(changes: dict[str, Any], useless: str) -> None:
    (line,) = contradictions(parsed([], rewards=[SOURCE | changes]))
    assert line.endswith(f"has no use for {useless}: leave it out")
    assert list(contradictions(parsed([], rewards=[SOURCE]))) == []


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

    monkeypatch.setattr("agentrl.runtime.trainer.renderer_of", stop)
    with pytest.raises(RunFailed, match="far enough"):
        check_startable(parsed(["buffer.window=0.1"]))
    assert capsys.readouterr().err == (
        "agentrl: warning: buffer.window has no effect with buffer.order = 'oldest': --set buffer.order=windowed\n"
    )
