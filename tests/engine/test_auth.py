"""Who may ask an engine, and who may change it: the guard by itself, and before the embedded engine."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import MutableMapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from safetensors.torch import load_file, save_file

from agentrl.config import EngineSettings
from agentrl.engine import auth
from agentrl.engine.client import EngineClient
from agentrl.engine.embedded_process import EmbeddedEngine, launch_embedded
from agentrl.engine.http_client import TrioTransport, socket_of
from agentrl.engine.weight_sync import adapters
from agentrl.engine.weight_sync.file_transport import push
from agentrl.errors import EngineError, UsageError, WeightSyncError
from agentrl.records import EngineKey

from .conftest import Server

KEY = EngineKey(value="shown", signing="never sent")
READER = EngineKey(value="shown")
SETTINGS = EngineSettings(kv_cache_mb=16, max_batch=4)
ROUTES = (
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("GET", "/is_paused"),
    ("GET", "/is_sleeping"),
    ("GET", "/nowhere"),
    ("OPTIONS", "/health"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/abort_requests"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("POST", "/init_weight_transfer_engine"),
    ("POST", "/start_weight_update"),
    ("POST", "/update_weights"),
    ("POST", "/finish_weight_update"),
    ("POST", "/update_weight_version"),
    ("POST", "/collective_rpc"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
)


async def passes(method: str, target: str, body: bytes = b"", **headers: str) -> int:
    """The status of a request at a guard: 200 if it reached the application, with its whole body."""
    path, _, query = target.partition("?")
    seen: list[bytes] = []
    said: list[MutableMapping[str, Any]] = []
    parts = [body[:3], body[3:]]

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: MutableMapping[str, Any]) -> None:
        said.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            seen.append(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200})

    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
    scope["headers"] = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await auth.Guard(app, KEY)(scope, receive, send)
    if said[0]["status"] == 200:
        assert b"".join(seen) == body
    return said[0]["status"]


def signed(method: str, target: str, body: bytes, secret: str = "never sent") -> str:
    """By hand."""
    text = f"{method}\n{target}\n{hashlib.sha256(body).hexdigest()}"
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


async def test_only_what_shows_the_key_passes_and_only_what_is_signed_changes_anything() -> None:
    shown = "Bearer shown"
    assert await passes("GET", "/health") == 401
    assert await passes("GET", "/health", authorization="Bearer show") == 401
    assert await passes("GET", "/health", authorization="shown") == 401
    assert await passes("GET", "/health", authorization=shown) == 200
    assert await passes("POST", "/inference/v1/generate", b"{}", authorization=shown) == 200
    assert await passes("POST", "/sleep?level=1", authorization=shown) == 403
    own = signed("POST", "/sleep?level=1", b"")
    assert await passes("POST", "/sleep?level=1", authorization=shown, x_agentrl_signature=own) == 200
    assert await passes("POST", "/sleep?level=2", authorization=shown, x_agentrl_signature=own) == 403
    assert await passes("POST", "/pause?level=1", authorization=shown, x_agentrl_signature=own) == 403
    assert await passes("POST", "/sleep?level=1", b"{ }  ", authorization=shown, x_agentrl_signature=own) == 403
    other = signed("POST", "/sleep?level=1", b"", "another secret")
    assert await passes("POST", "/sleep?level=1", authorization=shown, x_agentrl_signature=other) == 403
    assert await passes("POST", "/sleep?level=1", x_agentrl_signature=own) == 401


async def test_an_update_names_its_content_and_the_version_that_is_finished() -> None:
    """The run signs each of these; the guard still takes only a content that is named, under the version it is of."""
    reached: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200})

    guard, status = auth.Guard(app, KEY), list[int]()

    async def ask(path: str, body: dict[str, Any]) -> int:
        content = json.dumps(body).encode()
        headers = [
            (b"authorization", b"Bearer shown"),
            (b"x-agentrl-signature", signed("POST", path, content).encode()),
        ]

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            if "status" in message:
                status.append(message["status"])

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        await guard(scope, receive, send)
        return status[-1]

    info = {"path": "/w/7.safetensors", "sha256": "0" * 64, "version": 7}
    assert await ask("/start_weight_update", {}) == 200
    assert await ask("/update_weights", {"update_info": {**info, "sha256": None}}) == 403
    assert await ask("/update_weights", {"update_info": {"path": "/w/7.safetensors", "sha256": "0" * 64}}) == 403
    assert await ask("/update_weights", {"update_info": info}) == 200
    assert await ask("/finish_weight_update", {"weight_version": "8"}) == 403
    assert await ask("/finish_weight_update", {"weight_version": "7"}) == 200
    staged = {"method": "agentrl_publish", "args": [json.dumps(info), "8", False]}
    assert await ask("/collective_rpc", staged) == 403
    assert await ask("/collective_rpc", {**staged, "args": [json.dumps(info), "7", False]}) == 200
    assert await ask("/update_weights", {"update_info": {"names": ["from memory to memory"]}}) == 200


def test_the_secret_that_signs_is_in_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "never sent" not in repr(KEY) and "shown" not in repr(KEY)
    monkeypatch.setenv(EngineKey.VALUE, "a")
    monkeypatch.setenv(EngineKey.SIGNING, "")
    assert EngineKey.of_environment() == EngineKey(value="a")
    assert (
        READER.variables(signs=True) == KEY.variables(signs=False) == {EngineKey.VALUE: "shown", EngineKey.SIGNING: ""}
    )
    with pytest.raises(ValueError, match="signs no change"):
        auth.signature(READER, "POST", "/pause", b"")


@pytest.fixture
async def engine(model_dir: Path) -> Any:
    async with launch_embedded(model_dir, SETTINGS, key=KEY, version=1, max_context=64) as running:
        yield running


@pytest.mark.medium
async def test_every_route_of_the_engine_asks_for_the_key(engine: EmbeddedEngine) -> None:
    path = socket_of(engine.url)
    assert path is not None and Path(path).parent.stat().st_mode & 0o777 == 0o700
    async with httpx.AsyncClient(transport=TrioTransport(socket=path), base_url="http://localhost") as plain:
        for method, route in ROUTES:
            assert (await plain.request(method, route, json={})).status_code == 401, route
        headers = {"authorization": "Bearer shown"}
        for method, route in ROUTES:
            answer = await plain.request(method, route, json={}, headers=headers)
            assert (answer.status_code == 403) == auth.changes(method, route), route


@pytest.mark.medium
async def test_the_run_pushes_and_nobody_else(
    engine: EmbeddedEngine, model_dir: Path, other_weights: Path, tmp_path: Path
) -> None:
    own, foreign = tmp_path / "own.safetensors", other_weights / "model.safetensors"
    save_file({name: tensor + 0.01 for name, tensor in load_file(model_dir / "model.safetensors").items()}, own)
    stranger = EngineKey(value="shown", signing="guessed")
    async with aclosing(EngineClient(engine.url, api_key=KEY)) as run:
        for key in (READER, stranger, "shown"):
            async with aclosing(EngineClient(engine.url, api_key=key)) as other:
                with pytest.raises(WeightSyncError, match="not signed by the run that has this engine"):
                    await push([other], foreign, 2)
                with pytest.raises(EngineError, match="not signed"):
                    await other.call("POST", "/sleep", params={"level": "1"}, deadline_s=30)
        assert await run.served_version() == 1 and not await run.paused()
        await push([run], own, 2)
        assert await run.served_version() == 2
        # A file that was altered after its digest was taken.
        digest = hashlib.sha256(own.read_bytes()).hexdigest()
        own.write_bytes(foreign.read_bytes())
        with pytest.raises(WeightSyncError, match="did not take version 3"):
            await push([run], own, 3, sha256=digest)
        assert await run.served_version() == 2


async def test_an_adapter_is_the_one_that_was_signed(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    by_hand = hashlib.sha256(f"adapter_config.json\0{hashlib.sha256(b'{}').hexdigest()}\n".encode()).hexdigest()
    assert auth.folder_digest(tmp_path) == by_hand
    path, body = "/v1/load_lora_adapter", {"lora_name": "policy-1", "lora_path": str(tmp_path), "sha256": by_hand}
    for digest, expected in ((by_hand, 200), ("0" * 64, 403), (None, 403)):
        content = json.dumps({**body, "sha256": digest}).encode()
        own = signed("POST", path, content)
        asked = passes("POST", path, content, authorization="Bearer shown", x_agentrl_signature=own)
        assert await _on_asyncio(asked) == expected


async def _on_asyncio(awaitable: Any) -> Any:
    """The guard runs on a server's asyncio loop."""
    import asyncio

    return await trio.to_thread.run_sync(lambda: asyncio.run(awaitable))


