"""Can a policy have its failure dropped? A property test for environments, with random and worst-case actions.

    await check_nothing_dropped(lambda: MyEnv(), seeds=range(3))

Failures that the policy could not have caused leave the loss and the baseline. So if an action makes an environment
fail, the cheapest policy is one that fails whenever it would lose. The check plays such actions, as a rollout would,
and requires that each is answered, ends the episode, or is the policy's fault. Its actions do no harm in a box without
walls. Never knows models or tokens. `agentrl.testing.printing` tests parsers of a box's output.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from agentrl.env import step_results
from agentrl.env.tools.tools import function_schema
from agentrl.errors import PolicyFault
from agentrl.host import clocks
from agentrl.protocols import AsyncEnv
from agentrl.records import Json, Step, StopReason, Task

TEXTS: Final[tuple[str, ...]] = (
    *(
        "",
        " ",
        "\n",
        "\0",
        "é\u2028🙂",
        "-rf",
        "..",
        "../../etc/passwd",
        "/",
        ".",
        "a" * 5_000,
        "x" * 300_000,
        "%s{0}$(id)",
    ),
    *(
        "9" * 5_000,
        "-1",
        "1e999",
        "nan",
        "[" * 20_000,
        "(" * 300,
        "{}",
        "null",
        "*" * 200,
        "(a+)+$",
        "\\",
        "\x1b[31m",
        "'\"`",
    ),
    *(
        "@@ -1 +1 @@\n-\n+x\n",
        "--- a/x\n+++ b/x\n@@ -" + "9" * 5_000 + " +1 @@\n-a\n+b\n",
        "--- /dev/null\n+++ b/d/e\n@@ -0,0 +1 @@\n+x\n",
    ),
    *(
        "exit 3",
        "kill -9 $$",
        "exec >&- 2>&-",
        "printf '\\377\\0'",
        "head -c 3000000 /dev/zero",
        "yes : | head -c 300000",
    ),
    *("ln -s .. up; mkfifo p; mkdir -p d/e; echo x > f; chmod 000 f d", "echo 'import os; os._exit(0)' > ast.py"),
    *(
        "import os; os._exit(0)",
        "print('PASSED ' + 'a - ' * 9000)",
        "def f(:",
        "raise SystemExit(3)",
        "while True: break",
    ),
)
"""Texts that go where a text belongs. They do no harm where nothing holds them."""
NUMBERS: Final[tuple[Any, ...]] = (0, 1, -1, 1.0, 2.5, -0.0, 2**31, 2**63, 10**30, 10**400, 1e300, 1e-300, 5e-324)
_OTHERS: Final[tuple[Any, ...]] = (None, True, False, [], {}, [[[]]], {"a": {"b": [1]}}, [0] * 3_000, *NUMBERS)
_STEP_S: Final = 20.0  # the policy's time in one step
_OWN_S: Final = 60.0  # time for the environment's own code


async def check_nothing_dropped(
    make: Callable[[], AsyncEnv],
    *,
    seeds: Iterable[int] = (0,),
    turns: int = 12,
    actions: Sequence[str] = (),
) -> None:
    """Raises AssertionError, which names seed and action, if an action ends in a failure that leaves the baseline.

    For each seed, every argument of every tool takes numbers and texts that tools stumble over, each of `actions` is
    played (your own: texts that your environment should survive, also correct ones), and `turns` more are drawn at
    random, some of them yours. When an episode ends, the next one begins with the same task."""
    for seed in seeds:
        environment = make()
        try:
            await _played(environment, Task(env=type(environment).__name__, seed=seed, index=0), turns, actions)
        finally:
            await environment.aclose()


async def _played(env: AsyncEnv, task: Task, turns: int, own: Sequence[str]) -> None:
    generator = random.Random(task.seed)
    await step_results.start(env, task)
    planned_actions = [*_sweep(env, generator), *own, *(action_at_random(env, generator, own) for _ in range(turns))]
    # Mixed, because many faults need a state: a tool that survives any argument in a fresh episode may fail on it after
    # a file was removed.
    generator.shuffle(planned_actions)
    has_ended = False
    for action_number, action in enumerate(planned_actions):
        if has_ended:
            await step_results.start(env, task)
        action_label = f"action {action_number}, {_short(action)}"
        step: Step | None = await _survived(partial(step_results.act, env, action, task), task, action_label)
        has_ended = step is None or step.terminated or step.truncated
        if step is not None and has_ended:
            reason = step.stop_reason or StopReason.DONE
            assert reason.by_policy, f"seed {task.seed}: {action_label}: the episode ended as {reason}"
    if not has_ended:
        await _survived(partial(step_results.end, env, StopReason.TURN_LIMIT, task), task, "the end of the episode")


def _sweep(env: AsyncEnv, chosen: random.Random) -> Iterator[str]:
    """Actions of a few calls each; in a call one argument is odd and the others are plain."""
    written_calls: list[str] = []
    for tool in _tools(env):
        fields = _fields(tool)
        plain_values = {field_name: _plain(schema) for field_name, schema in fields.items()}
        for field_name, schema in fields.items():
            if schema.get("type") in ("integer", "number"):
                # All numbers and a draw of the texts: the numbers are few, and which of them breaks a tool nobody
                # guesses (10**400 is no float, 2**63 no index).
                odd_values: Sequence[Any] = NUMBERS
            else:
                odd_values = chosen.sample(TEXTS, 3) if schema.get("type") == "string" else chosen.sample(_OTHERS, 3)
            tool_name = str(tool["name"])
            written_calls += [_call(env, tool_name, {**plain_values, field_name: value}) for value in odd_values]
    chosen.shuffle(written_calls)
    while written_calls:
        call_count = chosen.randint(1, 6)
        yield "".join(written_calls[:call_count])
        del written_calls[:call_count]


async def _survived(call: Callable[[], Any], task: Task, what: str) -> Any:
    """The result of a call; None if it was the policy's fault, or if its action took too long."""
    failure: Exception | None = None
    with clocks.watch(own_s=_OWN_S, policy_s=_STEP_S) as clock_watch:
        try:
            return await call()
        except Exception as error:
            failure = error
    # Too slow by the policy's doing is an end that is scored. Too slow by the environment's own code is not, and so it
    # is the way out that this test looks for.
    if clock_watch.over is clocks.Whose.POLICY or isinstance(failure, PolicyFault):
        return None
    problem = f"it took over {_OWN_S:g} s" if clock_watch.over is not None else f"{type(failure).__name__}: {failure}"
    raise AssertionError(f"seed {task.seed}: {what}: {problem[:500]}") from failure


