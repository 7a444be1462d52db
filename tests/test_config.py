"""Bad settings are named: field, value, mend."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from each_case import each_case
from pydantic import BaseModel

from agentrl import config, registry
from agentrl.algos.algorithm import Algorithm
from agentrl.config import RunConfig
from agentrl.config.sections import switched_off
from agentrl.errors import ConfigError, UsageError
from agentrl.records import SamplingParams

MINIMAL = {"model": "m", "env": {"id": "e"}}


def broken(**sections: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config.parse({**MINIMAL, **sections})
    return caught.value


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    error = broken(train={"lrr": 1e-3})
    assert (error.field, error.value) == ("train.lrr", 1e-3)
    assert "did you mean 'lr'" in str(error)


def test_what_should_be_a_list_is_named_in_the_words_of_a_run_file() -> None:
    error = broken(algo={"kind": "grpo", "importance_bounds": 2.0})
    assert str(error) == "algo.importance_bounds = 2.0: Input should be a list"


def test_a_wrong_type_names_field_and_value() -> None:
    error = broken(train={"steps": "many"})
    assert error.field == "train.steps"
    assert "'many'" in str(error)


def test_a_missing_model_is_required() -> None:
    with pytest.raises(ConfigError, match=r"^model is required: "):
        config.parse({"env": {"id": "e"}})


@each_case(
    ("sections", "field"),
    [
        ({"rollout": {"max_running": 4, "group_size": 8}}, "rollout.max_running"),
        ({"rollout": {"group_size": 4}, "buffer": {"close": 5}}, "buffer.close"),
        ({"buffer": {"close": 1}}, "buffer.close"),
        ({"rollout": {"max_tokens_per_turn": 1024, "max_context": 1024}}, "rollout.max_tokens_per_turn"),
        ({"rollout": {"max_context": 9000}}, "train.tokens_per_batch"),
        ({"algo": {"importance": "none", "kl_weight": 0.1}}, "algo.importance"),
        ({"eval": {"sets": [{"name": "a"}, {"name": "a"}]}}, "eval.sets"),
        ({"train": {"lora_alpha": 8}}, "train.lora_alpha"),
        ({"train": {"lora_rank": 8, "lora_targets": ["q_proj", "lm_head"]}}, "train.lora_targets"),
        ({"train": {"lora_rank": 1024}, "engine": {"kind": "vllm"}}, "train.lora_rank"),
        ({"engine": {"sync": "delta"}}, "engine.sync"),
        ({"engine": {"routed_experts": True}}, "engine.routed_experts"),
        ({"engine": {"sync": "nccl"}, "train": {"device": "cuda"}}, "engine.sync"),
        ({"engine": {"sync": "ipc"}, "train": {"device": "cuda"}}, "engine.sync"),
        ({"train": {"device": "tpu"}}, "train.device"),
    ],
)
def test_an_impossible_combination_names_the_field_to_change(sections: dict[str, object], field: str) -> None:
    assert broken(**sections).field == field


@each_case(
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


@each_case(
    ("sync", "train", "engine", "field", "hint"),
    [
        ("nccl", {"device": "cuda:1", "lora_rank": 8}, {}, "engine.sync", "'auto' sends it alone, 'full' merged"),
        ("ipc", {"device": "cuda", "lora_rank": 8}, {}, "engine.sync", "'auto' sends it alone, 'full' merged"),
        ("nccl", {}, {}, "train.device", "give 'cuda', or engine.sync = 'auto'"),
        ("ipc", {"device": "cpu"}, {}, "train.device", "give 'cuda', or engine.sync = 'auto'"),
        ("nccl", {"device": "cuda"}, {}, "train.device", "on GPU 0: give the learner another one, as 'cuda:1'"),
        ("nccl", {"device": "cuda:0"}, {}, "train.device", "or engine.sync = 'ipc' to share one"),
        (
            "nccl",
            {"device": "cuda:2"},
            {"replicas": [[0], [1, 2]]},
            "train.device",
            "engines are on GPU 0, 1, 2",
        ),
        ("nccl", {"device": "cuda:1"}, {"replicas": 2}, "engine.replicas", "give each replica its own"),
        ("nccl", {"device": "cuda:3"}, {"replicas": [[0, 1], [1]]}, "engine.replicas", "give each replica its own"),
        ("ipc", {"device": "cuda:1"}, {}, "train.device", "have the learner and all engines on it, or give 'nccl'"),
        ("ipc", {"device": "cuda"}, {"replicas": [[0], [1]]}, "train.device", "on GPU 0, 1, and 'ipc' shares one"),
    ],
)
def test_weights_cannot_go_from_memory_to_memory_everywhere(
    sync: str, train: dict[str, object], engine: dict[str, object], field: str, hint: str
) -> None:
    error = broken(train=train, engine={"kind": "vllm", "sync": sync, **engine})
    assert error.field == field and hint in str(error)


@each_case(
    ("sync", "device", "engine"),
    [
        ("nccl", "cuda:1", {}),
        ("nccl", "cuda", {"urls": ["http://a:1", "http://b:1"]}),
        ("nccl", "cuda:3", {"replicas": [[0], [1, 2]]}),
        ("ipc", "cuda", {"replicas": 2}),
        ("ipc", "cuda:1", {"replicas": [[1], [1]]}),
        ("ipc", "cuda:3", {"urls": ["http://127.0.0.1:1"]}),
    ],
)
def test_where_weights_can_go_from_memory_to_memory(sync: str, device: str, engine: dict[str, object]) -> None:
    parsed = config.parse({**MINIMAL, "train": {"device": device}, "engine": {"kind": "vllm", "sync": sync, **engine}})
    assert parsed.sync == sync and parsed.syncs_memory


@each_case(
    ("engine", "field", "hint"),
    [
        ({"replicas": [[0]]}, "engine.replicas", "for replicas of vLLM or SGLang that the run starts"),
        ({"kind": "vllm", "urls": ["http://a:1"], "replicas": [[0]]}, "engine.replicas", "leave it out"),
        ({"kind": "vllm", "replicas": [[0, 0]]}, "engine.replicas", "takes each of its GPUs once"),
        ({"kind": "vllm", "replicas": [[]]}, "engine.replicas", "at least 1"),
        ({"kind": "vllm", "replicas": [[-1]]}, "engine.replicas", "greater than or equal to 0"),
    ],
)
def test_gpus_that_cannot_be_placed_are_refused(engine: dict[str, object], field: str, hint: str) -> None:
    error = broken(engine=engine)
    assert error.field == field and hint in str(error)


def test_a_replica_for_each_entry_of_gpus() -> None:
    assert config.parse({**MINIMAL, "engine": {"kind": "vllm", "replicas": [[0], [1, 2]]}}).engine.places == [
        [0],
        [1, 2],
    ]
    assert config.parse({**MINIMAL, "engine": {"kind": "vllm", "replicas": 2}}).engine.places == [[], []]


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
    with pytest.raises(UsageError, match="examples lie in its repository"):
        config.load(Path("examples/missing.toml"))


def test_json_carries_the_whole_configuration() -> None:
    parsed = config.parse({**MINIMAL, "eval": {"sets": [{"name": "a", "n": 3}]}, "train": {"betas": [0.8, 0.9]}})
    assert config.from_json(config.to_json(parsed)) == parsed


@pytest.mark.medium
def test_the_page_of_all_keys_is_that_of_the_code() -> None:
    from agentrl.config.reference import all_keys, page

    written = (Path(__file__).parent.parent / "docs" / "reference" / "run-file.md").read_text()
    assert written == page(), "write it anew: agentrl keys --page > docs/reference/run-file.md"
    expected = list(leaves(RunConfig))  # with the keys that all algorithms share
    shared = [name for name in expected if name.startswith("algo.")]
    kinds = [config.algorithm(kind) for kind in registry.ids("algorithms")]
    theirs = {f"algo.{name}" for kind in kinds for name in kind.model_fields}
    found = [key.name for key in all_keys()]
    assert [name for name in found if name in shared or not name.startswith("algo.")] == expected
    assert {name for name in found if name.startswith("algo.")} == theirs


@pytest.mark.medium
def test_the_page_says_in_words_which_values_a_key_takes() -> None:
    from agentrl.config.reference import all_keys, first_keys

    words = r"(list of |two |lists of )*(text|integer|number|table|true or false)s?( from \S+| above \S+)?"
    words += r"(,? (up )?to \S+|, below \S+)?"
    value = rf"({words}|`[^`]+`)"
    values = rf"{value}(, (or )?{value})*"
    some = rf"(; `[^`]+`: {values})*"  # algorithms that take other ones
    assert [(key.name, key.kind) for key in all_keys() if not re.fullmatch(values + some, key.kind)] == []
    kinds = {key.name: key.kind for key in all_keys()}
    assert kinds["rollout.resume"] == '`"tokens"`, `"turns"`, `"episode"`, `"group"`'
    assert kinds["train.betas"] == "two numbers from 0, below 1"
    assert kinds["eval.top_p"] == "number above 0, up to 1, or `false`"
    assert sum(map(len, first_keys().values())) <= 32


def test_the_meaning_of_every_key_is_whole_sentences() -> None:
    from agentrl.config.reference import all_keys

    sentences = re.compile(r"(all but [^:]*: |`[^:]*`: )?[A-Z`\"].*[.)]", re.DOTALL)  # some name their algorithms first
    assert [key.name for key in all_keys() if not sentences.fullmatch(key.meaning)] == []


@pytest.mark.medium
def test_a_setting_of_several_algorithms_is_one_key_that_names_who_differs() -> None:
    from agentrl.config.reference import all_keys

    keys = {key.name: key for key in all_keys()}
    assert len(keys) == len(all_keys())
    assert keys["algo.clip_low"].default == "0.2; cispo 1.0; gspo 0.0003"
    assert re.match("all but .*`sapo`: Distance below 1 at which PPO's clip", keys["algo.clip_low"].meaning)
    assert "`cispo`: Distance of the lower bound of a token's weight" in keys["algo.clip_low"].meaning
    assert keys["algo.importance"].kind.startswith(
        '`"token"`, `"sequence"`, `"geometric"`, `"none"`; `cispo`: `"token"`, `"none"`'
    )
    assert keys["algo.critic"].meaning.startswith("`ppo`: ")


def leaves(section: type[RunConfig]) -> Iterator[str]:
    """Dotted names of all fields, found through pydantic's own schema."""
    whole = section.model_json_schema()

    def of(schema: dict[str, Any], prefix: str) -> Iterator[str]:
        for name, field in schema["properties"].items():
            options = [field, field.get("items", {}), *field.get("anyOf", [])]
            inner = next((whole["$defs"][each["$ref"].rpartition("/")[2]] for each in options if "$ref" in each), None)
            if name == "algo" and prefix:  # its keys are those of [algo]
                inner = None
            several = "[]" if field.get("type") == "array" else ""
            yield from of(inner, f"{prefix}{name}{several}.") if inner else [prefix + name]

    return of(whole, "")