def test_an_engine_on_tcp_without_a_key_does_not_start(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from agentrl.engine.embedded.__main__ import main

    assert main(["--model", str(model_dir), "--host", "127.0.0.1"]) == 2
    assert "needs a key in $AGENTRL_ENGINE_KEY" in capsys.readouterr().err


def test_a_key_goes_with_the_engine_that_a_run_starts_and_not_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIRS", "their key")
    settings = EngineSettings(urls=["http://theirs:8000"], api_key_env="THEIRS").with_key(KEY)
    assert settings.key_of("http://theirs:8000/v1") == EngineKey.of("their key")
    assert settings.key_of("unix:///run/e.sock") == KEY
    assert "shown" not in settings.model_dump_json() and "never sent" not in repr(settings)
    assert EngineSettings().key_of("unix:///run/e.sock") is None


async def test_adapters_come_with_the_digest_of_their_files(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200)

    async with aclosing(EngineClient("unix:///run/e.sock", transport=httpx.MockTransport(answer))) as client:
        await adapters.load([client], tmp_path, 4)
    assert asked == [{"lora_name": "policy-4", "lora_path": str(tmp_path), "sha256": auth.folder_digest(tmp_path)}]


def test_what_cannot_be_listened_on_is_one_line(tmp_path: Path) -> None:
    from agentrl.engine.embedded.__main__ import listen

    with pytest.raises(UsageError, match=r"cannot listen on .*AF_UNIX path too long; choose another --socket"):
        listen("", 0, tmp_path / ("x" * 120))


@pytest.mark.medium
async def test_an_engine_takes_the_weights_that_it_began_with_wherever_it_may_read_others(
    model_dir: Path, other_weights: Path, tmp_path: Path
) -> None:
    """A run that is attached sends its first version by the path of the model's own file."""
    running = Server(model_dir, tmp_path, "--weights-from", str(tmp_path))
    try:
        async with aclosing(EngineClient(running.url)) as client:
            await push([client], model_dir / "model.safetensors", 1, deadline_s=60)
            with pytest.raises(WeightSyncError, match="--weights-from FOLDER"):
                await push([client], other_weights / "model.safetensors", 2, deadline_s=60)
            assert await client.served_version() == 1
    finally:
        running.close()
