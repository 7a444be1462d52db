"""A vLLM that shares no disk with the learner: adapters come as bytes, weights through an object store."""

from __future__ import annotations

import json
import re
from contextlib import aclosing
from pathlib import Path

import pytest
import trio

from agentrl.engine.client import EngineClient
from agentrl.engine.vllm_api import results
from agentrl.engine.weight_sync import adapters, canary, uploads
from agentrl.engine.weight_sync.adapters import AdapterClient
from agentrl.engine.weight_sync.file_transport import push
from agentrl.engine.weight_sync.object_store import ObjectFolder, Outbox
from agentrl.errors import EngineError, WeightSyncError
from agentrl.records import Json

from .conftest import Server
from .policy import Policy
from .test_contract import ask
from .test_weights import ADMIN_S, EXACT, probe_of

pytestmark = pytest.mark.vllm


async def test_versions_come_through_the_store_and_a_torn_one_is_not_served(
    server: Server, policy: Policy, tmp_path: Path
) -> None:
    """Staged beside the old ones, from the second on as deltas against bytes that only the engine has kept."""
    outbox = Outbox(ObjectFolder(f"file://{tmp_path}/store", deadline_s=ADMIN_S), deltas=True)
    sizes: list[int] = []
    async with aclosing(EngineClient(server.url)) as client:
        for torn in (False, False, True):
            version, file = policy.update(scale=1e-7)
            sent = outbox.put(version, file.path, file.sha256)
            sizes.append(sent.bytes)
            if torn:
                damaged = tmp_path / "store" / f"{version:08d}.delta"
                damaged.write_bytes(damaged.read_bytes()[:-1])
                with pytest.raises(WeightSyncError, match=r"\.delta is torn or damaged: \d+ bytes"):
                    await push([client], sent.url, version, stage=True, deadline_s=ADMIN_S)
                assert await client.served_version() == version - 1 and not await client.paused()
                outbox.whole_next()
                sent = outbox.put(version, file.path, file.sha256)
            report = await push(
                [client], sent.url, version, keep_base=True, stage=True, clear_cache=True, deadline_s=ADMIN_S
            )
            assert report.bytes == sent.bytes
            generation = await client.generate(ask())
            assert {span.version for span in generation.spans} == {version}
            assert policy.error(ask().token_ids, generation) <= EXACT
            assert await canary.check([client], probe_of(policy, version)) <= EXACT
        await client.call(
            "POST", "/init_weight_transfer_engine", json={"init_info": {"keep_base": False}}, deadline_s=ADMIN_S
        )
    assert max(sizes[1:]) < sizes[0]


async def test_adapters_come_as_bytes_and_go_with_their_version(
    server: Server, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "is_near", lambda url: False)
    monkeypatch.setattr(uploads, "_PIECE", 20_000)
    first, second = policy.adapter(), policy.adapter()
    current = first[0]

    async def said() -> int:
        return current

    client = AdapterClient(server.url, current=said)
    try:
        for version, folder in (first, second):
            hidden = folder.rename(folder.with_name(f"moved-{version}"))  # nothing of vLLM's ever sees where it was
            report = await adapters.load([client], hidden, version, deadline_s=ADMIN_S)
            hidden.rename(folder)
            assert report.bytes > 20_000
        (received,) = (server.folder / "plugin").glob("agentrl-inbox-*")
        assert sorted(path.name.rsplit("-", 1)[0] for path in received.iterdir()) == sorted(
            adapters.adapter_name(version) for version, _ in (first, second)
        )
        for current, _ in (first, second):
            generation = await client.generate(ask())
            assert {span.version for span in generation.spans} == {current}
            assert policy.error(ask().token_ids, generation) <= EXACT
        left = frozenset({first[0]})
        while left:
            left = await adapters.retire([client], keep=[second[0]], deadline_s=ADMIN_S)
        assert [path.name.rsplit("-", 1)[0] for path in received.iterdir()] == [adapters.adapter_name(second[0])]
    finally:
        with trio.CancelScope(shield=True):
            await adapters.retire([client], keep=(), deadline_s=ADMIN_S)
            await client.aclose()


async def test_a_request_names_no_adapter_outside_of_the_servers_folders(
    server: Server, policy: Policy, shm: Path
) -> None:
    """Nor one at the Hugging Face hub, which vLLM itself would look up; and the answer is the same for each."""
    link = shm / "link"
    _, folder = policy.adapter()
    link.symlink_to(folder)
    said, told = set[str](), set[str]()
    ready: dict[str, Json] = {"method": "agentrl_staged", "args": []}
    async with aclosing(EngineClient(server.url)) as client:
        for path in ("/etc", "/gone", str(shm / "gone"), str(link), "someone/adapter", "~/adapter"):
            named = {"lora_name": "x", "lora_path": path}
            with pytest.raises(EngineError) as refused:
                await client.call("POST", "/v1/load_lora_adapter", json=named, deadline_s=ADMIN_S)
            said.add(re.sub(r"the adapter in '[^']*'", "", str(refused.value)))  # vLLM writes <path> for some
            info = {"path": path, "sha256": "0" * 64}
            asked = {"method": "agentrl_stage", "args": [json.dumps(info)]}
            await client.call("POST", "/collective_rpc", json=asked, deadline_s=ADMIN_S)
            error = None
            while error is None:
                answer = await client.call("POST", "/collective_rpc", json=ready, deadline_s=ADMIN_S)
                error = results(answer)[0]["error"]
            told.add(str(error).replace(path, "PATH"))
    assert len(said) == 1 and "cannot load " in said.pop()
    assert len(told) == 1 and "cannot read weight file" in told.pop()