def action_at_random(env: AsyncEnv, chosen: random.Random, own: Sequence[str] = ()) -> str:
    """One action: a text, or calls of the environment's tools with arguments that fit, nearly fit, or do not."""
    tool_schemas = _tools(env)
    draw = chosen.random()
    if own and draw < 0.2:
        return chosen.choice(own)
    if not tool_schemas or draw < 0.35:
        return _text_at_random(chosen, [str(tool["name"]) for tool in tool_schemas])
    chosen_tools = [chosen.choice(tool_schemas) for _ in range(chosen.choice((1, 1, 1, 2, 5)))]
    return "".join(_call(env, str(tool["name"]), _arguments(tool, chosen)) for tool in chosen_tools)


def _text_at_random(chosen: random.Random, names: Sequence[str]) -> str:
    tool_name = chosen.choice(names) if names else "tool"
    inside = chosen.choice(TEXTS)
    text_forms = (
        *(inside, f"<answer>{inside}</answer>", f"action: {inside}", f"[{inside}]", f"<tool_call>{inside}</tool_call>"),
        *(
            "<tool_call>" * 2_000,
            "<answer>" * 2_000,
            f'<tool_call>{{"name": "{tool_name}", "arguments": {inside}}}</tool_call>',
        ),
        f'<tool_call>{{"name": "{tool_name}", "arguments": {{"line": 1{"0" * 6_000}}}}}</tool_call>',
        f'<tool_call>{{"name": "{tool_name}", "arguments": {"[" * 500}{"]" * 500}}}</tool_call>',
        f'<tool_call>{{"name": "{tool_name}"}}</tool_call>' * 40,
    )
    return chosen.choice(text_forms)


def _call(env: AsyncEnv, name: str, arguments: Mapping[str, Json]) -> str:
    write_call = getattr(env, "call", None)
    if callable(write_call):
        return str(write_call(name, **arguments))
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _tools(env: AsyncEnv) -> list[Mapping[str, Json]]:
    return [function_schema(schema) for schema in getattr(env, "schemas", None) or env.tool_schemas()]


def _fields(tool: Mapping[str, Json]) -> Mapping[str, Mapping[str, Any]]:
    return _parameters(tool).get("properties") or {}


def _parameters(tool: Mapping[str, Json]) -> Mapping[str, Any]:
    return tool.get("parameters") or {}


def _plain(schema: Mapping[str, Any]) -> Json:
    if "enum" in schema:
        return schema["enum"][0]
    plain_values: Mapping[str, Json] = {"integer": 1, "number": 1, "boolean": False, "array": [], "object": {}}
    return plain_values.get(str(schema.get("type")), "a")


def _arguments(tool: Mapping[str, Json], chosen: random.Random) -> dict[str, Json]:
    required_names: Sequence[str] = _parameters(tool).get("required") or ()
    arguments = {
        field_name: _value(schema, chosen)
        for field_name, schema in _fields(tool).items()
        if field_name in required_names or chosen.random() < 0.5
    }
    if chosen.random() < 0.1:
        arguments["surplus"] = None
    return arguments


def _value(schema: Mapping[str, Any], chosen: random.Random) -> Json:
    if chosen.random() < 0.1:
        return chosen.choice(_OTHERS)
    schema_type = schema.get("type")
    if "enum" in schema:
        return chosen.choice(schema["enum"])
    if schema_type in ("integer", "number"):
        return chosen.choice(NUMBERS)
    if schema_type == "array":
        return [_value(schema.get("items") or {}, chosen) for _ in range(chosen.choice((0, 1, 2, 3, 2_000)))]
    return chosen.choice((True, False)) if schema_type == "boolean" else chosen.choice(TEXTS)


def _short(action: str) -> str:
    return repr(action) if len(action) <= 200 else f"{action[:200]!r}… ({len(action)} characters)"
