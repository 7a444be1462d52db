"""Another user at the server of agent programs, where a program speaks to the policy: nothing without its key."""

from __future__ import annotations

import json
import os
import secrets
from functools import partial

import pytest
import trio

from agentrl.env.agent_programs import model_endpoint, session
from attacks.other_user import OtherUser
from attacks.sockets import listening

pytestmark = pytest.mark.other_user
ASK = """if True:
    import json, sys, urllib.error, urllib.request
    statuses = []
    for path in sys.argv[2:]:
        for body in (None, b"{}"):
            try:
                statuses.append(urllib.request.urlopen(urllib.request.Request(sys.argv[1] + path, body)).status)
            except urllib.error.HTTPError as error:
                statuses.append(error.code)
    print(json.dumps(statuses))
"""


async def test_the_server_of_agent_programs_answers_nobody_without_an_episodes_key(other_user: OtherUser) -> None:
    key, asked = secrets.token_urlsafe(16), list[str]()

    async def handler(request: model_endpoint.Request) -> model_endpoint.Response:
        asked.append(request.path)
        return model_endpoint.Response(200, {})

    before = {one.port for one in listening([os.getpid()]) if one.kind == "tcp"}
    url = await session.register(key, handler)
    try:
        doors = [one for one in listening([os.getpid()]) if one.kind == "tcp" and one.port not in before]
        assert [(one.host, one.port) for one in doors] == [("127.0.0.1", int(url.split("/")[2].partition(":")[2]))]
        ask = partial(other_user.run, ASK, url.removesuffix(key))
        paths = ("", "v1/models", "v1/chat/completions", f"{key[:-1]}/v1/chat/completions", f"/{key}/v1/models")
        done = await trio.to_thread.run_sync(partial(ask, *paths))
        assert {*json.loads(done.stdout)} == {404}, done.stderr
        assert asked == []
        done = await trio.to_thread.run_sync(partial(ask, f"{key}/v1/models"))
        assert json.loads(done.stdout) == [200, 200] and asked == ["/v1/models"] * 2, "with the key it would have"
    finally:
        await session.unregister(key)