def test_an_engine_is_not_taken_for_hung_while_it_may_take_weights() -> None:
    document = {"model": "m", "env": {"id": "e"}, "engine": {"liveness_deadline_s": 90}}
    engine = config.parse(document).engine
    assert engine.admin_deadline_s == 45
    assert engine.mending_deadline_s == 90 + 45 + engine.start_deadline_s


@each_case(
    ("section", "field", "hint"),
    [
        (
            {"algo": {"kl_weight": 0.1, "reference": 1.5}},
            "algo.reference",
            "should be 'start', or should be a valid integer",
        ),
        ({"engine": {"kind": "vllm", "replicas": [[]]}}, "engine.replicas", "a valid integer, or .* at least 1 item"),
        (
            {"train": {"gradient_checkpointing": "on"}},
            "train.gradient_checkpointing",
            "boolean, or should be 'offload'",
        ),
    ],
)
def test_a_setting_of_several_kinds_names_itself_and_each_kind(section: Any, field: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        config.parse({**MINIMAL, **section})
    assert caught.value.field == field


def test_a_scale_by_siblings_alone_needs_two_of_them() -> None:
    algo = {"scale": "leave_one_out_by_source"}
    document = {"model": "agentrl/tiny-coder", "env": {"id": "x"}, "algo": algo, "rollout": {"group_size": 2}}
    with pytest.raises(ConfigError, match=r"rollout\.group_size = 2: .*compares siblings: give at least 3"):
        config.parse(document)


@each_case(
    ("rollout", "buffer", "quorum"),
    [
        ({}, {}, 6),
        ({}, {"max_lag": 0}, None),
        ({}, {"close": "auto"}, 6),
        ({"group_size": 16}, {"close": "auto"}, 12),
        ({"group_size": 2}, {"close": "auto"}, 2),
        ({"group_size": 1}, {"close": "auto"}, None),
        ({}, {"close": 5}, 5),
        ({}, {"close": "full"}, None),
        ({}, {"close": "auto", "max_lag": 0}, None),
        ({}, {"max_lag": 0, "close": 7}, 7),
    ],
)
def test_a_quorum_is_three_members_in_four_unless_training_is_synchronous(
    rollout: dict[str, Any], buffer: dict[str, Any], quorum: int | None
) -> None:
    document = {**MINIMAL, "rollout": rollout, "buffer": buffer, "algo": {"kind": "reinforce++"}}
    assert config.parse(document).quorum == quorum


def test_evaluation_samples_as_training_unless_it_has_its_own_settings() -> None:
    rollout = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "stop": ["END"], "max_tokens_per_turn": 8}
    same = config.parse({"model": "m", "env": {"id": "e"}, "rollout": rollout})
    trained = SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9, top_k=50, min_p=0.1, stop=("END",))
    assert same.rollout.sampling == same.eval_sampling == trained
    own = {"temperature": 0, "top_p": 1.0}
    other = config.parse({"model": "m", "env": {"id": "e"}, "rollout": rollout, "eval": own})
    assert other.rollout.sampling == trained
    assert other.eval_sampling == replace(trained, temperature=0.0, top_p=1.0)


