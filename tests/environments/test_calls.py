"""Function calls of our own: every task is won by the calls that it asks for, and by no others."""

from __future__ import annotations

import copy
import json
import os
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from each_case import each_case

from agentrl.engine.rendering.renderer import Renderer
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.errors import ConfigError
from agentrl.models import smollm2
from agentrl.models.resolve import model_dir, vocabulary
from agentrl.offline.demonstrations import read
from agentrl.offline.oracle_demonstrations import write
from agentrl.testing.hostile import check_nothing_dropped
from agentrl_environments.calls import KINDS, Call, Calls, CallsTask, make_task, share_of
from agentrl_environments.calls.tasks import DOMAINS

SPLITS = ("train", "held_out")
CALL_KINDS = [kind for kind in KINDS if kind != "irrelevance"]
HERMES = get_format("hermes")


# --- a second grader, of the description and not of the code


def canonical(schema: Mapping[str, Any], value: Any) -> Any:
    """A valid value in the one form that all right ways to write it share."""
    if schema["type"] == "object":
        defaults = {
            name: copy.deepcopy(one["default"]) for name, one in schema["properties"].items() if "default" in one
        }
        members = {**defaults, **value}
        return {name: canonical(schema["properties"][name], members[name]) for name in sorted(members)}
    if schema["type"] == "array":
        return [canonical(schema["items"], item) for item in value]
    if schema["type"] == "string" and "enum" not in schema:
        return "".join(sign if sign.isalnum() else " " for sign in value.lower()).split()
    return str(Fraction(value)) if schema["type"] == "number" else value


def strict(schema: Any) -> Any:
    """A schema that refuses members which it does not name."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {**{name: strict(one) for name, one in schema.items()}, **closed}


def has_point(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether an integer within a valid value was written with a point."""
    if schema["type"] == "object":
        return any(has_point(schema["properties"][name], one) for name, one in value.items())
    if schema["type"] == "array":
        return any(has_point(schema["items"], one) for one in value)
    return schema["type"] == "integer" and isinstance(value, float)


def judged(task: CallsTask, made: Sequence[Call]) -> bool:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in task.tools}

    def form(call: Call) -> str:
        return json.dumps([call.name, canonical(schemas[call.name], call.arguments)])

    for call in made:
        if call.name not in schemas:
            return False
        problems = jsonschema.Draft202012Validator(strict(schemas[call.name])).iter_errors(dict(call.arguments))
        if any(True for _ in problems) or has_point(schemas[call.name], call.arguments):
            return False
    return Counter(map(form, made)) == Counter(map(form, task.expected))


def altered(rng: random.Random, value: Any) -> Any:
    """A value written otherwise: the same to a reader, nearly the same, or another."""
    match value:
        case bool():
            return rng.choice([not value, str(value), int(value)])
        case int():
            return rng.choice([value + 1, float(value), str(value), -value])
        case float():
            return rng.choice([value + 0.1, str(value), int(value), value])
        case str():
            marked = [value.upper(), f" {value}. ", value.replace(" ", "-"), value.replace(" ", "  "), value.title()]
            return rng.choice([*marked, value[:-1], f"{value} x", [value], ""])
        case list():
            return rng.choice([value[::-1], value[:-1], [*value, "red"], [altered(rng, one) for one in value], None])
        case _:
            name = rng.choice(list(value))
            return rng.choice([{**value, name: altered(rng, value[name])}, {**value, "more": 1}, {name: value[name]}])


def mutated(rng: random.Random, task: CallsTask) -> list[Call]:
    calls = list(task.expected)
    place = rng.randrange(len(calls))
    name, arguments = calls[place].name, dict(calls[place].arguments)
    schema = task.parameters[name]["properties"]
    optional = {key: one["default"] for key, one in schema.items() if "default" in one and key not in arguments}
    match rng.randrange(9):
        case 0:
            rng.shuffle(calls)
            return calls
        case 1:
            return [*calls, rng.choice(calls)]
        case 2:
            return calls[1:]
        case 3:
            arguments.pop(rng.choice(list(arguments)))
        case 4:
            arguments["made_up"] = 1
        case 5:
            arguments |= optional
        case 6 if optional:
            key = rng.choice(list(optional))
            arguments[key] = altered(rng, optional[key])
        case _:
            key = rng.choice(list(arguments))
            arguments[key] = altered(rng, arguments[key])
    calls[place] = Call(name, arguments)
    return calls


