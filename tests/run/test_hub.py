"""Models of the hub: fetched from a hub on this machine, then found in the cache; one that is nowhere is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from each_case import each_case

from agentrl.errors import ModelError, UsageError
from agentrl.models.resolve import model_dir
from agentrl.run.evaluation.of_checkpoint import measured

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"other", "tokenizer.json": b"{}"}
REPOSITORY = "somebody/small"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as fetching a repository takes."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        name = self.path.partition("?")[0].rpartition("/")[2]
        headers = {"X-Repo-Commit": COMMIT}
        if self.path.startswith(f"/api/models/{REPOSITORY}/tree"):
            entries = [{"type": "file", "path": f, "size": len(b), "oid": f} for f, b in FILES.items()]
            body = json.dumps(entries).encode()
        elif self.path.startswith(f"/api/models/{REPOSITORY}"):
            siblings = [{"rfilename": file} for file in FILES]
            body = json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}).encode()
        elif self.path.startswith(f"/{REPOSITORY}/resolve/") and name in FILES:
            body = FILES[name]
            headers["ETag"] = f'"{name}"'
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def fetched(name: str, home: Path, endpoint: str) -> str:
    """The folder, or the error, as a process with this hub and this cache finds it."""
    code = (
        "import sys\nfrom agentrl.errors import ModelError\nfrom agentrl.models.resolve import model_dir\n"
        "try:\n    print(model_dir(sys.argv[1]))\nexcept ModelError as error:\n    print(error)"
    )
    environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
    environment = {k: v for k, v in environment.items() if not k.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", code, name], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout.strip() or done.stderr


@pytest.mark.medium
def test_a_model_of_the_hub_is_downloaded_once_and_then_found(hub: str, tmp_path: Path) -> None:
    folder = Path(fetched(REPOSITORY, tmp_path, hub))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: data for name, data in FILES.items() if name != "pytorch_model.bin"
    }
    nowhere = "http://127.0.0.1:9"
    assert fetched(REPOSITORY, tmp_path, nowhere) == str(folder)
    assert fetched(f"{REPOSITORY}@{COMMIT}", tmp_path, nowhere) == str(folder)
    (folder / "model.safetensors").unlink()  # an interrupted download is not taken for a whole one
    assert "cannot be downloaded" in fetched(REPOSITORY, tmp_path, nowhere)
    assert fetched(REPOSITORY, tmp_path, hub) == str(folder)
    assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.medium
def test_what_the_hub_lacks_or_nobody_answers_says_what_to_do(hub: str, tmp_path: Path) -> None:
    assert "the hub has no model 'somebody/none'" in fetched("somebody/none", tmp_path, hub)
    said = fetched("Qwen/Qwen3-0.6B", tmp_path, "http://127.0.0.1:9")
    assert len(said.splitlines()) == 1
    assert said.endswith(
        "run hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B, copy the folder here, and give model = "
        "'models/Qwen3-0.6B'"
    )


def test_what_is_meant_for_a_registered_id_is_not_looked_up_elsewhere() -> None:
    with pytest.raises(ModelError, match="near: agentrl/tiny-coder"):
        model_dir("agentrl/tiny-codr")
    with pytest.raises(ModelError, match="neither a folder, nor a registered id"):
        model_dir("no/such/folder")
    with pytest.raises(ModelError, match=r"'http://h:1' is a server, .*: agentrl eval --endpoint http://h:1"):
        model_dir("http://h:1")


@each_case(
    ("name", "said"),
    [
        ("./nowhere", r"there is no folder './nowhere' with a model or a run; '\.' has runs"),
        ("../nowhere/model", r"there is no folder '../nowhere/model' with a model or a run; nor is its parent"),
        ("~/nowhere/at/all", r"no folder '~/nowhere/at/all'"),
        ("/nowhere", r"no folder '/nowhere'"),
        ("runs/firsd", r"no folder 'runs/firsd' with a model or a run; 'runs' has first"),
        ("runs/none", r"'runs' has first, second"),
    ],
)
def test_what_means_a_folder_is_not_looked_for_on_the_hub(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("first", "second"):
        (tmp_path / "runs" / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agentrl.models.resolve.hub_folder", lambda name: pytest.fail(f"{name} was looked for"))
    with pytest.raises(ModelError, match=said):
        model_dir(name)


def test_a_run_that_is_missing_is_named_without_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no folder 'runs/none' with a model or a run; nor is its parent"):
        model_dir("runs/none")
    with pytest.raises(ModelError, match=r"no folder 'runs/none' with a model or a run; nor is its parent"):
        measured("runs/none", None, None)


def test_a_run_file_is_measured_by_the_model_that_it_begins_with_on_its_own_sets(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'model = "agentrl/tiny-coder"\n[env]\nid = "agentrl/CodeRepair-v0"\n[rollout]\nmax_turns = 2\n'
        '[[eval.sets]]\nname = "far"\nn = 7\nkwargs = { split = "held_out_templates" }\n'
    )
    config, adapters = measured(str(file), None, None, ["rollout.max_turns=1"])
    assert (config.model, config.rollout.max_turns, adapters) == ("agentrl/tiny-coder", 1, None)
    assert [(held_out.name, held_out.n) for held_out in config.eval.sets] == [("far", 7)]
    assert measured(file, None, 3)[0].eval.sets[0].n == 3
    file.write_text("model = 3")
    with pytest.raises(UsageError, match="model"):
        measured(file, None, None)
