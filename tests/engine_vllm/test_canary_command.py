"""`agentrl canary` on vLLM as its users start it, without our plugin: each fault by its name, and none of a healthy
server."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from agentrl.canary.examine import Report, Subject, examine
from agentrl.engine.vllm.launch import find_build
from agentrl.host.ports import free_port
from tests.parts.canary_models import Folders, Proxy, make_folders
from tests.parts.served_vllm import in_thread

from .conftest import Started

pytestmark = pytest.mark.vllm

LIFELINE = 'exec 3<&0; "$@" & server=$!; (cat <&3; kill $server) & wait $server'
"""Runs a command until standard input ends."""
ADAPTERS = ("adapter", "other_adapter")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return make_folders(tmp_path_factory.mktemp("canary") / "folders")


@pytest.fixture(scope="module")
def servers(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URLs of two stock servers: `float32` has `rounded` with its adapters and processed log-probs, `bfloat16` has
    `exact` and raw ones."""
    adapters = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "3", "--lora-modules"]
    adapters += [f"{name}={folders.root / name}" for name in ADAPTERS]
    models = {
        "float32": (folders.rounded, ["--logprobs-mode", "processed_logprobs", *adapters]),
        "bfloat16": (folders.exact, []),
    }
    with ExitStack() as stack:
        urls = dict[str, str]()
        started = dict[str, Started]()
        for core, (dtype, (model, options)) in enumerate(models.items()):
            folder, port = tmp_path_factory.mktemp(dtype), free_port()
            argv = ["sh", "-c", LIFELINE, "sh", str(find_build().python), "-m", "vllm.entrypoints.openai.api_server"]
            argv += ["--model", str(model), "--served-model-name", "policy", "--port", str(port), "--dtype", dtype]
            argv += ["--max-model-len", "2048", "--kv-cache-memory-bytes", "16M", "--block-size", "32"]
            env = {
                "XDG_CACHE_HOME": str(folder),
                "TMPDIR": str(folder),
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
                "VLLM_CPU_OMP_THREADS_BIND": str(core),
                "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_canary",
            }
            started[dtype] = Started([*argv, "--enforce-eager", *options], env, folder)
            urls[dtype] = f"http://127.0.0.1:{port}"
            stack.callback(started[dtype].close)
            started[dtype].start()
        for dtype, url in urls.items():
            trio.run(started[dtype].answers, url)
        yield urls


def look(url: str, model: Path, **options: Any) -> Report:
    return examine(Subject(url=url, model=model, **options))


def names(report: Report) -> list[str]:
    return [fault.name for fault in report.faults]


def test_healthy_servers_have_no_fault(servers: dict[str, str], folders: Folders) -> None:
    others = [folders.other, folders.new_step, folders.other_adapter]
    full = look(servers["float32"], folders.rounded, name="policy", candidates=others, expected_mode="processed")
    assert (full.way, full.faults, full.unknown, full.remarks) == ("completions", [], [], [])
    assert all(row.max < 1e-4 for row in full.depths) and len(full.depths) == 3
    adapted = look(servers["float32"], folders.rounded, adapter=folders.adapter, name="adapter", candidates=others)
    assert (adapted.faults, adapted.unknown) == ([], [])
    half = look(servers["bfloat16"], folders.exact, dtype="bfloat16", candidates=[folders.rounded, *others])
    assert (half.faults, half.unknown, half.mode) == ([], [], "raw")
    assert all(row.mean > 1e-4 for row in half.depths)


@pytest.mark.parametrize(
    ("server", "model", "options", "name", "evidence"),
    [
        ("float32", "rounded", {"adapter": "adapter", "name": "policy"}, "adapter_not_applied", "without the adapter"),
        ("bfloat16", "exact", {"adapter": "young_adapter"}, "adapter_not_applied", "without the adapter"),
        ("float32", "rounded", {"adapter": "adapter", "name": "other_adapter"}, "other_adapter", "the model below"),
        ("float32", "other", {"candidates": ["new_layer", "rounded"]}, "other_checkpoint", "/rounded"),
        ("float32", "new_layer", {"candidates": ["old_layer"]}, "partial_update", ": model.layers.2"),
        ("bfloat16", "rounded", {"candidates": ["exact"]}, "other_checkpoint", "/exact"),
        ("float32", "exact", {}, "quantized", "rounded to int8"),
        ("bfloat16", "exact", {"dtype": "float32"}, "dtype", "it computes in bfloat16, not in float32"),
        ("float32", "windowed", {}, "depth", "up to 512 tokens of context"),
        ("float32", "new_special", {}, "special_tokens", "'<tool>' (130)"),
        ("float32", "other_template", {}, "chat_template", "3 of 3 differ"),
    ],
)
def test_other_weights_and_templates_are_named(
    server: str,
    model: str,
    options: dict[str, Any],
    name: str,
    evidence: str,
    servers: dict[str, str],
    folders: Folders,
) -> None:
    options = {"dtype": server, "name": "policy", **options}
    if "adapter" in options:
        options["adapter"] = folders.root / options["adapter"]
    options["candidates"] = [folders.root / each for each in options.get("candidates", ())]
    report = look(servers[server], folders.root / model, **options)
    assert names(report) == [name]
    assert evidence in report.faults[0].evidence


@pytest.mark.parametrize(
    ("settings", "name", "evidence"),
    [
        ({"temperature": 0.7}, "temperature", "temperature 0.7, which"),
        ({"top_k": 5}, "top_k", "top_k 5, which"),
        ({"top_p": 0.8}, "top_p", "top_p 0.8, which"),
        ({"repetition_penalty": 1.3}, "penalty", "repetition_penalty 1.3, which"),
        ({"frequency_penalty": 0.8}, "penalty", "frequency_penalty 0.8, which"),
        ({"add_special_tokens": True}, "bos_doubled", "3 of 3 differ"),
    ],
)
def test_what_alters_requests_on_their_way_is_named(
    settings: dict[str, Any], name: str, evidence: str, servers: dict[str, str], folders: Folders
) -> None:
    def alter(path: str, body: dict[str, Any]) -> dict[str, Any]:
        is_chat = path == "/v1/chat/completions"
        return (
            body | settings if is_chat == ("add_special_tokens" in settings) and "prompt_logprobs" not in body else body
        )

    with in_thread(Proxy(servers["float32"], alter)) as proxy:  # pyright: ignore[reportArgumentType]
        report = look(proxy.url, folders.rounded, name="policy")
    assert names(report) == [name]
    assert evidence in report.faults[0].evidence


def test_a_prefix_of_an_adapter_whose_folder_was_written_again_is_named(
    servers: dict[str, str], folders: Folders, tmp_path: Path
) -> None:
    """vLLM keeps what an adapter computed, by its name and path, when it is loaded again in place."""
    url, live = servers["float32"], tmp_path / "live"

    def load(name: str) -> Report:
        shutil.copytree(folders.root / name, live, dirs_exist_ok=True)
        body = {"lora_name": "live", "lora_path": str(live), "load_inplace": name == "other_adapter"}
        httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60).raise_for_status()
        return look(url, folders.rounded, adapter=live, name="live")

    assert names(load("adapter")) == []
    assert names(load("other_adapter")) == ["stale_prefix_cache"]
    httpx.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()
    assert names(look(url, folders.rounded, adapter=live, name="live")) == []
