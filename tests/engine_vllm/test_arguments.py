"""Arguments of vLLM's server in the run file: checked by the vLLM that is installed, before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl import config as configuration
from agentrl.config import EngineSettings
from agentrl.config.vllm_arguments import RESERVED, normal, words
from agentrl.engine import running_engine
from agentrl.engine.vllm import launch
from agentrl.engine.vllm.launch import Build, VLLMServer, find_build
from agentrl.errors import ConfigError, UsageError
from agentrl.run import trainer
from agentrl.run.children import engine_process

from .policy import make_model

CPU = Build(python=Path("/vllm/bin/python"), version="0.32.0", cpu=True)
CUDA = replace(CPU, cpu=False)
RUN = {"model": "agentrl/tiny-coder", "env": {"id": "agentrl/CodeRepair-v0"}}


def server(build: Build = CUDA, **changes: Any) -> VLLMServer:
    return VLLMServer(model=Path("/m"), port=8000, plugin_folder=Path("/p"), build=build, **changes)


def settings(given: dict[str, Any], **changes: Any) -> EngineSettings:
    return configuration.parse({**RUN, "engine": {"kind": "vllm", "vllm": given, **changes}}).engine


def test_any_argument_of_the_server_reaches_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process.vllm, "find_build", lambda **_: CPU)
    given = {
        "max_num_batched_tokens": 8192,
        "trust-remote-code": True,
        "enable-prefix-caching": False,
        "speculative-config": {"method": "ngram", "num_speculative_tokens": 2},
        "kv-cache-dtype-skip-layers": ["0", "1"],
        "block-size": 64,  # in the place of ours
    }
    one = running_engine.vllm_server(Path("/m"), settings(given), port=1, plugin_folder=Path("/p"), max_context=64)
    argv = one.argv()
    assert argv[argv.index("--max-num-batched-tokens") + 1] == "8192"
    assert {"--trust-remote-code", "--no-enable-prefix-caching"} <= set(argv)
    assert json.loads(argv[argv.index("--speculative-config") + 1])["method"] == "ngram"
    at = argv.index("--kv-cache-dtype-skip-layers")
    assert argv[at + 1 : at + 3] == ["0", "1"]
    assert argv.count("--block-size") == 1 and argv[argv.index("--block-size") + 1] == "64"
    assert "--trust-remote-code" not in one.argv(bare=True)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_model_len", "give rollout.max_context"),
        ("dtype", "give engine.dtype"),
        ("gpu-memory-utilization", "give engine.kv_cache_mb"),
        ("port", "leave it out"),
        ("max-loras", "give train.lora_rank"),
    ],
)
def test_what_the_run_decides_is_refused_with_the_setting_that_says_it(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.vllm\.{name.replace('_', '-')} = 1: .*{hint}"):
        settings({name: 1})


def test_everything_that_a_run_says_itself_is_reserved_but_what_only_fits_a_build() -> None:
    one = server(build=CPU, lora_rank=8, lora_targets=("q_proj",), kv_cache_bytes=1, kept_sets=True)
    said = {word[2:] for word in one.argv() if word.startswith("--")}
    said |= {word[2:] for word in replace(one, build=CUDA, routed_experts=True).argv() if word.startswith("--")}
    assert said - RESERVED.keys() == {
        "block-size",
        "distributed-executor-backend",
        "enforce-eager",
        "uvicorn-log-level",
    }


@pytest.mark.parametrize("name", ["", "-tp", "a.b", "Dtype", "max num"])
def test_a_word_that_is_no_name_of_an_argument_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="write its long name, as max-num-batched-tokens = 8192"):
        normal({name: 1})


def test_arguments_are_for_servers_that_the_run_starts() -> None:
    for other in ({"kind": "embedded"}, {"urls": ["http://a:1"]}):
        with pytest.raises(ConfigError, match=r"engine\.vllm = .*that the run starts: leave it out"):
            settings({"block-size": 32}, **other)


@pytest.mark.parametrize(
    ("given", "gpus", "tensor"),
    [
        ({}, (0, 1, 2, 3), "4"),
        ({"data-parallel-size": 2}, (0, 1, 2, 3), "2"),
        ({"data-parallel-size": 2, "tensor-parallel-size": 2}, (0, 1, 2, 3), "2"),
        ({"pipeline-parallel-size": 2}, (0, 1), None),
    ],
)
def test_what_is_split_otherwise_is_not_split_by_layers_again(
    given: dict[str, int], gpus: tuple[int, ...], tensor: str | None
) -> None:
    settings(given, replicas=[list(gpus)])
    argv = server(gpus=gpus, arguments=given).argv()
    assert argv.count("--tensor-parallel-size") == (tensor is not None)
    assert tensor is None or argv[argv.index("--tensor-parallel-size") + 1] == tensor


@pytest.mark.parametrize("replicas", [1, [[0, 1, 2]]])
def test_a_split_that_needs_other_gpus_is_refused_with_those_it_needs(replicas: int | list[list[int]]) -> None:
    with pytest.raises(ConfigError, match=r"need 2 GPUs for each replica, .* give engine\.replicas = \[\[0, 1\]\]"):
        settings({"tensor-parallel-size": 2}, replicas=replicas)


def answering(folder: Path, script: str) -> VLLMServer:
    """A server whose interpreter is a script."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\ncat > {folder}/asked\n{script}\n")
    python.chmod(0o755)
    build = Build(python=python, version="0.32.0", cpu=False)
    given = {"max-num-batched-tokns": 8, "kv-cache-dtype": "fp9"}
    return replace(server(), build=build, plugin_folder=folder / "plugin", arguments=given)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            {"key": "max-num-batched-tokns", "says": None, "near": ["max-num-batched-tokens"]},
            r"engine.vllm.max-num-batched-tokns = 8: vLLM 0.32.0 has no such argument; did you mean "
            r"'max-num-batched-tokens'\? `\S+python -m \S+ --help=all` lists them",
        ),
        (
            {"key": "kv-cache-dtype", "says": "invalid choice: 'fp9'", "near": []},
            r"engine.vllm.kv-cache-dtype = 'fp9': vLLM 0.32.0 says: invalid choice: 'fp9' \(see `\S+python -m \S+ "
            r"--help=kv-cache-dtype`\)",
        ),
        ({"key": None, "says": "no", "near": []}, r"engine.vllm = \{'max.*\}: vLLM 0.32.0 says: no"),
    ],
)
def test_a_refusal_is_one_line_with_key_value_and_what_to_type(tmp_path: Path, answer: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}$"):
        launch.check_arguments(answering(tmp_path, f"echo noise; echo; cat <<'E'\n{json.dumps(answer)}\nE"))
    asked = json.loads((tmp_path / "asked").read_text())
    assert asked["given"]["kv-cache-dtype"] == ["--kv-cache-dtype", "fp9"]
    assert "--model" in asked["base"] and "--kv-cache-dtype" not in asked["base"]


