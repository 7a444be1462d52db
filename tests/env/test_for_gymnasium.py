"""What gymnasium's users expect: rendering, vectors made by gymnasium, an outcome where a wrapper ends an episode."""

from __future__ import annotations

import gymnasium
import pytest
from gymnasium.vector import AsyncVectorEnv
from gymnasium.wrappers import TimeLimit

import agentrl
from agentrl.env.gymnasium_wrappers import Judged
from agentrl.errors import UsageError

ID = "agentrl/Calculator-v0"
OURS = f"agentrl:{ID}"
SEEN = "[system]\nUse the calculator"
NONE = "[assistant]\nno \\x1b[31mcall\n"


class Partly(agentrl.ToolEnv):
    """Worth half as soon as anything was said, which only `grade` knows."""

    said = 0

    def prompt(self, task):
        return "Speak."

    def on_text(self, text):
        self.said += 1
        return "Go on."

    def grade(self):
        return self.said / 4


@pytest.mark.parametrize("make", [lambda **kwargs: gymnasium.make(OURS, **kwargs), lambda **k: agentrl.make(ID, **k)])
def test_ansi_gives_the_transcript_so_far(make) -> None:
    with make(render_mode="ansi", terms=2) as env:
        assert env.render_mode == env.unwrapped.render_mode == "ansi"
        env.reset(seed=3)
        first = env.render()
        assert first.startswith(SEEN) and first.count("[") == 2
        observation, *_ = env.step("no \x1b[31mcall")
        told = observation[0]["content"]
        assert env.render() == f"{first}{NONE}[user]\n{told}\n"
        env.reset(seed=3)
        assert env.render() == first, "a new episode begins a new transcript"


def test_human_prints_the_transcript_as_it_happens(capsys) -> None:
    with gymnasium.make(OURS, render_mode="human", terms=2) as env:
        env.reset(seed=3)
        assert capsys.readouterr().out.startswith(SEEN)
        env.step("no \x1b[31mcall")
        out = capsys.readouterr().out
        assert out.startswith(NONE) and SEEN not in out
        assert env.render() is None and capsys.readouterr().out == ""


def test_a_mode_that_is_none_is_refused() -> None:
    for make in (agentrl.make, lambda id, **kwargs: gymnasium.make(f"agentrl:{id}", **kwargs)):
        with pytest.raises(UsageError, match=r"^render_mode = 'rgb_array': give one of ansi, human$"):
            make(ID, render_mode="rgb_array")
    with agentrl.make(ID) as env, pytest.raises(UsageError, match=r"render_mode='ansi'"):
        env.render()


def test_it_can_be_made_again_from_its_spec() -> None:
    for env in (gymnasium.make(OURS, render_mode="ansi", terms=2), agentrl.make(ID, render_mode="ansi", terms=2)):
        again = env.spec.make()
        again.reset(seed=3)
        env.reset(seed=3)
        assert again.render() == env.render() != ""
        again.close()
        env.close()


def test_an_environment_with_render_modes_of_its_own_keeps_them() -> None:
    class Draws(Partly):
        metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012

        def __init__(self, render_mode=None):
            super().__init__()
            self.render_mode = render_mode

        def render(self):
            return "drawn"

    agentrl.register("test_for_gymnasium/Draws-v0", Draws)
    for make in (agentrl.make, gymnasium.make):
        with make("test_for_gymnasium/Draws-v0", render_mode="ansi") as env:
            env.reset(seed=1)
            assert env.render() == "drawn"


def test_gymnasium_makes_a_vector_of_processes() -> None:
    vector = gymnasium.make_vec(OURS, 2, vectorization_mode="async", terms=1, largest=9)
    try:
        assert isinstance(vector, AsyncVectorEnv)
        observations, _ = vector.reset(seed=[11, 12])
        assert observations in vector.observation_space
        alone = tuple(agentrl.make(ID, terms=1, largest=9).reset(seed=seed)[0] for seed in (11, 12))
        assert observations == alone, "the same as one by one"
        asked = alone[0][-1]["content"].removeprefix("What is ").rstrip("?")
        answer = f'<tool_call>{{"name": "submit", "arguments": {{"answer": "{asked}"}}}}</tool_call>'
        later, _, terminated, truncated, info = vector.step((answer, "é\N{GRINNING FACE}"))
        assert (terminated.tolist(), truncated.tolist()) == ([True, False], [False, False])
        assert info["outcome"][0] == 1.0
        assert later in vector.observation_space and later[0][0]["role"] == "tool"
        assert observations == alone, "what was given stays as it was"
    finally:
        vector.close()


class Long(agentrl.Env):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return ({"role": "user", "content": "x" * int((options or {}).get("length", 1))},), {}


def test_an_observation_too_long_for_shared_memory_says_what_to_do() -> None:
    agentrl.register("test_for_gymnasium/Long-v0", Long)
    vector = gymnasium.make_vec("test_for_gymnasium/Long-v0", 1, vectorization_mode="async")
    try:
        observations, _ = vector.reset(options={"length": 900_000})
        assert len(observations[0][0]["content"]) == 900_000
        with pytest.raises(UsageError, match=r"vector_kwargs=\{'shared_memory': False\}"):
            vector.reset(options={"length": 2_000_000})
    finally:
        vector.close(terminate=True)


def test_an_episode_that_gymnasiums_time_limit_ends_has_an_outcome() -> None:
    agentrl.register("test_for_gymnasium/Partly-v0", Partly)
    limited = gymnasium.make("test_for_gymnasium/Partly-v0", max_episode_steps=2)
    ours = Judged(TimeLimit(Partly(), 2))
    again = limited.spec.make()
    for env in (limited, ours, again):
        env.reset(seed=1)
        assert env.step("one")[4] == {}
        *_, terminated, truncated, info = env.step("two")
        assert (terminated, truncated) == (False, True)
        assert info == {"outcome": 0.5, "success": False, "stop_reason": "truncated"}
        env.close()


def test_an_end_of_its_own_is_not_judged_twice() -> None:
    class Counts(Partly):
        limits = agentrl.EpisodeLimits(turns=1)
        graded_times = 0

        def grade(self):
            self.graded_times += 1
            return 1.0

    env = Judged(TimeLimit(Counts(), 1))
    env.reset(seed=1)
    *_, info = env.step("one")
    assert (info["stop_reason"], info["outcome"], env.unwrapped.graded_times) == ("turn_limit", 1.0, 1)
    env.close()
