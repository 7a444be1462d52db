"""Real OpenEnv servers played through the adapter, and an environment of ours served to OpenEnv's own client."""

import socket

import gymnasium
import pytest
from serving import serving

import agentrl
from agentrl.env.adapters.openenv_env import OpenEnv, serve
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.errors import EnvError

pytestmark = pytest.mark.adapters
HERMES = get_format("hermes")


def said(name, /, **arguments):
    return HERMES.write(ToolCall(name, arguments))


def counter_app():
    """An environment as OpenEnv's template writes it: typed actions and observations."""
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Add(Action):
        """Add to the counter."""

        amount: int
        note: str = ""

    class Count(Observation):
        count: int

    class Counter(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, start=0, **kwargs):
            self.count = start
            return Count(count=self.count)

        def step(self, action, timeout_s=None, **kwargs):
            if action.amount > 100:
                raise RuntimeError("too much")
            self.count += action.amount
            return Count(count=self.count, reward=float(action.amount), done=self.count >= 10)

        @property
        def state(self):
            return State()

    return create_app(Counter, Add, Count, max_concurrent_envs=16)


def mcp_app():
    from fastmcp import FastMCP
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Observation, State

    class Tools(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            server = FastMCP("adder")

            @server.tool()
            def add(a: int, b: int) -> int:
                """Add two numbers."""
                return a + b

            super().__init__(server)

        def reset(self, seed=None, episode_id=None, **kwargs):
            return Observation()

        def _step_impl(self, action, timeout_s=None, **kwargs):
            return Observation()

        @property
        def state(self):
            return State()

    return create_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=16)


def test_a_typed_environment_is_one_tool():
    with serving(counter_app()) as url, OpenEnv(url, instructions="Reach ten.") as env:
        (schema,) = env.schemas
        assert schema["name"] == "step" and schema["description"] == "Add to the counter."
        assert set(schema["parameters"]["properties"]) == {"amount", "note"}
        opening, _ = env.reset(seed=0, options={"start": 3})
        assert [message["content"] for message in opening] == ["Reach ten.", '{"count": 3}']
        observation, reward, terminated, *_ = env.step(said("step", amount=2))
        assert (observation[0]["content"], reward, terminated) == ('{"count": 5}', 2.0, False)
        observation, reward, *_ = env.step(said("step", amount="x"))
        assert "'x' is not of type 'integer'" in observation[0]["content"] and reward == 0.0
        _, reward, terminated, _, info = env.step(said("step", amount=5))
        assert (reward, terminated) == (5.0, True) and info == {"stop_reason": "done"}
        env.reset(seed=0)
        observation, reward, terminated, *_ = env.step(said("step", amount=101))
        assert "too much" in observation[0]["content"] and (reward, terminated) == (0.0, False)
        assert env.step(said("step", amount=2))[0][0]["content"] == '{"count": 2}', "the session goes on"


def test_mcp_tools_are_the_models_tools():
    with serving(mcp_app()) as url, OpenEnv(url, instructions="Add.") as env:
        assert [schema["name"] for schema in env.schemas] == ["add"]
        assert env.reset(seed=0)[0] == ({"role": "user", "content": "Add."},)
        observation, *_ = env.step(said("add", a=1, b=2))
        assert observation[0]["content"] == "3"


def test_our_environment_is_served_to_openenvs_own_client():
    from openenv.core.generic_client import GenericEnvClient

    with serving(serve(lambda: agentrl.make("agentrl/Calculator-v0"))) as url, GenericEnvClient(url) as client:
        result = client.reset(seed=3, expression="6 * 7")
        assert result.observation["messages"][-1]["content"] == "What is 6 * 7?"
        result = client.step({"text": said("calculate", expression="6 * 7")})
        assert result.observation["messages"][0]["content"] == "42" and not result.done
        result = client.step({"text": said("submit", answer="42")})
        assert result.done and result.observation["info"]["outcome"] == 1.0


def test_both_ways_together_give_what_the_environment_itself_gives():
    actions = ["hello", said("calculate", expression="2 ** 10"), said("submit", answer="1")]
    with serving(serve(lambda: agentrl.make("agentrl/Calculator-v0"))) as url, OpenEnv(url) as far:
        far_start, _ = far.reset(seed=5)
        far_steps = [far.step(action) for action in actions]
    inner_seed = int(gymnasium.utils.seeding.np_random(5)[0].integers(2**31))
    with agentrl.make("agentrl/Calculator-v0") as near:
        assert near.reset(seed=inner_seed)[0] == far_start
        for action, far_step in zip(actions, far_steps, strict=True):
            assert near.step(action)[:4] == far_step[:4]


def test_passes_the_checker():
    with serving(counter_app()) as url:
        result = agentrl.check_env(lambda: OpenEnv(url, instructions="Go.", replayable=True))
    assert result.findings == ()


def test_a_server_that_is_not_there_is_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(EnvError, match=f"no OpenEnv server answers at {url}"):
            OpenEnv(url)