def played(env: Calls, seed: int, action: str) -> dict[str, Any]:
    env.reset(seed=seed)
    *_, terminated, _, info = env.step(action)
    assert terminated
    return info


def as_action(calls: Sequence[Call]) -> str:
    return HERMES.write(*(ToolCall(call.name, call.arguments) for call in calls))


@pytest.mark.parametrize("split", SPLITS)
def test_a_second_grader_agrees_on_right_and_wrong_answers(split: Any) -> None:
    rng, verdicts = random.Random(7), Counter[bool]()
    for kind in CALL_KINDS:
        env = Calls(kinds=kind, split=split)
        for seed in range(100):
            task = make_task(seed, split, (kind,))
            for _ in range(3):
                made = mutated(rng, task)
                expected = judged(task, made)
                assert played(env, seed, as_action(made))["success"] is expected, (task, made)
                verdicts[expected] += 1
    assert min(verdicts[True], verdicts[False]) > 200, "both kinds of answers were met"


@pytest.mark.parametrize("split", SPLITS)
@each_case("kind", KINDS)
def test_the_right_answer_wins_every_task_and_no_other_oracle_does(kind: str, split: Any) -> None:
    env = Calls(kinds=kind, split=split)
    for seed in range(300):
        env.reset(seed=seed)
        gold, *others = env.oracles()
        assert env.step(str(gold.policy(())))[-1]["outcome"] == gold.outcome == 1.0, (seed, gold)
        for oracle in others if seed < 30 else ():
            info = played(env, seed, str(oracle.policy(())))
            assert info["outcome"] == oracle.outcome == 0.0, (seed, oracle.name, info)


@each_case("kind", KINDS)
def test_a_task_is_of_its_kind(kind: str) -> None:
    for seed in range(300):
        task = make_task(seed, "train", (kind,))
        names, called = [tool["function"]["name"] for tool in task.tools], [call.name for call in task.expected]
        assert len(set(names)) == len(names) <= 4 and set(called) <= set(names)
        assert (len(called) > 1) is kind.startswith("parallel") and bool(called) is (kind != "irrelevance")
        assert len(names) == 1 or kind not in ("simple", "parallel")
        assert len(set(called)) > 1 or kind != "parallel_multiple"
        assert len(names) > 1 or kind != "multiple"
        assert "{" not in task.request and task.request[-1] in ".?"


def test_every_function_has_a_valid_schema_that_its_arguments_and_defaults_fit() -> None:
    rng = random.Random(5)
    for split in SPLITS:
        for domain, skeletons in DOMAINS[split].items():
            for skeleton in skeletons:
                function = skeleton.offer(rng, domain)
                schema = function.tool["function"]["parameters"]
                jsonschema.Draft202012Validator.check_schema(schema)
                validator = jsonschema.Draft202012Validator(strict(schema))
                for _ in range(10):
                    validator.validate(dict(function.request(rng).arguments))
                for member in schema["properties"].values():
                    if "default" in member:
                        jsonschema.Draft202012Validator(member).validate(member["default"])


def test_the_splits_share_no_domain_no_function_and_no_description() -> None:
    names, texts = ({}, {})
    for split in SPLITS:
        skeletons = [skeleton for one in DOMAINS[split].values() for skeleton in one]
        names[split] = {name.replace("_", "").lower() for one in skeletons for name in one.names.split()}
        texts[split] = {text for one in skeletons for text in [*one.descriptions.split("|"), *one.clauses.split("|")]}
    assert DOMAINS["train"].keys().isdisjoint(DOMAINS["held_out"].keys())
    assert names["train"].isdisjoint(names["held_out"]) and texts["train"].isdisjoint(texts["held_out"])
    assert len(DOMAINS["train"]) >= 12 and sum(len(one) for split in SPLITS for one in DOMAINS[split].values()) >= 60


