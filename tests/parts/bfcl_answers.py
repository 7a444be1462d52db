"""Answers to the tasks of bfcl-eval: right ones, made from what the package holds for right, and wrong ones.

An answer is what the policy does, turn by turn: a list of calls, a text, or a call whose JSON is broken. `recorded`
writes it as a run of the package records it, `played` as the actions of a policy in `agentrl/BFCL-v0`.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.env.adapters.bfcl_tasks import BFCL
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format

SINGLE = (
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple", "irrelevance"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance"),
)
MULTI = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
ROOT = Path(__file__).resolve().parents[2]

Call = tuple[str, dict[str, Any]]
Step = list[Call] | str
BROKEN = "\0broken"
"""A name that stands for a call whose JSON is not closed."""


@dataclass(frozen=True)
class Written:
    """An answer: its task's place and id, the kind of change that was made, and the steps of each turn."""

    index: int
    id: str
    kind: str
    turns: list[list[Step]]


@functools.cache
def data_folder() -> Path:
    spec = importlib.util.find_spec("bfcl_eval")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "data"


@functools.cache
def lines_of(path: str) -> list[Any]:
    return [json.loads(line) for line in (data_folder() / path).read_text(encoding="utf-8").splitlines() if line]


# --- right answers


def chosen(choices: Any, rng: random.Random) -> Any:
    """One of the accepted values; texts and lists of choices within objects are chosen in turn."""
    value = rng.choice([choice for choice in choices if choice != ""] or [""])
    return plain(value, rng)


