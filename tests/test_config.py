"""Bad settings are named: field, value, mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl import config
from agentrl.errors import ConfigError, UsageError

MINIMAL = {"model": "m", "env": {"id": "e"}}


def broken(**sections: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config.parse({**MINIMAL, **sections})
    return caught.value


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    error = broken(train={"lrr": 1e-3})
    assert (error.field, error.value) == ("train.lrr", 1e-3)
    assert "did you mean 'lr'" in str(error)


def test_a_wrong_type_names_field_and_value() -> None:
    error = broken(train={"steps": "many"})
    assert error.field == "train.steps"
    assert "'many'" in str(error)


def test_a_missing_model_is_required() -> None:
    with pytest.raises(ConfigError, match=r"model = None: required"):
        config.parse({"env": {"id": "e"}})


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"rollout": {"max_running": 4, "group_size": 8}}, "rollout.max_running"),
        ({"rollout": {"max_tokens_per_turn": 1024, "max_context": 1024}}, "rollout.max_tokens_per_turn"),
        ({"rollout": {"max_context": 9000}}, "train.tokens_per_batch"),
        ({"algo": {"importance": "none", "kl_weight": 0.1}}, "algo.importance"),
        ({"eval": {"sets": [{"name": "a"}, {"name": "a"}]}}, "eval.sets"),
        ({"train": {"lora_alpha": 8}}, "train.lora_alpha"),
        ({"train": {"lora_rank": 8, "lora_targets": ["q_proj", "lm_head"]}}, "train.lora_targets"),
        ({"train": {"lora_rank": 1024}, "engine": {"kind": "vllm"}}, "train.lora_rank"),
        ({"engine": {"sync": "delta"}}, "engine.sync"),
    ],
)
def test_an_impossible_combination_names_the_field_to_change(sections: dict[str, object], field: str) -> None:
    assert broken(**sections).field == field


@pytest.mark.parametrize(
    ("engine", "rank", "sync"),
    [
        ({"kind": "vllm"}, 0, "full"),
        ({"kind": "vllm"}, 8, "adapter"),
        ({"kind": "embedded"}, 8, "full"),
        ({"kind": "vllm", "sync": "full"}, 1024, "full"),
        ({"kind": "vllm", "sync": "delta"}, 8, "delta"),
    ],
)
def test_an_adapter_travels_alone_where_the_engine_takes_it(engine: dict[str, str], rank: int, sync: str) -> None:
    assert config.parse({**MINIMAL, "engine": engine, "train": {"lora_rank": rank}}).sync == sync


def test_an_unknown_key_inside_a_list_is_found() -> None:
    assert broken(eval={"sets": [{"name": "a", "k": 1}]}).field == "eval.sets.0.k"


def test_overrides_are_toml_and_bare_words_are_strings(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "m"\n[env]\nid = "e"\n')
    loaded = config.load(file, ["train.lr=1e-4", "env.kwargs.level=easy", "env.kwargs.n=3", "seed=7", "engine=vllm"])
    assert loaded.train.lr == 1e-4
    assert loaded.env.kwargs == {"level": "easy", "n": 3}
    assert (loaded.seed, loaded.engine.kind) == (7, "vllm")


@pytest.mark.parametrize("override", ["novalue", "=3"])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        config.apply_override({}, override)


def test_an_override_through_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="is a value, not a section"):
        config.apply_override({"seed": 3}, "seed.deep=1")


def test_a_file_that_is_not_toml_says_so(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("model = \n")
    with pytest.raises(UsageError, match="not valid TOML"):
        config.load(file)
    with pytest.raises(UsageError, match="cannot read run file"):
        config.load(tmp_path / "missing.toml")


def test_json_carries_the_whole_configuration() -> None:
    parsed = config.parse({**MINIMAL, "eval": {"sets": [{"name": "a", "n": 3}]}, "train": {"betas": [0.8, 0.9]}})
    assert config.from_json(config.to_json(parsed)) == parsed
