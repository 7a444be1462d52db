"""Law 8 at every boundary: what comes from outside is honoured, refused, or named, and never dropped in silence.

Each boundary has a valid sample and a reader that gives all that later code sees of it. The test changes the sample in
one place at a time: an unknown key, an unknown word, a null, a number in the place of a text, a value of another type.
The reader must then refuse it in one line, or name it, or read something else than before. A null may also be read as a
key that is left out.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from each_case import each_case

from agentrl import notices
from agentrl.config import parse
from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.rendering.model_folder import ModelFolder
from agentrl.engine.rendering.renderer import Renderer
from agentrl.engine.scoring_client import ScoringClient
from agentrl.env.agent_programs.model_endpoint import apis, parsed
from agentrl.env.agent_programs.request_checks import UnservedRequest
from agentrl.env.chat_messages import plain_tools
from agentrl.env.dataset_env import RowsEnv
from agentrl.errors import AgentRLError, UsageError
from agentrl.offline.demonstrations import read as read_demonstrations
from agentrl.run.evaluation.served_model import ServedModel
from agentrl_environments.swe.harbor import HarborDefaults
from agentrl_environments.swe.harbor import load as load_harbor
from agentrl_environments.swe.jsonl import HiddenTests, RowDefaults
from agentrl_environments.swe.jsonl import load as load_swe_rows
from agentrl_environments.swe.reward_files import rewards_of
from agentrl_environments.swe.verdicts import canonical, graded, read_log
from tests.engine.formats import Format, write_folder

HERE = __name__
UNKNOWN = "zqUNKNOWNqz"


def judge(prompt: Any, completion: str, row: Any) -> float:
    return 1.0


QWEN = Format(
    """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    ("<|im_end|>",),
    "<|im_end|>",
)


@cache
def renderer() -> Renderer:
    """Of a template that writes whole schemas and calls, as Qwen's do."""
    return Renderer(write_folder(Path(tempfile.mkdtemp()) / "model", QWEN))


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "mode": {"type": "string", "enum": ["fast", "slow"]}},
            "required": ["path"],
        },
    },
}
CALL: dict[str, Any] = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "look", "arguments": '{"path": "a"}'},
}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is in a?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "words", "tool_call_id": "call00000", "name": "look"},
    {"role": "assistant", "content": "Words."},
]


@dataclass(frozen=True)
class Boundary:
    """`read` gives what later code sees of a value; `apart` are places that it hands on unread, with the reason, and
    `others` places whose further keys are meant for other readers, with the reason."""

    name: str
    sample: Any
    read: Callable[[Any, Path], Any]
    apart: dict[str, str] = field(default_factory=dict[str, str])
    others: dict[str, str] = field(default_factory=dict[str, str])


def demonstrations(row: Any, folder: Path) -> Any:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row))
    episodes = read_demonstrations(file, renderer(), vocab=1 << 30, max_context=1 << 20)
    return [(turn.prompt_ids, turn.token_ids, turn.learns) for episode in episodes for turn in episode.turns]


def prompt_rows(row: Any, folder: Path) -> Any:
    env = RowsEnv(rewards=[f"{HERE}:judge"], processes=0)
    asked, _ = env.reset(options=row)
    return renderer().start(asked)


def tool_schemas(tools: Any, folder: Path) -> Any:
    schemas = plain_tools(tools)
    return schemas, renderer().start([{"role": "user", "content": "q"}], schemas)


def request(path: str) -> Callable[[Any, Path], Any]:
    def read(body: Any, folder: Path) -> Any:
        return apis()[path].read(parsed(json.dumps(body).encode()))

    return read


def run_file(document: Any, folder: Path) -> Any:
    return parse(document)


SWE_ROW: dict[str, Any] = {
    "instance_id": "owner__name-1",
    "repo": "owner/name",
    "problem_statement": "It is broken.",
    "patch": "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n",
    "test_patch": "--- /dev/null\n+++ b/tests/test_a.py\n@@ -0,0 +1 @@\n+x = 1\n",
    "FAIL_TO_PASS": ["tests/test_a.py::test_one"],
    "PASS_TO_PASS": ["tests/test_a.py::test_two"],
}


