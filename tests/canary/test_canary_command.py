"""`agentrl canary` on the embedded engine: each fault by its name, and none of a healthy server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from commands import agentrl
from each_case import each_case

from agentrl.canary import probe
from agentrl.canary.examine import Report, Subject, examine
from agentrl.canary.server import ServedTokens
from agentrl.canary.verdict import FIXES, token_fault
from agentrl.http.http_server import Answer
from tests.engine.conftest import Server
from tests.parts.canary_models import Alter, EchoServer, Folders, Proxy, make_folders
from tests.parts.served_vllm import in_thread


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return make_folders(tmp_path_factory.mktemp("canary") / "folders")


@pytest.fixture(scope="module")
def servers(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URLs of embedded engines: `float32` serves `rounded` with its adapters, `bfloat16` serves `exact`, `sglang`
    speaks SGLang."""
    with ExitStack() as stack:

        def start(model: Path, *options: str) -> str:
            from_here = ("--weights-from", str(folders.root), "--served-model-name", "policy")
            running = Server(model, tmp_path_factory.mktemp("server"), "--max-batch", "4", *from_here, *options)
            stack.callback(running.close)
            return running.url

        urls = {
            "float32": start(folders.rounded),
            "bfloat16": start(folders.exact, "--dtype", "bfloat16"),
            "sglang": start(folders.rounded, "--api", "sglang"),
        }
        for name in ("adapter", "other_adapter"):
            body = {"lora_name": name, "lora_path": str(folders.root / name)}
            httpx.post(f"{urls['float32']}/v1/load_lora_adapter", json=body, timeout=60).raise_for_status()
        yield urls


def look(url: str, model: Path, **options: Any) -> Report:
    return examine(Subject(url=url, model=model, **options))


def names(report: Report) -> list[str]:
    return [fault.name for fault in report.faults]


# --- healthy


@pytest.mark.medium
@pytest.mark.parametrize("way", ["generate", "sglang", "echo"])
def test_a_healthy_float32_server_has_no_fault(way: str, servers: dict[str, str], folders: Folders) -> None:
    url = servers["sglang" if way == "sglang" else "float32"]
    with in_thread(EchoServer(url)) as echo:  # pyright: ignore[reportArgumentType]
        report = look(echo.url if way == "echo" else url, folders.rounded)
    assert (report.way, report.faults, report.unknown) == (way, [], [])
    assert [row.depth for row in report.depths] == [256, 512, 1024]
    for row in report.depths:
        assert row.is_near and row.max < 1e-4 < row.rounding_max < 1
    assert report.mode == (None if way == "echo" else "processed")


@pytest.mark.medium
def test_a_healthy_bfloat16_server_has_no_fault(servers: dict[str, str], folders: Folders) -> None:
    report = look(servers["bfloat16"], folders.exact, dtype="bfloat16", candidates=[folders.rounded, folders.other])
    assert (report.faults, report.unknown) == ([], [])
    assert all(row.mean > 1e-4 for row in report.depths)


@pytest.mark.medium
def test_a_healthy_adapter_has_no_fault(servers: dict[str, str], folders: Folders) -> None:
    options: Any = {"adapter": folders.adapter, "name": "adapter", "candidates": [folders.other_adapter, folders.other]}
    assert look(servers["float32"], folders.rounded, **options).faults == []


# --- weights


@pytest.mark.medium
@pytest.mark.parametrize(
    ("model", "options", "name", "evidence"),
    [
        ("rounded", {"adapter": "adapter", "name": "policy"}, "adapter_not_applied", "the model without the adapter"),
        (
            "rounded",
            {"adapter": "adapter", "name": "other_adapter"},
            "other_adapter",
            "the model below the adapter agrees",
        ),
        (
            "rounded",
            {"adapter": "adapter", "name": "other_adapter", "candidates": ["other", "other_adapter"]},
            "other_adapter",
            "it answers as",
        ),
        ("other", {"candidates": ["new_layer", "rounded"]}, "other_checkpoint", "/rounded"),
        ("other", {}, "other_weights", "none of 0 candidates"),
        ("new_layer", {"candidates": ["old_layer"]}, "partial_update", "not of the folder: model.layers.2"),
        (
            "new_end",
            {"candidates": ["other_adapter", "old_end"]},
            "partial_update",
            "not of the folder: model.layers.2, model.layers.3, model.norm, lm_head",
        ),
        ("new_step", {"candidates": ["old_step"]}, "partial_update", "of the folder: model.layers.0, model.layers.3"),
        ("new_norms", {"candidates": ["old_norms"]}, "partial_update", "folder: model.layers.0, model.layers.3;"),
        ("new_norms", {}, "dtype", "or with slightly other weights"),
        ("exact", {}, "quantized", "rounded to int8"),
        ("new_special", {}, "special_tokens", "'<tool>' (130)"),
        ("other_template", {}, "chat_template", "it counts other numbers"),
        ("windowed", {}, "depth", "nats off up to 512 tokens of context"),
        ("no_bos_template", {}, "chat_template", "33 for 32"),
    ],
)
def test_other_weights_and_templates_are_named(
    model: str, options: dict[str, Any], name: str, evidence: str, servers: dict[str, str], folders: Folders
) -> None:
    options = dict(options)
    if "adapter" in options:
        options["adapter"] = folders.root / options["adapter"]
    options["candidates"] = [folders.root / each for each in options.get("candidates", ())]
    report = look(servers["float32"], folders.root / model, **options)
    assert names(report) == [name]
    assert evidence in report.faults[0].evidence