@pytest.mark.adapters
def test_no_function_is_one_of_bfcl() -> None:
    import bfcl_eval

    their_names, their_texts = set[str](), set[str]()
    for file in Path(bfcl_eval.__path__[0], "data").glob("BFCL_v4_[!f]*.json"):
        for line in file.read_text().splitlines():
            for function in json.loads(line).get("function") or ():
                their_names.add(function["name"].rpartition(".")[2].replace("_", "").lower())
                their_texts.add(function["description"].strip().lower())
    assert len(their_names) > 1000
    for split in SPLITS:
        for skeleton in (skeleton for one in DOMAINS[split].values() for skeleton in one):
            assert their_names.isdisjoint(name.replace("_", "") for name in skeleton.names.split())
            assert their_texts.isdisjoint(text.lower() for text in skeleton.descriptions.split("|"))


def test_a_seed_is_the_same_task_in_another_process() -> None:
    line = "from agentrl_environments.calls import *; print([make_task(n, 'train', KINDS) for n in range(40)])"
    environment = {**os.environ, "PYTHONHASHSEED": "11"}
    done = subprocess.run([sys.executable, "-c", line], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str([make_task(seed, "train", KINDS) for seed in range(40)])
    assert make_task(1, "train", KINDS) != make_task(2, "train", KINDS)


# --- hostile answers


def hostile_answers(task: CallsTask) -> list[str]:
    gold = task.expected[0]
    written = json.dumps({"name": gold.name, "arguments": gold.arguments})
    key = next(iter(gold.arguments))
    twice = written.replace('"arguments": {', f'"arguments": {{"{key}": "wrong", ')
    values = ["NaN", "-Infinity", "1e999", "9" * 6_000, "[" * 300 + "]" * 300, '{"a":' * 100 + "1" + "}" * 100, "null"]
    called = [
        json.dumps({"name": gold.name, "arguments": {**gold.arguments, key: "@"}}).replace('"@"', one) for one in values
    ]
    names = [
        f"{gold.name}<|im_end|>",
        f"<|im_start|>{gold.name}",
        f"{gold.name}\0",
        gold.name.upper() + " ",
        "x" * 200_000,
    ]
    called += [json.dumps({"name": one, "arguments": gold.arguments}) for one in names]
    calls = [f"<tool_call>\n{one}\n</tool_call>" for one in [twice, *called, f"[{written}]", "{}", "[]"]]
    whole = f"<tool_call>\n{written}\n</tool_call>"
    return [
        *calls,
        whole * 2,
        whole * 3_000,
        whole[:-3],
        f"<think>{whole}</think>",
        "<tool_call>" * 3_000,
        "\0",
        "<|im_end|>",
    ]


@each_case("kinds", CALL_KINDS)
@each_case("partial", [False, True])
async def test_a_hostile_answer_is_wrong_and_never_the_hosts_failure(kinds: str, partial: bool) -> None:
    env = Calls(kinds=kinds, partial=partial)
    answers = hostile_answers(make_task(5, "train", (kinds,)))
    for answer in answers:
        assert played(env, 5, answer)["outcome"] == 0.0, answer[:200]
    await check_nothing_dropped(lambda: Calls(kinds=kinds, partial=partial), seeds=[5], actions=answers)


def test_words_win_where_no_function_fits_and_a_broken_call_does_not() -> None:
    env = Calls(kinds="irrelevance")
    for answer, mistake in (
        ("Sorry, no.", None),
        (" \n", "empty"),
        ("<tool_call>{", "broken call"),
        ("<think>a</think>", "empty"),
    ):
        assert played(env, 3, answer).get("mistake") == mistake, answer


# --- the partial reward


def test_a_partial_reward_is_below_a_right_answer_and_guesses_do_not_raise_it() -> None:
    rng = random.Random(3)
    for kind in CALL_KINDS:
        env = Calls(kinds=kind, partial=True)
        for seed in range(60):
            task = make_task(seed, "train", (kind,))
            env.reset(seed=seed)
            assert env.step(as_action(task.expected))[1] == 0.0, "the outcome is all that a right answer earns"
            made = mutated(rng, task)
            env.reset(seed=seed)
            _, reward, _, _, info = env.step(as_action(made))
            assert 0.0 <= reward <= 0.5 and (reward == 0.0 or info["outcome"] == 0.0)
            share = share_of(task.parameters, task.expected, made)
            wrong = [*made, Call(task.expected[0].name, {}), Call("no_such", {})]
            if len(made) >= len(task.expected):
                assert share_of(task.parameters, task.expected, wrong) <= share


def test_the_share_of_an_answer_is_the_one_of_a_hand_computation() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "required": ["a", "b"],
    }
    expected = [Call("f", {"a": 1, "b": "x"}), Call("f", {"a": 2, "b": "y"})]

    def share(*made: Call) -> float:
        return share_of({"f": schema}, expected, made)

    assert share() == share(Call("g", {"a": 1, "b": "x"})) == 0.0
    assert share(*reversed(expected)) == 1.0
    assert share(expected[0]) == 0.5
    assert share(Call("f", {"a": 1})) == pytest.approx(2 / 3 / 2)  # its name and one of two arguments
    assert share(Call("f", {"a": 1, "b": "X ", "c": 0})) == pytest.approx(3 / 4 / 2)  # one that is invented
    assert share(*expected, Call("f", {"a": 3})) == pytest.approx(2 / 3)
    assert share(*expected * 9) == 0.0