def swe_rows(row: Any, folder: Path) -> Any:
    (folder / "repositories" / "owner" / "name").mkdir(parents=True, exist_ok=True)
    (folder / "repositories" / "owner" / "name" / "a.py").write_text("a = 1\n")
    file = folder / "swe.jsonl"
    file.write_text(json.dumps(row))
    found = load_swe_rows(str(file), RowDefaults(repositories=folder / "repositories"))
    if found.bad:
        raise UsageError(str(found.bad))
    (task,) = found.tasks
    assert isinstance(task.grade, HiddenTests)
    return task.id, task.instruction, task.grade.fails, task.grade.passes, task.hidden, task.gold


def reward_files(given: Any, folder: Path) -> Any:
    return rewards_of(json.dumps(given).encode(), None)


def log_of(write: Callable[[str, str], str]) -> Callable[[Any, Path], Any]:
    """Grades two listed tests by the log of a runner. The sample has the test and the status of each line in turn."""

    def read(parts: Any, folder: Path) -> Any:
        texts = [part if isinstance(part, str) else json.dumps(part) for part in parts]
        log = "\n".join(write(test, status) for test, status in zip(texts[::2], texts[1::2], strict=True))
        return graded(read_log(log), [canonical("tests/a.py::one")], [canonical("tests/a.py::two")])

    return read


def runner_log(runner: str, good: str, write: Callable[[str, str], str]) -> Boundary:
    return Boundary(f"logs of {runner}", ["tests/a.py::one", good, "tests/a.py::two", good], log_of(write))


def endpoint_answer(answer: Any, folder: Path) -> Any:
    """What the environment, the later turns and the results see of an answer of `agentrl eval --endpoint`."""
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answer))

    async def play() -> Any:
        client = ScoringClient("http://endpoint", transport=transport)
        env: Any = RowsEnv(rewards=[f"{HERE}:judge"], processes=0)
        model = ServedModel(client, env, deadline_s=60, options={})
        said = await model.answer([{"role": "user", "content": "q"}], [], [TOOL])
        return said, model.tokens

    return trio.run(play)


HARBOR: dict[str, Any] = {
    "version": "1.0",
    "metadata": {"difficulty": "easy"},
    "artifacts": ["report.txt"],
    "agent": {"timeout_sec": 60.0},
    "verifier": {
        "timeout_sec": 30.0,
        "environment_mode": "separate",
        "env": {"LEVEL": "2"},
        "collect": [{"command": "make report", "timeout_sec": 5.0, "service": "main"}],
        "environment": {"docker_image": "judge:1", "workdir": "/app", "memory_mb": 512, "env": {"A": "b"}},
    },
    "environment": {
        "docker_image": "work:1",
        "cpus": 2,
        "memory": "1G",
        "workdir": "/app",
        "env": {"HOME_OF": "/app/x"},
        "allow_internet": False,
    },
    "solution": {"env": {"S": "t"}},
    "agentrl": {"carry": ["*.txt"], "reward_range": [0.0, 2.0], "reward_weights": {"correct": 0.5}},
}