@pytest.mark.medium
def test_a_young_adapter_is_seen_by_its_direction_and_one_that_moves_nothing_is_not_judged(
    servers: dict[str, str], folders: Folders
) -> None:
    """In bfloat16, where each token is off by more than the adapter moves it."""
    options: Any = {"adapter": folders.young_adapter, "dtype": "bfloat16"}
    report = look(servers["bfloat16"], folders.exact, **options)
    assert names(report) == ["adapter_not_applied"]
    assert all(row.is_near for row in report.depths)
    unmoved = look(servers["bfloat16"], folders.exact, adapter=folders.unmoved_adapter, dtype="bfloat16")
    assert names(unmoved) == []
    assert unmoved.unknown == ["the adapter moves the probe by less than bfloat16 rounds it: not told apart"]


@pytest.mark.medium
def test_bfloat16_in_the_place_of_float32_is_named(servers: dict[str, str], folders: Folders) -> None:
    report = look(servers["bfloat16"], folders.exact)
    assert names(report) == ["dtype"]
    assert "it computes in bfloat16, not in float32" in report.faults[0].evidence


@pytest.mark.medium
def test_two_faults_are_both_named(servers: dict[str, str], folders: Folders) -> None:
    report = look(servers["bfloat16"], folders.no_bos_template, candidates=[folders.exact])
    assert names(report) == ["chat_template", "other_checkpoint", "dtype"]


# --- sampling


