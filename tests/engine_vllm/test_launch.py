"""How a server is started and what is said when it cannot be: no vLLM needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import EngineSettings
from agentrl.config.weight_sync import transport_of
from agentrl.engine.running_engine import vllm_server
from agentrl.engine.vllm import launch
from agentrl.engine.vllm.capabilities import Facts, Need, needed
from agentrl.engine.vllm.launch import (
    Build,
    VLLMServer,
    carry_plugin,
    check_sender,
    check_version,
    explain,
    find_build,
)
from agentrl.errors import ConfigError, ModelError, UsageError

CPU = Build(python=Path("/vllm/bin/python"), version="0.32.0", cpu=True)
CUDA = Build(python=Path("/vllm/bin/python"), version="0.32.1", cpu=False)


def server(**changes: Any) -> VLLMServer:
    given: dict[str, Any] = {"model": Path("/m"), "port": 8000, "plugin_folder": Path("/p"), "build": CPU, **changes}
    return VLLMServer(**given)


def options(one: VLLMServer) -> dict[str, str]:
    argv = one.argv()
    return {name: value for name, value in zip(argv, [*argv[1:], ""], strict=True) if name.startswith("--")}


def facts_of(*has: Need) -> Facts:
    return Facts(
        url="http://e",
        version="0.32.0",
        model="policy",
        root="/models/m",
        max_model_len=9,
        has=frozenset(has),
        backend=None,
        dtype="float32",
    )


def test_every_server_serves_tokens_with_the_log_probs_they_were_sampled_with() -> None:
    for one in (server(), server(build=CUDA)):
        found = options(one)
        assert {"--enable-scale-out", "--enable-prompt-tokens-details"} <= found.keys()
        assert found["--logprobs-mode"] == "processed_logprobs"
        assert found["--generation-config"] == "vllm"
        assert json.loads(found["--weight-transfer-config"]) == {"backend": "shm"}
        assert one.env()["VLLM_SERVER_DEV_MODE"] == "1"


def test_what_is_for_one_build_is_not_given_to_the_other() -> None:
    cpu, cuda = (options(server(build=build, routed_experts=True)) for build in (CPU, CUDA))
    assert "--enforce-eager" in cpu and "--enforce-eager" not in cuda
    assert "--enable-return-routed-experts" in cuda and "--enable-return-routed-experts" not in cpu
    assert "AGENTRL_VLLM_ROUTING" in server(routed_experts=True).env()
    assert "AGENTRL_VLLM_ROUTING" not in server(build=CUDA, routed_experts=True).env()


def test_what_it_leaves_lies_in_the_servers_own_folder_sockets_where_a_path_may_be_so_long() -> None:
    long = Path("/" + 70 * "p")
    assert [server(plugin_folder=folder).env()["TMPDIR"] for folder in (Path("/p"), long)] == ["/p", str(long)]
    assert server(plugin_folder=Path("/p")).env()["VLLM_RPC_BASE_PATH"] == "/p"
    assert server(plugin_folder=long).env()["VLLM_RPC_BASE_PATH"] == tempfile.gettempdir()


def test_a_server_runs_no_code_that_another_user_laid_into_torchs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    theirs = tmp_path / f"torchinductor_{os.getuid()}"
    theirs.mkdir()
    theirs.chmod(0o777)
    assert server().env()["TORCHINDUCTOR_CACHE_DIR"] == "/p/compiled"


def test_a_server_sees_its_own_gpus_only_and_splits_its_layers_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    one, two = server(build=CUDA, gpus=(3,)), server(build=CUDA, gpus=(1, 2))
    assert (one.env()["CUDA_VISIBLE_DEVICES"], two.env()["CUDA_VISIBLE_DEVICES"]) == ("3", "1,2")
    assert "--tensor-parallel-size" not in options(one)
    assert options(two)["--tensor-parallel-size"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in server(build=CUDA).env()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-5a, 6")  # what a scheduler gave this process
    assert two.env()["CUDA_VISIBLE_DEVICES"] == "GPU-5a,6"


def test_a_server_whose_cache_has_a_size_asks_for_no_more_of_its_gpu() -> None:
    assert options(server(build=CUDA, kv_cache_bytes=1 << 30))["--gpu-memory-utilization"] == "0.01"
    assert "--gpu-memory-utilization" not in options(server(build=CUDA))  # vLLM measures what it can take
    assert "--gpu-memory-utilization" not in options(server(kv_cache_bytes=1 << 30))


def test_gpus_that_nobody_has_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "find_build", lambda: CPU)
    with pytest.raises(ConfigError, match=r"engine.replicas .*/vllm/bin/python has vLLM's CPU build"):
        launch.check_gpus([0])
    monkeypatch.setattr(launch, "find_build", lambda: CUDA)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    launch.check_gpus([0, 1])
    with pytest.raises(ConfigError, match=r"engine.replicas .*\[2\].* shows 2: count them from 0"):
        launch.check_gpus([0, 2])


def test_lora_is_there_only_when_asked_for() -> None:
    assert "--enable-lora" not in options(server())
    found = options(server(lora_rank=16, max_loras=3))
    assert (found["--max-lora-rank"], found["--max-loras"]) == ("16", "3")
    assert options(server(lora_rank=9))["--max-lora-rank"] == "16"  # vLLM knows a few ranks only
    assert server(lora_rank=16).env()["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in server().env()


@pytest.mark.parametrize("sync", ["auto", "full", "delta", "nccl", "ipc"])
def test_a_server_takes_weights_as_its_run_sends_them(sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_build", lambda **_: CUDA)
    settings = EngineSettings(kind="vllm", sync=sync)
    one = vllm_server(Path("/m"), settings, port=1, plugin_folder=Path("/p"), max_context=64)
    backend = sync if sync in ("nccl", "ipc") else "shm"
    assert json.loads(options(one)["--weight-transfer-config"]) == {"backend": backend}
    # pickled handles are taken where nothing else would do, and nowhere else
    assert ("VLLM_ALLOW_INSECURE_SERIALIZATION" in one.env()) == (sync == "ipc")


@pytest.mark.parametrize(
    ("sync", "hint"),
    [
        (
            "full",
            "python -m vllm.entrypoints.openai.api_server --model "
            '/models/m --weight-transfer-config \'{"backend": "shm"}\'',
        ),
        (
            "nccl",
            "python -m vllm.entrypoints.openai.api_server --model "
            '/models/m --weight-transfer-config \'{"backend": "nccl"}\'',
        ),
        (
            "ipc",
            "VLLM_ALLOW_INSECURE_SERIALIZATION=1 python -m vllm.entrypoints.openai.api_server --model "
            '/models/m --weight-transfer-config \'{"backend": "ipc"}\'',
        ),
    ],
)
def test_a_server_that_takes_weights_another_way_is_refused_with_the_flag(sync: str, hint: str) -> None:
    facts = facts_of(*frozenset(Need) - {Need.WEIGHTS, Need.NCCL, Need.IPC})
    with pytest.raises(UsageError) as caught:
        facts.require(needed(transport_of(sync)))
    assert str(caught.value).endswith(f"beside its other flags, with: {hint}")


@pytest.mark.parametrize("sync", ["full", "delta", "adapter", "nccl", "ipc"])
def test_however_weights_travel_the_plugin_must_be_there_or_a_prefix_cache_would_serve_old_ones(sync: str) -> None:
    facts = facts_of(*frozenset(Need) - {Need.PLUGIN})
    command = (
        r"PYTHONSAFEPATH=1 PYTHONPATH=\$\(agentrl vllm-plugin\) python -m vllm.entrypoints.openai.api_server --model "
        r"/models/m --worker-extension-cls agentrl"
    )
    with pytest.raises(UsageError, match=rf"lacks agentrl's plugin: .* with: {command}\..*Extension$"):
        facts.require(needed(transport_of(sync)))


def test_a_server_of_another_dtype_or_with_shorter_contexts_is_refused_with_the_runs_own() -> None:
    facts = facts_of(*Need)
    facts.require(Need, dtype="float32", context=9)
    facts.require(Need, dtype="auto", context=9)
    with pytest.raises(
        UsageError, match=r"lacks bfloat16 \(engine\.dtype; it computes in float32\): .* --dtype bfloat16$"
    ):
        facts.require(Need, dtype="bfloat16")
    with pytest.raises(UsageError, match=r"lacks contexts of 10 tokens \(it has 9\): .* --max-model-len 10$"):
        facts.require(Need, context=10)


def test_the_learners_interpreter_needs_a_tested_vllm_to_send_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.metadata, "version", lambda name: "0.32.4")
    check_sender("nccl")
    monkeypatch.setattr(launch.metadata, "version", lambda name: "0.33.0")
    with pytest.raises(UsageError, match=r"has vLLM 0\.33\.0; agentrl speaks the API of vLLM"):
        check_sender("nccl")

    def none(name: str) -> str:
        raise launch.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(launch.metadata, "version", none)
    with pytest.raises(ConfigError, match=r"engine\.sync = 'ipc'.*install vllm==0\.32\.0 for .*python"):
        check_sender("ipc")


def test_another_version_can_be_allowed_and_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"or set engine\.untested_vllm = true to try this one"):
        check_version("0.33.0", "here")
    says = r"here has vLLM 0\.33\.0; agentrl speaks .*: it is tried because engine\.untested_vllm is true"
    with pytest.warns(UserWarning, match=says):
        check_version("0.33.0", "here", untested=True)
    monkeypatch.setattr(launch, "installed", lambda *_: {"vllm": "0.33.0"})
    settings = EngineSettings(kind="vllm", untested_vllm=True)
    with pytest.warns(UserWarning, match="0\\.33\\.0"):
        one = vllm_server(Path("/m"), settings, port=1, plugin_folder=Path("/p"), max_context=64)
    assert one.build.version == "0.33.0"


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.0+cpu"])
def test_tested_versions_pass(version: str) -> None:
    check_version(version, "here")


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "nonsense", ""])
def test_other_versions_are_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(UsageError, match=r"agentrl speaks the API of vLLM >= 0\.32, < 0\.33: install vllm==0\.32\.0"):
        check_version(version, "here")


def test_an_interpreter_without_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "installed", lambda *_: {})
    with pytest.raises(UsageError, match=r"'/no/python' has no vLLM"):
        find_build("/no/python")
    monkeypatch.setenv(launch.PYTHON_VARIABLE, "/other/python")
    with pytest.raises(UsageError, match=r"'/other/python' has no vLLM"):
        find_build()
    monkeypatch.delenv(launch.PYTHON_VARIABLE)
    with pytest.raises(UsageError, match="run `make vllm`"):
        find_build()


def test_the_carried_plugin_needs_nothing_of_ours_installed(tmp_path: Path) -> None:
    """A bare interpreter finds the entry point and its modules, and loads neither our dependencies nor torch."""
    carry_plugin(tmp_path)
    carry_plugin(tmp_path)  # again over itself
    home = str(Path(launch.__file__).parent).encode()
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and home in file.read_bytes()]
    code = f"""