def test_a_vllm_that_cannot_be_asked_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot ask the vLLM of \S+python about \[engine\.vllm\]: broken"):
        launch.check_arguments(answering(tmp_path, "echo broken >&2; exit 1"))


@pytest.mark.parametrize("given", [{"speculative-config": {"method": "ngram"}}, {"spec-method": "ngram"}])
def test_drafts_are_refused_with_the_build_that_tells_wrong_log_probs_of_them(given: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 64}))
    one = replace(server(build=CPU, arguments=given), model=tmp_path, plugin_folder=tmp_path / "p")
    with pytest.raises(ConfigError, match=r"engine\.vllm\.spec.*CPU build returns wrong log-probs of drafted tokens"):
        one.prepare()
    replace(one, build=CUDA).prepare()


@pytest.mark.medium
def test_a_run_asks_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[VLLMServer] = []
    monkeypatch.setattr(engine_process.vllm, "find_build", lambda **_: CUDA)
    monkeypatch.setattr(engine_process, "check_vllm", asked.append)
    trainer.check_startable(configuration.parse({**RUN, "engine": {"kind": "vllm"}}))
    assert not asked  # it takes ten seconds: nobody waits for nothing
    trainer.check_startable(configuration.parse({**RUN, "engine": {"kind": "vllm", "vllm": {"seed": 7}}}))
    assert [one.arguments for one in asked] == [{"seed": 7}]


CASES: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({"max-num-batched-tokens": 512, "kv-cache-dtype": "auto"}, None, None),
    ({"hf-overrides": {"rope_theta": 1e6}, "trust-remote-code": True}, None, None),
    ({"max-num-batched-tokns": 512}, "max-num-batched-tokns", None),
    ({"max-num-batched": 512}, "max-num-batched", None),  # a beginning is no name
    ({"device-memory-utilization": 0.5}, "device-memory-utilization", RESERVED["gpu-memory-utilization"]),
    ({"max-num-batched-tokens": "many"}, "max-num-batched-tokens", "invalid"),
    ({"kv-cache-dtype": "fp9"}, "kv-cache-dtype", "invalid choice"),
    ({"headless-mode": True, "seed": 1}, "headless-mode", None),
    ({"seed": 1, "quantization": "fp9"}, "quantization", "Unknown quantization method: fp9"),
    ({"speculative-config": {"method": "ngrm"}}, "speculative-config", "'ngram'"),
    ({"enforce-eager": "yes"}, "enforce-eager", "unrecognized arguments: yes"),
]

ASK = """
import json, sys
from agentrl.engine.vllm.plugin.argument_parser import server_parser, wrong
asked, parser = json.load(sys.stdin), server_parser()
print(json.dumps([wrong(parser, asked["base"], given, asked["reserved"]) for given in asked["cases"]]))
"""


@pytest.mark.slow
@pytest.mark.vllm
def test_the_installed_vllms_own_parser_and_configuration_judge_names_and_values(tmp_path: Path) -> None:
    build = find_build()
    one = replace(server(build), model=make_model(tmp_path / "m"), plugin_folder=tmp_path / "p", kv_cache_bytes=1 << 24)
    one.prepare()
    given = [{name: words({name: value}) for name, value in table.items()} for table, _, _ in CASES]
    asked = {"base": one.argv(bare=True)[2:], "cases": given, "reserved": RESERVED}
    done = subprocess.run(
        [build.python, "-c", ASK],
        input=json.dumps(asked),
        env={**os.environ, **one.env()},
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    for (table, key, says), found in zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True):
        if key is None:
            assert found is None, (table, found)
            continue
        assert found is not None, table
        assert found["key"] == key, (table, found)
        assert found["says"] is None if says is None else says in found["says"], (table, found)
        assert found["says"] is None or "\n" not in found["says"]