def altering(**settings: float) -> Alter:
    def alter(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if "sampling_params" in body:
            body["sampling_params"] |= settings
        return body

    return alter


@pytest.mark.parametrize(
    ("settings", "name", "evidence"),
    [
        ({"temperature": 0.7}, "temperature", "temperature 0.7, which"),
        ({"top_k": 5}, "top_k", "top_k 5, which"),
        ({"top_p": 0.8}, "top_p", "top_p 0.8, which"),
        ({"temperature": 0.7, "top_k": 5}, "processed", "no one setting of sampling explains it"),
    ],
)
def test_settings_of_sampling_that_nobody_requested_are_named(
    settings: dict[str, float], name: str, evidence: str, servers: dict[str, str], folders: Folders
) -> None:
    with in_thread(Proxy(servers["float32"], altering(**settings))) as proxy:  # pyright: ignore[reportArgumentType]
        report = look(proxy.url, folders.rounded)
    assert names(report) == [name]
    assert evidence in report.faults[0].evidence


@pytest.mark.medium
def test_a_prefix_that_was_computed_by_other_weights_is_named(servers: dict[str, str], folders: Folders) -> None:
    """The proxy has an adapter compute what follows a prompt that the server has met before."""
    first = probe.draw(probe.read_vocabulary(folders.rounded), 8)

    def stale(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("stream") and tuple(body["token_ids"][:8]) == first:
            body["model"] = "adapter"
        return body

    with in_thread(Proxy(servers["float32"], stale)) as proxy:  # pyright: ignore[reportArgumentType]
        report = look(proxy.url, folders.rounded)
    assert names(report) == ["stale_prefix_cache"]


@pytest.mark.medium
def test_processed_log_probs_are_a_fault_where_raw_ones_are_expected(servers: dict[str, str], folders: Folders) -> None:
    assert names(look(servers["float32"], folders.rounded, expected_mode="processed")) == []
    assert names(look(servers["float32"], folders.rounded, expected_mode="raw")) == ["logprobs_mode"]


# --- the command


@pytest.mark.medium
def test_the_command_prints_a_table_and_faults_and_ends_with_their_code(
    servers: dict[str, str], folders: Folders
) -> None:
    code, out, err = agentrl("canary", servers["float32"], "--model", folders.rounded, "--max-depth", 256)
    assert (code, out.splitlines()[-1]) == (0, "the server computes with these weights, up to the rounding of float32")
    assert "1,024" not in out and "generate" in err
    options = ["--candidates", folders.rounded, "--max-depth", "256"]
    code, out, _ = agentrl("canary", servers["float32"], "--model", folders.other, *options)
    assert code == 1
    assert "too far" in out and f"other_checkpoint: it answers as {folders.rounded}" in out
    assert "    start the server with --model of this folder" in out
    code, out, _ = agentrl("canary", servers["float32"], "--model", folders.other, *options, "--json")
    document = json.loads(out)
    assert (code, document["healthy"], document["faults"][0]["name"]) == (1, False, "other_checkpoint")


class Hangs(Proxy):
    """A server that takes a completion and never answers."""

    async def answer(self, method: str, path: str, query: str, headers: Mapping[str, str], content: bytes) -> Answer:
        if path == "/inference/v1/generate":
            await trio.sleep_forever()
        return await super().answer(method, path, query, headers, content)


class NotNumbers(Proxy):
    """A server whose model computes NaN, in vLLM's words."""

    async def answer(self, method: str, path: str, query: str, headers: Mapping[str, str], content: bytes) -> Answer:
        if path == "/inference/v1/generate" and b"prompt_logprobs" in content:
            return 400, b'{"error": {"message": "Out of range float values are not JSON compliant"}}'
        return await super().answer(method, path, query, headers, content)


def test_a_server_that_cannot_be_compared_is_one_line_and_exit_code_2(
    servers: dict[str, str], folders: Folders
) -> None:
    url, model = servers["float32"], ["--model", str(folders.rounded)]

    def refused(*words: object) -> str:
        code, out, err = agentrl("canary", *words)
        assert (code, out) == (2, "")
        return err.splitlines()[-1]

    with in_thread(Proxy(url, lambda path, body: body if path == "/v1/models" else None)) as bare:  # pyright: ignore[reportArgumentType]
        line = refused(bare.url, *model)
    assert "returns no log-probs of a prompt's tokens: vLLM and SGLang return them" in line and "echo" in line
    with in_thread(Hangs(url)) as hanging:  # pyright: ignore[reportArgumentType]
        assert "did not finish /inference/v1/generate within 0.2 s" in refused(
            hanging.url, *model, "--deadline-s", "0.2"
        )
    assert "is not there" in refused("http://127.0.0.1:9", *model)
    assert "URL = 'nowhere'" in refused("nowhere", *model)
    assert "serves policy, adapter" in refused(url, *model, "--name", "mine")
    assert "serves adapter, other_adapter: say with --name" in refused(url, *model, "--adapter", folders.adapter)
    assert "no adapter_config.json" in refused(url, *model, "--adapter", folders.rounded)


def test_nan_is_a_fault(servers: dict[str, str], folders: Folders) -> None:
    with in_thread(NotNumbers(servers["float32"])) as broken:  # pyright: ignore[reportArgumentType]
        assert names(look(broken.url, folders.rounded)) == ["not_numbers"]


def test_every_fault_is_in_the_list_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "canary.md").read_text()
    rows = re.findall(r"^- (`.+?): ", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == FIXES.keys()


# --- tokens


@each_case(
    ("ours", "served", "name"),
    [
        ((128, 5, 6), (128, 5, 6), None),
        ((128, 5, 6), (128, 128, 5, 6), "bos_doubled"),
        ((128, 5, 6), (5, 6), "bos_lost"),
        ((5, 6), (128, 5, 6), "chat_template"),
        ((128, 5, 6), (128, 5, 7), "chat_template"),
        ((128, 5, 6), 3, None),
        ((128, 5, 6), 4, "bos_doubled"),
        ((128, 5, 6), 2, "bos_lost"),
        ((5, 6), 3, "chat_template"),
    ],
)
def test_what_differs_at_the_start_has_a_name(
    ours: tuple[int, ...], served: tuple[int, ...] | int, name: str | None
) -> None:
    tokens = ServedTokens(served) if isinstance(served, int) else ServedTokens(len(served), served)
    fault = token_fault([(ours, tokens)], (128, 129), "chat_template")
    assert (fault and fault.name) == name
