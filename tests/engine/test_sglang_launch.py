"""SGLang servers that a run starts: the command, the process and its end, the wait, the restart in the middle of a run.

A folder with a package `sglang` takes the place of the real one. Its `launch_server` is a real process: the embedded
engine in SGLang's dialect, which reads SGLang's own arguments. That SGLang has these is read in its wheel.
"""

from __future__ import annotations

import ast
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from each_case import each_case

from agentrl import config as configuration
from agentrl.config import sglang_arguments
from agentrl.engine.client import EngineClient
from agentrl.engine.server_start import Build, has_ended, server_process
from agentrl.engine.sglang import server_launch
from agentrl.engine.sglang.server_launch import SGLangLaunch, find_build
from agentrl.errors import ConfigError, RunFailed, UsageError
from agentrl.host.ports import free_port
from agentrl.models.resolve import model_dir
from agentrl.records import EngineKey, WeightVersion
from agentrl.run.children.engine_process import ServedWeights, SupervisedEngine
from agentrl.run.processes.supervised_child import Child
from agentrl.run.run_folder import LOCKS

ENGINE = """
import argparse, os, sys
parser = argparse.ArgumentParser()
for name in ("model-path", "host", "port", "context-length", "max-running-requests", "stream-interval", "api-key"):
    parser.add_argument("--" + name)
given, _ = parser.parse_known_args()
assert given.api_key and "AGENTRL_ENGINE_KEY" not in os.environ, "the key comes as an argument, and goes no further"
assert os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
os.environ |= {"AGENTRL_ENGINE_KEY": given.api_key, "AGENTRL_WEIGHTS_KEY": "none"}
from agentrl.engine import auth
auth.changes = lambda method, path: False  # SGLang knows no signatures
from agentrl.engine.embedded.__main__ import main
sys.exit(main(["--api", "sglang", "--model", given.model_path, "--host", given.host, "--port", given.port,
    "--max-model-len", given.context_length, "--max-batch", given.max_running_requests, "--kv-cache-mb", "16",
    "--stream-tokens", given.stream_interval]))
"""
SLEEPER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(sys.argv[-1], "child", child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`stand_in(code)`: an interpreter whose `sglang.launch_server` is this code, and the one that a run finds."""

    def make(code: str, version: str = "0.5.23") -> Path:
        folder = tmp_path / "site"
        (folder / "sglang").mkdir(parents=True)
        (folder / "sglang/__init__.py").touch()
        (folder / "sglang/launch_server.py").write_text(code)
        facts = folder / f"sglang-{version}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
        python.chmod(0o700)
        monkeypatch.setenv(server_launch.PYTHON_VARIABLE, str(python))
        return python

    return make


def a_server(**changes: Any) -> SGLangLaunch:
    build = Build(python=Path("/sglang/bin/python"), version="0.5.23")
    given: dict[str, Any] = {"model": Path("/m"), "port": 30000, "build": build, "key": EngineKey.of("secret")}
    return SGLangLaunch(**given | changes)


FULL = {
    "gpus": (2, 3),
    "lora_rank": 8,
    "lora_targets": ("model.layers.q_proj", "v_proj"),
    "arguments": {"mem-fraction-static": 0.7, "skip-server-warmup": True, "trust-remote-code": False},
}


def test_the_command_says_what_training_needs_and_keeps_the_key_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    own = a_server(**FULL, max_model_len=4096, dtype="bfloat16")
    script, *words = own.argv()
    assert Path(script).name == "lifeline.py"
    line = " ".join(words)
    for part in (
        "--model-path /m --host 127.0.0.1 --port 30000 --context-length 4096 --max-running-requests 128",
        "--dtype bfloat16 --sampling-defaults openai --stream-interval 16",
        "--incremental-streaming-output --enable-metrics",
        "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj v_proj --max-loras-per-batch 3",
        "--tensor-parallel-size 2 --mem-fraction-static 0.7 --skip-server-warmup",
    ):
        assert part in line
    assert "secret" not in line and "trust-remote-code" not in line
    env = own.env()
    assert env["AGENTRL_ENGINE_KEY"] == "secret" and env["AGENTRL_WEIGHTS_KEY"] == ""
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3" and env["PYTHONPATH"] == "/theirs"
    assert "CUDA_VISIBLE_DEVICES" not in a_server().env() and "--tensor-parallel-size" not in a_server().argv()


class Declared:
    """The arguments that SGLang declares, read in its source: `flags` by every spelling, with the type as written."""

    def __init__(self) -> None:
        package = Path(__file__).parents[2] / "build/wheels/sglang/sglang/srt"
        self.flags: dict[str, str] = {"config": "str", "help": "bool"}
        for path in sorted((package / "arg_groups/fields").glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    self._declare(node.target.id, node.annotation)

    def _declare(self, name: str, annotation: ast.expr) -> None:
        kind, names, said = ast.unparse(annotation), [name.replace("_", "-")], dict[str, Any]()
        if isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
            kind = ast.unparse(annotation.slice.elts[0])
            for part in annotation.slice.elts[1:]:
                if isinstance(part, ast.Call) and ast.unparse(part.func) == "Arg":
                    said = {str(one.arg): one.value for one in part.keywords}
        if "no_cli" in said:
            return
        if "aliases" in said:
            names += [alias.removeprefix("--") for alias in ast.literal_eval(said["aliases"])]
        if "cli_name" in said:
            names = [ast.literal_eval(said["cli_name"]).removeprefix("--")]
        self.flags |= dict.fromkeys(names, kind)


@pytest.mark.sglang
def test_sglang_declares_every_argument_that_we_give_or_refuse() -> None:
    declared = Declared().flags
    assert len(declared) > 200 and declared["port"] == "int"
    words = [*a_server(**FULL).argv(), "--api-key", "x", "--trust-remote-code"]
    given = {word.removeprefix("--") for word in words if word.startswith("--")}
    assert sorted((given | set(sglang_arguments.RESERVED)) - set(declared)) == []
    bare = {word[2:] for word, after in zip(words, [*words[1:], "--"], strict=True) if word[:2] == after[:2] == "--"}
    assert {name for name in given if "bool" in declared[name]} == bare


@each_case(
    ("engine", "field", "mend"),
    [
        ({"sglang": {"port": 3}}, "engine.sglang.port", "leave it out"),
        ({"sglang": {"context_length": 3}}, "engine.sglang.context-length", "rollout.max_context"),
        ({"sglang": {"-x": 3}}, "engine.sglang.-x", "mem-fraction-static"),
        ({"sglang": {"random-seed": 3}, "urls": ["http://a"]}, "engine.sglang", "leave it out"),
        ({"sglang": {"random-seed": 3}, "kind": "vllm"}, "engine.sglang", "leave it out"),
        ({"vllm": {"block-size": 3}}, "engine.vllm", "leave it out"),
    ],
)
def test_an_argument_that_the_run_decides_is_refused(engine: dict[str, Any], field: str, mend: str) -> None:
    document = {"model": "m", "env": {"id": "e"}, "engine": {"kind": "sglang", **engine}}
    with pytest.raises(ConfigError, match=mend) as refused:
        configuration.parse(document)
    assert f"{field} =" in str(refused.value)


def test_the_interpreter_is_found_or_named(stand_in: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(server_launch.PYTHON_VARIABLE, raising=False)
    with pytest.raises(UsageError, match=f"no SGLang found: set {server_launch.PYTHON_VARIABLE}"):
        find_build()
    python = stand_in("", version="0.6.1")
    with pytest.warns(UserWarning, match=r"0\.6\.1"):
        assert find_build() == Build(python=python, version="0.6.1")
    with pytest.raises(UsageError, match="has no SGLang"):
        find_build("/no/python")


async def test_it_ends_with_its_lifeline_and_so_do_its_children(stand_in: Callable[..., Path], tmp_path: Path) -> None:
    build = Build(python=stand_in(SLEEPER), version="0.5.23")
    own, log = a_server(build=build, key=EngineKey.of("-secret")), tmp_path / "log"
    with trio.fail_after(300):
        async with server_process(own.build.python, own.argv(), own.env(), log) as process:
            while b"child" not in log.read_bytes():  # noqa: ASYNC110 - of a file nobody tells us
                await trio.sleep(0.01)
            key, _, child = log.read_text().split()
            assert key == "--api-key=-secret", "a key that begins with a dash is no flag"
            assert process.stdin is not None
            await process.stdin.aclose()  # as if its owner had been killed
            assert await process.wait() == -signal.SIGTERM
    assert over(int(child))


def over(pid: int) -> bool:
    """Whether a process has ended, though nobody may have asked for its status."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


async def test_one_that_ends_says_why(stand_in: Callable[..., Path], tmp_path: Path) -> None:
    python, log = stand_in("import sys; sys.exit('sglang serve: error: unrecognized arguments: --x')"), tmp_path / "log"
    own = a_server(port=free_port(), build=Build(python=python, version="0.5.23"))
    with pytest.raises(RunFailed, match=r"unrecognized arguments: --x \(this SGLang lacks a flag"):
        async with server_process(own.build.python, own.argv(), own.env(), log) as process:
            await server_launch.ready(own, version=0, deadline_s=60, ended=lambda: has_ended(process), log=log)


@pytest.mark.parametrize("asks", [False, True])
async def test_another_server_at_its_port_is_not_taken_for_it(asks: bool) -> None:
    """One that asks for no key, and one that asks for another."""
    transport = httpx.MockTransport(lambda request: httpx.Response(401 if asks else 200, json={"data": []}))
    client, stranger = (
        EngineClient("http://e", kind="sglang", api_key=key, transport=transport) for key in ("k", None)
    )
    with pytest.raises(RunFailed, match="another server answers at http://e"):
        await server_launch._serves(client, stranger)


@pytest.mark.slow
async def test_a_run_starts_one_gives_it_weights_and_starts_it_again(
    stand_in: Callable[..., Path], tmp_path: Path
) -> None:
    stand_in(ENGINE)
    model = model_dir("agentrl/tiny-coder")
    run = configuration.parse(
        {
            "model": str(model),
            "env": {"id": "test/none"},
            "engine": {"kind": "sglang", "max_batch": 4, "start_deadline_s": 300.0},
            "rollout": {"max_context": 64, "max_tokens_per_turn": 8},
        }
    )
    run = run.model_copy(update={"engine": run.engine.with_key(EngineKey.fresh())})
    (tmp_path / LOCKS).mkdir()
    first, second = WeightVersion(version=1, step=0), WeightVersion(version=2, step=1)
    child, served = Child("engine-0", [], tmp_path), [first]

    async def weights() -> ServedWeights:
        file = model / "model.safetensors" if served[0] is second else None
        return ServedWeights(model=model, base=first, current=served[0], file=file)

    replica = SupervisedEngine(child=child, port=free_port(), scratch=tmp_path, config=run, weights=weights)
    client = EngineClient(replica.url, kind="sglang", api_key=run.engine.own_key)
    try:
        await replica.up()
        assert await client.served_version() == 1
        served[0] = second
        child.kill("a test")
        await child.wait()
        await replica.up()
        assert await client.served_version() == 2 and replica.start_s > 0
        assert run.engine.own_key is not None and run.engine.own_key.value not in child.log_path.read_text()
    finally:
        await client.aclose()
        await child.stop()
    assert child.poll() is not None