@pytest.mark.parametrize(("top_p", "greedy"), [(1.0, (0.0, 0)), (0.9, (1.0, 1))])
def test_a_server_that_tells_sets_is_asked_for_the_likeliest_token(top_p: float, greedy: tuple[float, int]) -> None:
    """Such a server refuses greedy requests."""
    sections = {"rollout": {"top_p": top_p}, "eval": {"temperature": 0}, "engine": {"kind": "vllm"}}
    sampling = config.parse({"model": "m", "env": {"id": "e"}, **sections}).eval_sampling
    assert (sampling.temperature, sampling.top_k) == greedy


@each_case(("section", "value"), [("rollout", 0.005), ("rollout", 2.5), ("eval", 3.0)])
def test_a_temperature_that_vllm_would_change_is_refused(section: str, value: float) -> None:
    document = {"model": "m", "env": {"id": "e"}, section: {"temperature": value}}
    config.parse(document)
    with pytest.raises(ConfigError, match=rf"{section}\.temperature = {value}: vLLM samples at 0\.01 to 2"):
        config.parse({**document, "engine": {"kind": "vllm"}})


OFF = [
    ("alarms.kl_above", "alarms.ess_below"),
    ("eval.top_p", "algo.critic_lr"),
    ("train.grad_clip", "train.lora_alpha"),
    ("rollout.max_turns", "curriculum"),
]
RUN_FILE = """
model = "m"
env.id = "e"
algo = { kind = "ppo", critic_lr = 1e-3 }
curriculum = { pool = 10 }
eval = { top_p = 0.9 }
"""