import sys
import tempfile
sys.path.insert(0, {str(tmp_path)!r})
from importlib.metadata import entry_points
(point,) = entry_points(group="vllm.general_plugins", name="agentrl")
assert point.load().__name__ == "register"
import agentrl.engine.vllm.plugin.server
assert agentrl.engine.vllm.plugin.server.__file__.startswith({str(tmp_path)!r})
print(sorted(sys.modules.keys() & {{"torch", "trio", "httpx", "pydantic", "gymnasium", "numpy"}}))
"""
    done = subprocess.run([sys.executable, "-S", "-P", "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


ORPHAN = """
import ctypes, multiprocessing, os, signal, sys, time
from agentrl.engine.vllm import plugin

def engine_core(born_of):
    while os.getppid() == born_of:
        time.sleep(0.001)
    plugin._die_with_parent()
    time.sleep(60)

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # a child subreaper: orphans come to us, not to process 1
host = os.fork()
if host == 0:
    os.environ[plugin.HOST_VARIABLE] = str(os.getpid())
    multiprocessing.get_context("fork").Process(target=engine_core, args=(os.getpid(),)).start()
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(host, 0)
_, status = os.wait()
sys.exit(os.WTERMSIG(status) != signal.SIGKILL)
"""


def test_law_4_a_process_of_the_server_that_was_still_starting_dies_when_it_finds_its_parent_dead() -> None:
    assert subprocess.run([sys.executable, "-c", ORPHAN], timeout=120, check=False).returncode == 0


def mixture(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"num_experts": 4, "head_dim": 32}))
    return folder


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj"), ("mlp.experts",), ("experts.w1", "experts.w3")])
def test_adapters_on_experts_are_refused_on_a_cpu_with_what_to_set(targets: tuple[str, ...], tmp_path: Path) -> None:
    one = server(model=mixture(tmp_path), plugin_folder=tmp_path / "p", lora_rank=8, lora_targets=targets)
    with pytest.raises(ModelError, match=r'train\.lora_targets = \["q_proj", .*, or engine\.sync = "full"'):
        one.prepare()
    replace(one, build=CUDA).prepare()
    replace(one, lora_rank=0).prepare()


def test_a_mixture_on_a_cpu_is_told_which_layers_adapters_adapt(tmp_path: Path) -> None:
    targets = ("self_attn.q_proj", "v_proj", "shared_expert.down_proj")
    one = server(model=mixture(tmp_path), plugin_folder=tmp_path / "p", lora_rank=8, lora_targets=targets)
    one.prepare()
    argv = one.argv()
    at = argv.index("--lora-target-modules")
    assert argv[at + 1 : at + 4] == ["q_proj", "v_proj", "down_proj"]
    assert "--lora-target-modules" not in replace(one, build=CUDA).argv()


def test_experts_are_asked_only_of_a_mixture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 2}))
    one = server(model=tmp_path, plugin_folder=tmp_path / "p", routed_experts=True)
    with pytest.raises(ModelError, match=r"no experts that it could tell of: set engine\.routed_experts = false"):
        one.prepare()
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 32, "num_local_experts": 8}))
    one.prepare()


def test_a_head_too_small_for_the_cpu_build_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 4}))
    one = server(model=tmp_path, plugin_folder=tmp_path / "p")
    with pytest.raises(ModelError, match="head_dim = 16; vLLM's CPU build needs at least 32"):
        one.prepare()
    server(model=tmp_path, plugin_folder=tmp_path / "p", build=CUDA).prepare()
    with pytest.raises(ModelError, match="cannot read"):
        server(model=tmp_path / "nothing", plugin_folder=tmp_path / "p").prepare()


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("", "it printed nothing"),
        ("(Core pid=1) INFO all is well", "INFO all is well"),
        ("ModuleNotFoundError: No module named 'vllm'", "run `make vllm`"),
        ("OSError: [Errno 98] Address already in use", "choose another one"),
        ("(Core pid=7) ValueError: the cause\nRuntimeError: a consequence", "ValueError: the cause"),
    ],
)
def test_a_log_is_read_for_the_cause(tmp_path: Path, log: str, says: str) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(log)
    found = explain(path)
    assert says in found and str(path) in found and "\n" not in found


def test_no_log_is_said() -> None:
    assert explain(None) == "no log was kept"


def test_everything_lacking_is_refused_at_once_with_what_mends_it() -> None:
    facts = facts_of(Need.ADMIN)
    facts.require({Need.ADMIN})
    with pytest.raises(UsageError) as caught:
        facts.require({Need.ADMIN, Need.TOKENS, Need.LORA}, lora_rank=9)
    text = str(caught.value)
    assert "--enable-scale-out" in text and "DEV_MODE" not in text and "\n" not in text
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 python -m vllm" in text and "--enable-lora --max-lora-rank 16" in text
