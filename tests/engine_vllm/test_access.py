"""vLLM behind our guard: on every route it asks for the key, and takes only what the run signed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import aclosing

import httpx
import pytest

from agentrl.engine.auth import changes
from agentrl.engine.client import EngineClient
from agentrl.engine.http_client import TrioTransport
from agentrl.engine.weight_sync.file_transport import push
from agentrl.errors import EngineError, WeightSyncError
from agentrl.host.janitor import OwnedFolder
from agentrl.records import EngineKey

from .conftest import Server, up
from .policy import Policy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
KEY = EngineKey(value="shown", signing="never sent")
ROUTES = (
    *(
        ("GET", path)
        for path in ("/health", "/metrics", "/v1/models", "/version", "/is_paused", "/server_info", "/docs")
    ),
    *(("GET", path) for path in ("/openapi.json", "/load", "/get_world_size", "/nowhere")),
    ("OPTIONS", "/health"),
    *(("POST", path) for path in ("/inference/v1/generate", "/v1/chat/completions", "/tokenize", "/invocations")),
    *(("POST", path) for path in ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/collective_rpc")),
    *(("POST", path) for path in ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights")),
    *(("POST", path) for path in ("/finish_weight_update", "/update_weight_version", "/v1/load_lora_adapter")),
)


@pytest.fixture(scope="module")
def guarded(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """On a Unix socket, with a key."""
    with contextlib.closing(OwnedFolder()) as owner:
        socket = owner.path / "engine.sock"
        yield from up(Server(policy.folder, tmp_path_factory.mktemp("guarded"), socket=socket, key=KEY, open=False))


async def test_every_route_asks_for_the_key_and_changes_are_signed(guarded: Server) -> None:
    assert guarded.url.startswith("unix:///")
    transport = TrioTransport(socket=guarded.url.removeprefix("unix://"))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as plain:
        for method, path in ROUTES:
            assert (await plain.request(method, path)).status_code == 401, path
        shown = {"authorization": "Bearer shown"}
        for method, path in ROUTES:
            status = (await plain.request(method, path, headers=shown)).status_code
            assert (status == 403) == changes(method, path), (path, status)
            assert status != 401


async def test_it_takes_the_weights_of_the_run_and_nobody_elses(guarded: Server, policy: Policy) -> None:
    own, foreign = (policy.update()[1].path for _ in range(2))
    async with aclosing(EngineClient(guarded.url, api_key=KEY)) as run:
        before = await run.served_version()
        async with aclosing(EngineClient(guarded.url, api_key=EngineKey(value="shown", signing="guessed"))) as other:
            for stage in (True, False):
                with pytest.raises(WeightSyncError, match="not signed by the run that has this engine"):
                    await push([other], foreign, before + 1, stage=stage, deadline_s=120)
            with pytest.raises(EngineError, match="not signed"):
                await other.call("POST", "/pause", deadline_s=60)
        assert await run.served_version() == before and not await run.paused()
        await push([run], own, before + 1, stage=True, deadline_s=120)
        await push([run], foreign, before + 2, deadline_s=120)
        assert await run.served_version() == before + 2


async def test_another_server_cannot_prove_that_it_is_this_one(guarded: Server) -> None:
    async with aclosing(EngineClient(guarded.url, api_key=KEY)) as run:
        assert await run.proves(KEY, deadline_s=60)
        assert not await run.proves(EngineKey.fresh(), deadline_s=60)