def of(settings: RunConfig, name: str) -> Any:
    found: Any = settings
    for part in name.split("."):
        found = getattr(found, part)
    return found


@each_case("off", ["false", '"off"', "off"])
@each_case("names", OFF)
def test_a_setting_that_may_be_none_is_switched_off(tmp_path: Path, names: tuple[str, ...], off: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    found = config.load(path, [f"{name}={off}" for name in names])
    assert [of(found, name) for name in names] == [None] * len(names)
    assert config.from_json(config.to_json(found)) == found
    if off != "off":  # in a file it is TOML
        path.write_text(
            'model = "m"\nenv.id = "e"\nalgo.kind = "ppo"\n' + "".join(f"{name} = {off}\n" for name in names)
        )
        assert [of(config.load(path), name) for name in names] == [None] * len(names)


def test_every_setting_whose_default_is_none_takes_false() -> None:
    def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
        yield model
        for field in model.model_fields.values():
            for inner in (field.annotation, *get_args(field.annotation)):
                if isinstance(inner, type) and issubclass(inner, BaseModel) and inner is not Algorithm:
                    yield from sections(inner)

    models = [*sections(RunConfig), *(config.algorithm(kind) for kind in registry.ids("algorithms"))]
    tried = 0
    for model in models:
        for name, field in model.model_fields.items():
            if field.get_default(call_default_factory=False) is None and not field.is_required():
                tried += 1
                assert switched_off({name: False}, model) == {name: None}
    assert tried > 40


def test_what_cannot_be_none_is_not_switched_off() -> None:
    assert switched_off({"canary": False, "kind": "off"}, config.EngineSettings) == {"canary": False, "kind": "off"}
    assert switched_off({"prompt": "off"}, config.run_config.RewardSource) == {"prompt": "off"}  # a text may be this
    assert broken(train={"lr": "off"}).field == "train.lr"
    assert broken(train={"lr": False}).field == "train.lr"


@each_case(
    ("document", "field"),
    [
        ({"env": "calc", "tasks": [{"id": "a"}]}, "env"),
        ({"env": {"id": "a"}, "tasks": [{"id": "a"}, 3]}, "tasks.1"),
        ({"env": {"id": "a"}, "train": {"betas": [1.5, 0.9]}}, "train.betas.0"),
        ({"env": {"id": "a"}, "train": {"betas": [-1, 2]}}, "train.betas.0"),
        ({"env": {"id": "a"}, "engine": {"urls": ["localhost:8000"]}}, "engine.urls"),
        ({"env": {"id": "a"}, "engine": {"urls": ["http://h:abc"]}}, "engine.urls"),
        ({"env": {"id": "a"}, "rewards": [{"source": "s", "kind": "prm", "url": "http://h:99999"}]}, "rewards.url"),
    ],
)
def test_what_a_stranger_may_write_is_named_when_it_is_read(document: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse({"model": "m", **document})
    assert caught.value.field == field


@each_case(
    ("key", "value"),
    [
        ("train.lr", "true"),
        ("train.betas", "[true, 0.9]"),
        ("train.steps", "true"),
        ("train.steps", "2.0"),
        ("train.steps", '"2"'),
        ("engine.canary", '"on"'),
        ("engine.colocated", '"yes"'),
        ("algo.process_weight", "true"),
        ("seed", "true"),
        ("seed", "-1"),
    ],
)
def test_a_value_of_another_kind_is_refused_and_not_converted(tmp_path: Path, key: str, value: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "m"\n[env]\nid = "e"\n[[eval.sets]]\nname = "s"\n')
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}(\.0)? = "):
        config.load(file, [f"{key}={value}"])


@pytest.mark.parametrize("section", ["tasks", "eval.sets"])
def test_seeds_of_tables_are_not_negative(section: str) -> None:
    table = {"name": "s", "first_seed": -5} if section == "eval.sets" else {"first_seed": -5}
    document = {"model": "m", "env": {"id": "e"}}
    document |= {"eval": {"sets": [table]}} if section == "eval.sets" else {"tasks": [table]}
    with pytest.raises(ConfigError, match=rf"^{re.escape(section)}\.0\.first_seed = -5: "):
        config.parse(document)
