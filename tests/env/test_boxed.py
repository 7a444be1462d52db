"""An environment with a box of its own, as the page shows it: real boxes, the policy's own program."""

from __future__ import annotations

import pytest

import agentrl
from agentrl import registry
from agentrl.errors import SandboxError

pytestmark = pytest.mark.bubblewrap
SORTS = "import sys\nprint(*sorted(sys.stdin.read().split()), sep='\\n')\n"


@pytest.fixture
def make(monkeypatch, pytestconfig):
    monkeypatch.chdir(pytestconfig.rootpath)
    return registry.resolve("environments", "examples/boxed_env.py:SortWords")


async def played(make, program: str | None):
    async with make() as env:
        await env.areset(seed=1)
        if program is not None:
            await env.astep(env.call("write_file", path="sort_words.py", content=program))
        return (await env.astep("done"))[-1]


async def test_what_the_policy_made_is_graded_where_it_has_not_been(make):
    assert (await played(make, SORTS))["outcome"] == 1.0
    assert (await played(make, None))["outcome"] == 0.0
    async with make() as env:
        await env.areset(seed=1)
        observation, *_ = await env.astep(env.call("shell", command="cat words.txt; echo left > /tmp/mark; mkdir d"))
        assert observation[-1]["content"].startswith("pear apple fig")
        async with env.fresh_box(carry=["words.txt", "d", "none", "../etc/passwd"]) as box:
            assert (await box.exec(["sh", "-c", "cat words.txt; ls; ls /tmp"])).stdout == b"pear apple fig\nwords.txt\n"
        with pytest.raises(SandboxError):
            await box.exec(["true"])
        observation, *_ = await env.astep(env.call("shell", command="cat /tmp/mark"))
        assert observation[-1]["content"].startswith("left")


@pytest.mark.slow  # each episode that is played opens a box
def test_it_keeps_the_promises_of_the_contract(make):
    assert agentrl.check_env("examples/boxed_env.py:SortWords", deadline_s=500).findings == ()


async def test_there_is_no_box_between_episodes(make):
    env = make()
    with pytest.raises(SandboxError, match="no episode has a box now"):
        await env.box.exec(["true"])
    with pytest.raises(SandboxError, match="no episode has a box now"):
        async with env.fresh_box():
            pass