def plain(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        return {
            key: chosen(choices, rng) if isinstance(choices, list) else choices
            for key, choices in value.items()
            if not (isinstance(choices, list) and "" in choices and rng.random() < 0.5)
        }
    return (
        [plain(inner, rng) if isinstance(inner, dict) else inner for inner in value] if type(value) is list else value
    )


def as_code(value: Any) -> str:
    """A value as a text of Java or JavaScript has it."""
    return value if isinstance(value, str) else json.dumps(value)


def right_calls(category: str, index: int, rng: random.Random) -> list[Call]:
    calls: list[Call] = []
    for call in lines_of(f"possible_answer/BFCL_v4_{category}.json")[index]["ground_truth"]:
        ((name, parameters),) = call.items()
        arguments = {
            key: chosen(choices, rng)
            for key, choices in parameters.items()
            if not ("" in choices and (rng.random() < 0.5 or choices == [""]))
        }
        if category in ("simple_java", "simple_javascript"):
            arguments = {key: as_code(value) for key, value in arguments.items()}
        calls.append((name.replace(".", "_"), arguments))
    return calls


def any_calls(entry: dict[str, Any]) -> list[Call]:
    """A call of the first function of a task that has no right call."""
    functions = entry["function"]
    name = functions[0]["name"].replace(".", "_") if functions else "nothing"
    return [(name, {"query": "x"})]


def right_turns(category: str, index: int, rng: random.Random) -> list[list[Step]]:
    """The right calls of each turn of the user, in one step or several, and a text that ends it."""
    entry = lines_of(f"BFCL_v4_{category}.json")[index]
    turns: list[list[Step]] = []
    for sources in lines_of(f"possible_answer/BFCL_v4_{category}.json")[index]["ground_truth"]:
        calls = [call_of(source, entry["involved_classes"]) for source in sources]
        width = rng.choice((1, 2, max(1, len(calls))))
        turns.append([*(calls[at : at + width] for at in range(0, len(calls), width)), "Done."])
    return turns


@functools.cache
def parameter_names(api: str) -> dict[str, list[str]]:
    files = {
        "GorillaFileSystem": "gorilla_file_system", "MathAPI": "math_api", "MessageAPI": "message_api",
        "TwitterAPI": "posting_api", "TicketAPI": "ticket_api", "TradingBot": "trading_bot",
        "TravelAPI": "travel_booking", "VehicleControlAPI": "vehicle_control",
    }  # fmt: skip
    functions = lines_of(f"multi_turn_func_doc/{files[api]}.json")
    return {function["name"]: [*function["parameters"]["properties"]] for function in functions}


def call_of(source: str, apis: Sequence[str]) -> Call:
    """A call in Python's syntax, with the names of its positional arguments."""
    call = ast.parse(source.strip(), mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    names = next(parameter_names(api)[call.func.id] for api in apis if call.func.id in parameter_names(api))
    arguments = {name: ast.literal_eval(value) for name, value in zip(names, call.args, strict=False)}
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return call.func.id, json.loads(json.dumps({**arguments, **named}))


# --- wrong answers


def other_value(value: Any, rng: random.Random) -> Any:
    """A value that is near another one, or of another type."""
    kinds = [None, str(value), [value], {"value": value}, 3]
    if isinstance(value, bool):
        kinds += [not value] * 4
    elif isinstance(value, int | float):
        kinds += [value + 1, float(value), int(value), -value]
    elif isinstance(value, str):
        kinds += [value + " x", value.upper(), value.replace(" ", ""), "", value[::-1]]
    elif isinstance(value, list):
        kinds += [value[::-1], value[1:], [*value, *value[:1]], [str(inner) for inner in value]]
    elif isinstance(value, dict):
        kinds += [
            dict(list(value.items())[1:]),
            {**value, "more": 1},
            {key: str(inner) for key, inner in value.items()},
        ]
    return rng.choice(kinds)


def changed(calls: list[Call], kind: str, rng: random.Random) -> Step:
    """Calls with one change of a kind."""
    calls = [(name, dict(arguments)) for name, arguments in calls]
    at = rng.randrange(len(calls)) if calls else 0
    name, arguments = calls[at] if calls else ("nothing", {})
    key = rng.choice([*arguments]) if arguments else None
    match kind:
        case "wrong name":
            calls[at : at + 1] = [
                (rng.choice([f"{name}_x", name.upper(), name.replace("_", ".", 1), "print"]), arguments)
            ]
        case "missing argument" if key is not None:
            del arguments[key]
        case "changed value" if key is not None:
            arguments[key] = other_value(arguments[key], rng)
        case "extra argument":
            arguments["unheard_of"] = 1
        case "extra call":
            calls.insert(rng.randrange(len(calls) + 1), (name, dict(arguments)))
        case "missing call":
            del calls[at : at + 1]
        case "other order":
            rng.shuffle(calls)
        case "prose":
            return rng.choice([f"I would call {name}.", "", "[]", f"[{name}(x=1)]", json.dumps({"name": name})])
        case "broken JSON":
            calls.insert(rng.randrange(len(calls) + 1), (BROKEN, {}))
        case _:
            pass
    return calls or "Nothing to call."


SINGLE_KINDS = (
    *("right", "right", "right", "wrong name", "missing argument", "changed value", "changed value", "extra argument"),
    *("extra call", "missing call", "other order", "prose", "broken JSON"),
)
MULTI_KINDS = (
    *("right", "right", "right", "wrong name", "missing argument", "changed value", "changed value", "extra argument"),
    *(
        "extra call",
        "missing call",
        "prose",
        "broken JSON",
        "look first",
        "too late",
        "too early",
        "endless",
        "cut off",
    ),
)


def single(category: str, index: int, rng: random.Random) -> Written:
    entry = lines_of(f"BFCL_v4_{category}.json")[index]
    calls = any_calls(entry) if "relevance" in category else right_calls(category, index, rng)
    kind = rng.choice(("right", "right", "prose", "broken JSON") if "relevance" in category else SINGLE_KINDS)
    step = changed(calls, kind, rng)
    if "irrelevance" in category:  # no call is right, and one that cannot be read is none
        kind = "a call" if kind == "right" else "right"
    return Written(index, entry["id"], kind, [[step]])


def multi(category: str, index: int, rng: random.Random) -> Written:
    entry, turns, kind = (
        lines_of(f"BFCL_v4_{category}.json")[index],
        right_turns(category, index, rng),
        rng.choice(MULTI_KINDS),
    )
    places = [
        (turn, step) for turn, steps in enumerate(turns) for step, calls in enumerate(steps) if type(calls) is list
    ]
    turn, step = rng.choice(places)
    calls = turns[turn][step]
    assert isinstance(calls, list)
    match kind:
        case "look first":  # reading changes nothing
            turns[turn].insert(0, [(rng.choice(["ls", "pwd", "get_stock_info", "displayCarStatus"]), {})])
        case "too late":
            turns[-1] = [*turns[turn][:-1], *turns[-1]] if turn < len(turns) - 1 else turns[-1]
            turns[turn] = ["Later."] if turn < len(turns) - 1 else turns[turn]
        case "too early":
            turns[0] = [*(each for steps in turns for each in steps if type(each) is list), "All done."]
            turns[1:] = [["Done before."] for _ in turns[1:]]
        case "endless":  # at the bound, below it, or beyond it
            turns[turn] = [*[[("pwd", {})]] * (rng.choice((18, 19, 20, 21, 22)) - len(turns[turn]) + 1), *turns[turn]]
        case "cut off":
            turns = turns[: turn + 1]
        case _:
            turns[turn][step] = changed(calls, kind, rng)
            if type(turns[turn][step]) is str or (kind == "broken JSON"):
                turns[turn] = turns[turn][: step + 1]
    return Written(index, entry["id"], kind, bounded(turns))


def bounded(turns: list[list[Step]]) -> list[list[Step]]:
    """An answer as far as the package's inference asks for it: it stops behind the 21st step of calls of a turn."""
    for at, steps in enumerate(turns):
        if len([step for step in steps if type(step) is list]) > 20:
            return [*turns[:at], steps[:21]]
    return turns


def sample(category: str, size: int, seed: int) -> list[Written]:
    """`size` answers to the tasks of a category, spread over all of them; again from the first where they are few."""
    rng = random.Random(f"{seed} {category}")
    count = len(lines_of(f"BFCL_v4_{category}.json"))
    order = rng.sample(range(count), count)
    make = multi if category in MULTI else single
    return [make(category, order[at % count], rng) for at in range(size)]


# --- both ways


def recorded(step: Step) -> Any:
    if isinstance(step, str):
        return step
    return [{name: '{"a": 1' if name == BROKEN else json.dumps(arguments)} for name, arguments in step]


def action(step: Step) -> str:
    if isinstance(step, str):
        return step
    hermes = get_format("hermes")
    written = [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1</tool_call>'
        if name == BROKEN
        else hermes.write(ToolCall(name, arguments))
        for name, arguments in step
    ]
    return "\n".join(written)


def played(category: str, answers: Sequence[Written]) -> list[float]:
    """The outcomes of the answers in our environment. One that stops before the end of its task is worth 0."""
    env, outcomes = BFCL(category), list[float]()
    for answer in answers:
        env.reset(options={"index": answer.index})
        steps, info, is_over = (step for turn in answer.turns for step in turn), {}, False
        while not is_over and (step := next(steps, None)) is not None:
            *_, is_over, _, info = env.step(action(step))
        assert next(steps, None) is None, f"{answer.id} ({answer.kind}) was ended before its answer"
        outcomes.append(info["outcome"] if is_over else 0.0)
    env.close()
    return outcomes


def rounds_of(answers: Sequence[Written]) -> Iterator[list[Written]]:
    """The answers in rounds in each of which a task comes once."""
    left = list(answers)
    while left:
        by_id = {answer.id: answer for answer in reversed(left)}
        yield sorted(by_id.values(), key=lambda answer: answer.index)
        left = [answer for answer in left if by_id[answer.id] is not answer]


class Oracle:
    """The package's runner on some answers, in a process that runs beside ours."""

    def __init__(self, answers: dict[str, list[Written]]) -> None:
        self._rounds = {category: list(rounds_of(written)) for category, written in answers.items()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parts.bfcl_oracle"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self._request = json.dumps(
            {
                category: [
                    [
                        {
                            "id": answer.id,
                            "result": recorded(answer.turns[0][0])
                            if category in SINGLE
                            else [[recorded(step) for step in steps] for steps in answer.turns],
                        }
                        for answer in written
                    ]
                    for written in rounds
                ]
                for category, rounds in self._rounds.items()
            }
        )

    def scores(self, category_answers: dict[str, list[Written]], deadline_s: float) -> dict[str, list[float]]:
        """The score of each answer, in the order of the answers."""
        try:
            output, errors = self._process.communicate(self._request, timeout=deadline_s)
        finally:
            self._process.kill()
        assert self._process.returncode == 0, errors[-3000:]
        failed = json.loads(output)
        failures = {
            id(answer)
            for category, rounds in self._rounds.items()
            for written, failed_ids in zip(rounds, failed[category], strict=True)
            for answer in written
            if answer.id in failed_ids
        }
        return {
            category: [float(id(answer) not in failures) for answer in written]
            for category, written in category_answers.items()
        }