# --- settings, demonstrations, size


@each_case(
    ("settings", "field"),
    [
        ({"kinds": ["simple", "triple"]}, "kinds"),
        ({"kinds": []}, "kinds"),
        ({"split": "test"}, "split"),
        ({"partial": 1}, "partial"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Calls(**settings)
    assert refusal.value.field == field and "\n" not in str(refusal.value)


def test_a_dialect_that_no_template_knows_is_taught_by_text() -> None:
    env = Calls(kinds="simple", tool_format="json")
    opening, _ = env.reset(seed=2)
    (tool,) = make_task(2, "train", ("simple",)).tools
    assert env.tool_schemas() == [] and opening[0]["role"] == "system"
    assert json.dumps(tool["function"]) in opening[0]["content"]
    assert played(env, 2, str(env.oracles()[0].policy(())))["success"]


def test_demonstrations_are_calls_with_their_tools_and_training_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    write("agentrl_environments.calls:Calls", 20, file, mistakes=0.3)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["oracle"] for line in lines} <= {"gold", "wrong function", "wrong argument", "call where none fits"}
    for line in lines:
        names = {tool["function"]["name"] for tool in line["tools"]}
        calls = line["messages"][-1].get("tool_calls", [])
        assert line["oracle"] != "gold" or {call["function"]["name"] for call in calls} <= names
    folder = model_dir("agentrl/tiny-coder")
    assert len(read(file, Renderer(folder), vocab=vocabulary(folder), max_context=1 << 20)) == 20


@pytest.mark.smollm2
def test_a_prompt_is_short_enough_to_train_a_small_model_on() -> None:
    renderer = Renderer(model_dir(smollm2.ID))
    for split in SPLITS:
        env, lengths = Calls(split=split), list[int]()
        env.template_format = renderer.tool_format or ""
        for seed in range(100):
            opening, _ = env.reset(seed=seed)
            prompt_ids = renderer.start(opening, env.tool_schemas())
            assert str(env.tool_schemas()[0]["function"]["name"]) in renderer.decode(list(prompt_ids))
            lengths.append(len(prompt_ids))
        assert statistics.median(lengths) < 350 and max(lengths) < 768