def toml(value: Any) -> str:
    """A value in TOML, in one line. TOML has no null: a key whose value is one is left out."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml(item)}' for key, item in value.items() if item is not None)} }}"
    if isinstance(value, list):
        return f"[{', '.join(toml(item) for item in value if item is not None)}]"
    return json.dumps(value)


def harbor_tasks(document: Any, folder: Path) -> Any:
    task = folder / "tasks" / "task"
    (task / "tests").mkdir(parents=True, exist_ok=True)
    (task / "solution").mkdir(exist_ok=True)
    keys = [f"{key} = {toml(item)}\n" for key, item in document.items() if item is not None]
    (task / "task.toml").write_text("".join(keys))
    (task / "instruction.md").write_text("Count /app/a.")
    (task / "tests" / "test.sh").write_text("#!/bin/sh\n")
    (task / "solution" / "solve.sh").write_text("true\n")
    found = load_harbor(folder / "tasks", HarborDefaults(shared_verifier=True))
    if found.bad:
        raise UsageError(str(found.bad[0]))
    (loaded,) = found.tasks
    carried = [path for path in ("report.txt", "a.py", "note.txt", "b.md") if loaded.declared(path, frozenset())]
    return replace(loaded, declared=lambda *_: False, cheats={}), carried


def model_folder(files: Any, folder: Path) -> Any:
    model = folder / "model"
    if not model.exists():
        write_folder(model, QWEN)
        (model / "chat_template.jinja").unlink()
    for name in MODEL_FILES:
        (model / name).unlink(missing_ok=True)
    for name, document in files.items():
        (model / name).write_text(json.dumps(document))
    messages: Any = TALK[:2]
    renders, described = Renderer(model), ModelFolder(model)
    return (
        renders.start(messages, [TOOL]),
        renders.stop_token_ids,
        described.token_texts,
        described.generation_ends,
    )


MODEL_FILES: dict[str, Any] = {
    "tokenizer_config.json": {
        "bos_token": "<|endoftext|>",
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": [
            {"name": "default", "template": QWEN.template},
            {"name": "tool_use", "template": QWEN.template.replace("system", "tools")},
        ],
    },
    "generation_config.json": {"eos_token_id": [259]},
}
ARCHITECTURE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "hidden_act": "silu",
    "eos_token_id": 3,
}


def architecture(document: Any, folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(document))
    return read_architecture(folder)


OTHERS = "files of a model hold what other programs read"
PARTS = ("eos_token", "chat_template[0]", "chat_template[1]")
KEYS_OF_OTHERS = ("", *MODEL_FILES, *(f"tokenizer_config.json.{part}" for part in PARTS))
HANDED_ON = "an id that the client chose, and gets back by its place"
BOUNDARIES = [
    Boundary("rows of coding tasks", SWE_ROW, swe_rows),
    Boundary("reward files", {"reward": 0.5, "style": 0.25}, reward_files),
    Boundary(
        "demonstrations",
        {"messages": TALK, "tools": [TOOL]},
        demonstrations,
        {
            "messages[2].tool_calls[0].id": HANDED_ON,
            "messages[3].tool_call_id": HANDED_ON,
            "messages[3].name": "this template names no tool beside its answer",
        },
    ),
    Boundary("demonstrations of two texts", {"prompt": "2 + 2?", "completion": "4"}, demonstrations),
    Boundary(
        "exact demonstrations",
        {"turns": [{"parent": None, "prompt_ids": [5, 6], "token_ids": [7, 8], "learns": True}]},
        demonstrations,
    ),
    Boundary("prompt rows", {"prompt": TALK[:2]}, prompt_rows, {"": "other columns are those of the reward functions"}),
    Boundary("tool schemas", [TOOL], tool_schemas),
    Boundary(
        "chat completions",
        {"model": "policy", "messages": TALK, "tools": [TOOL], "stop": ["END"]},
        request("/v1/chat/completions"),
        {"model": "there is one model"},
    ),
    Boundary(
        "responses",
        {
            "model": "policy",
            "instructions": "Be brief.",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is in a?"}]}
            ],
            "tools": [
                {
                    "type": "function",
                    "name": "look",
                    "description": "Look.",
                    "parameters": TOOL["function"]["parameters"],
                }
            ],
        },
        request("/v1/responses"),
        {"model": "there is one model"},
    ),
    Boundary(
        "Anthropic's messages",
        {
            "model": "policy",
            "system": "Be brief.",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "What is in a?"}]}],
            "tools": [{"name": "look", "description": "Look.", "input_schema": TOOL["function"]["parameters"]}],
        },
        request("/v1/messages"),
        {"model": "there is one model"},
    ),
    Boundary(
        "text completions",
        {"model": "policy", "prompt": "Two and", "stop": ["END"]},
        request("/v1/completions"),
        {"model": "there is one model"},
    ),
    runner_log("pytest -rA", "PASSED", lambda test, status: f"=== short test summary info ===\n{status} {test}"),
    runner_log("pytest -v", "PASSED", lambda test, status: f"{test} {status} [ 50%]"),
    runner_log("unittest -v", "ok", lambda test, status: f"{test.rpartition('::')[2]} (tests.a) ... {status}"),
    runner_log("cargo test", "ok", lambda test, status: f"test {test} ... {status}"),
    runner_log("go test -v", "PASS", lambda test, status: f"--- {status}: {test} (0.00s)"),
    runner_log("TAP", "ok", lambda test, status: f"{status} 1 - {test}"),
    runner_log("mocha", "✓", lambda test, status: f"  {status} {test}"),
    runner_log("jest by file", "PASS", lambda test, status: f"{status} {test}"),
    Boundary(
        "answers of endpoints",
        {
            "choices": [
                {
                    "message": {
                        "role": "assistant",
                        "content": "I look.",
                        "reasoning": "hm",
                        "tool_calls": [{"id": "c1", "type": "function", "function": CALL["function"]}],
                    },
                    "finish_reason": "tool_calls",
                }
            ],
            "usage": {"completion_tokens": 9},
        },
        endpoint_answer,
        others=dict.fromkeys(
            ("", "choices[0]", "usage"), "facts of the server, such as ids and costs, that are no answer"
        ),
    ),
    Boundary("Harbor tasks", HARBOR, harbor_tasks),
    Boundary("model folders", MODEL_FILES, model_folder, others=dict.fromkeys(KEYS_OF_OTHERS, OTHERS)),
    Boundary("descriptions of models", ARCHITECTURE, architecture, others={"": OTHERS}),
    Boundary(
        "run files",
        {"model": "agentrl/tiny-coder", "env": {"id": "agentrl/Calculator-v0"}, "train": {"lr": 1e-4}},
        run_file,
    ),
]
_REFUSALS = (AgentRLError, UnservedRequest, TypeError)


def changes(value: Any, path: str = "") -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
    """Place, kind and the change itself, of every dict and leaf below a value."""

    def put(keys: list[Any], new: Any) -> Callable[[Any], Any]:
        def change(whole: Any) -> Any:
            changed = copy.deepcopy(whole)
            if not keys:
                return new
            inner = changed
            for key in keys[:-1]:
                inner = inner[key]
            if new is _GONE:
                del inner[keys[-1]]
            else:
                inner[keys[-1]] = new
            return changed

        return change

    def walk(inner: Any, keys: list[Any], place: str) -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
        if isinstance(inner, dict):
            yield place, "an unknown key", put([*keys, UNKNOWN], "x")
            for key, item in inner.items():
                yield from walk(item, [*keys, key], f"{place}.{key}" if place else key)
        elif isinstance(inner, list):
            for at, item in enumerate(inner):
                yield from walk(item, [*keys, at], f"{place}[{at}]")
        if keys:
            if inner is not None:
                yield place, "a null", put(keys, None)
            if isinstance(inner, str):
                yield place, "an unknown word", put(keys, UNKNOWN)
                yield place, "a number for a text", put(keys, 7)
            yield (
                place,
                "a list for a value" if not isinstance(inner, list) else "an object for a list",
                put(keys, [7] if not isinstance(inner, list) else {"zq": 7}),
            )

    yield from walk(value, [], path)


_GONE = object()


def without(sample: Any, change: Callable[[Any], Any], place: str) -> Any:
    """The sample in which the changed key is left out; None if it stands in a list."""
    if place.endswith("]"):
        return None
    for where, kind, dropped in changes(sample):
        if where == place and kind == "a null":
            changed = dropped(sample)
            stack: list[Any] = [changed]
            while stack:
                inner = stack.pop()
                if isinstance(inner, dict):
                    for key in [key for key, item in inner.items() if item is None]:
                        del inner[key]
                    stack += inner.values()
                elif isinstance(inner, list):
                    stack += inner
            return changed
    return None


@pytest.mark.medium
@each_case("boundary", BOUNDARIES)
def test_nothing_from_outside_is_dropped_in_silence(boundary: Boundary, tmp_path: Path) -> None:
    def seen(value: Any) -> tuple[str, Any]:
        notices.OF_PROCESS.forget()
        try:
            result = boundary.read(value, tmp_path)
        except _REFUSALS as error:
            assert str(error).strip() and "\n" not in str(error)
            return "refused", str(error)
        return ("named" if notices.OF_PROCESS.totals() else "read"), result

    kind, before = seen(boundary.sample)
    assert kind == "read", before  # a valid sample has nothing to name
    dropped: list[str] = []
    for place, case, change in changes(boundary.sample):
        if place in boundary.apart or (case == "an unknown key" and place in boundary.others):
            continue
        how, after = seen(change(boundary.sample))
        if how != "read" or after != before:
            continue
        if case == "a null" and (bare := without(boundary.sample, change, place)) is not None:
            as_absent = seen(bare)
            if as_absent[0] == "read" and as_absent[1] == before:
                continue  # the key said what its absence says
        dropped.append(f"{place or 'the whole'}: {case}")
    assert "\n".join(dropped) == ""
