"""Several roles in one episode: who acts, what each sees, whose reward it is; and one role against given players."""

import pytest
import trio
from gymnasium.error import ResetNeeded

import agentrl
from agentrl.env.multi_agent import OneRole, RolesEnv
from agentrl.errors import ContentParseError, SandboxError, UsageError
from agentrl.records import StopReason


class Count(RolesEnv):
    """Three roles count aloud by turns; who says a number that ends in 7 gets a point from the one before."""

    roles = ("ann", "bob", "cem")
    blocking = False
    replayable = True
    max_turns = 50

    def start(self, task):
        self.number, self.heard = int(task.get("from", self.np_random.integers(1, 5))), {}
        self.closed = False
        return "ann"

    async def see(self, role):
        await trio.lowlevel.checkpoint()
        return [{"role": "user", "content": f"{role}: {self.number}"}]

    def play(self, role, text):
        if text == "crash":
            raise SandboxError("gone")
        if text != str(self.number + 1):
            raise ContentParseError(f"not {text!r}")
        self.number += 1
        if self.number % 10 == 7:
            self.reward(1.0)
            self.reward(-1.0, self.roles[self.roles.index(role) - 1])
        if self.number == self.task.get("to", 20):
            return None
        return self.roles[(self.roles.index(role) + 1) % 3]

    def outcomes(self, forfeited):
        return {role: float(role != forfeited) for role in self.roles}

    def teardown(self):
        self.closed = True


async def test_each_step_says_who_acts_next_and_shows_what_is_theirs():
    env = Count()
    observation, info = await env.areset(seed=0, options={"from": 4, "to": 8})
    assert observation == ({"role": "user", "content": "ann: 4"},) and info == {"role": "ann"}
    observation, reward, terminated, truncated, info = await env.astep("5")
    assert observation == ({"role": "user", "content": "bob: 5"},)
    assert (reward, terminated, truncated, info) == (0.0, False, False, {"acted": "ann", "role": "bob"})
    assert (await env.astep("6"))[4] == {"acted": "bob", "role": "cem"}
    _, reward, *_, info = await env.astep("7")
    assert reward == 1.0 and info == {"acted": "cem", "role": "ann", "rewards": {"bob": -1.0}}
    observation, reward, terminated, truncated, info = await env.astep("8")
    assert (observation, reward, terminated, truncated) == ((), 0.0, True, False)
    assert info == {
        "acted": "ann",
        "outcomes": {"ann": 1.0, "bob": 1.0, "cem": 1.0},
        "outcome": 1.0,
        "stop_reason": "done",
    }
    with pytest.raises(ResetNeeded):
        await env.astep("9")
    await env.aclose()
    assert env.closed


async def test_who_breaks_the_rules_reads_why_and_forfeits_in_the_end():
    env = Count()
    await env.areset(seed=0, options={"from": 1})
    await env.astep("2")
    for _ in range(2):
        observation, _, terminated, _, info = await env.astep("x")
        assert observation[0]["content"] == "not possible: not 'x'" and info["role"] == "bob" and not terminated
    *_, terminated, _, info = await env.astep("x")
    assert terminated and info["stop_reason"] == "parse_failure"
    assert info["outcomes"] == {"ann": 1.0, "bob": 0.0, "cem": 1.0}


async def test_the_turn_limit_truncates():
    env = Count()
    env.max_turns = 3
    await env.areset(seed=0, options={"from": 1})
    for number in (2, 3, 4):
        *_, terminated, truncated, info = await env.astep(str(number))
    assert truncated and not terminated and info["stop_reason"] == "turn_limit" and "role" not in info


async def test_a_limit_of_the_driver_ends_the_game_with_every_roles_outcome():
    env = OneRole(Count(), role="bob", others=count_on)
    await env.areset(seed=0, options={"from": 1})
    assert await env.aend(StopReason.TOKEN_LIMIT) == {"stop_reason": "token_limit", "outcome": 1.0, "success": True}
    assert await env.aend(StopReason.TOKEN_LIMIT) == {}, "it is judged once"
    with pytest.raises(ResetNeeded):
        await env.astep("3")
    table = Count()
    await table.areset(seed=0)
    assert (await table.aend(StopReason.TURN_LIMIT))["outcomes"] == {"ann": 1.0, "bob": 1.0, "cem": 1.0}


async def test_failures_that_no_role_caused_are_raised():
    env = Count()
    await env.areset(seed=0)
    with pytest.raises(SandboxError):
        await env.astep("crash")
    with pytest.raises(ResetNeeded):
        await env.astep("2")


async def test_an_unknown_role_is_named():
    class Wrong(Count):
        def start(self, task):
            return "dan"

    with pytest.raises(UsageError, match="named 'dan' to act; its roles are ann, bob, cem"):
        await Wrong().areset(seed=0)


def count_on(heard, rng):
    return str(int(heard[-1]["content"].rpartition(" ")[2]) + 1)


async def test_one_role_plays_and_the_others_are_given():
    heard_by_cem = []

    async def cem(heard, rng):
        heard_by_cem.append(heard)
        return count_on(heard, rng)

    env = OneRole(Count(), role="bob", others={"ann": count_on, "cem": cem})
    observation, info = await env.areset(seed=0, options={"from": 1, "to": 9})
    assert observation == ({"role": "user", "content": "bob: 2"},) and info == {}
    observation, reward, *_ = await env.astep("3")
    assert observation[0]["content"] == "bob: 5" and reward == 0.0
    observation, reward, *_, info = await env.astep("6")
    assert reward == -1.0, "cem's 7 costs the one before, who is the learner"
    assert observation[0]["content"] == "bob: 8" and info == {}
    assert [message["content"] for message in heard_by_cem[1]] == ["cem: 3", "4", "cem: 6"]
    assert [message["role"] for message in heard_by_cem[1]] == ["user", "assistant", "user"]
    _, _, terminated, _, info = await env.astep("9")
    assert terminated and info == {"stop_reason": "done", "outcome": 1.0, "success": True}
    await env.aclose()


async def test_a_given_player_who_breaks_the_rules_forfeits():
    env = OneRole(Count(), role="ann", others=lambda heard, rng: "x")
    await env.areset(seed=0)
    number = env._env.number
    *_, terminated, _, info = await env.astep(str(number + 1))
    assert terminated and info["success"], "the learner is not to blame"


async def test_the_seed_deals_the_roles():
    env = OneRole(Count(), role="seed", others=count_on)
    roles = set()
    for seed in range(30):
        await env.areset(seed=seed)
        roles.add(env.role)
        first = env.role
        await env.areset(seed=seed)
        assert env.role == first
    assert roles == {"ann", "bob", "cem"}


def test_nobody_may_be_missing():
    with pytest.raises(UsageError, match="nobody plays cem"):
        OneRole(Count(), role="ann", others={"bob": count_on})
    with pytest.raises(UsageError, match="role = 'dan'"):
        OneRole(Count(), role="dan", others=count_on)


def test_both_pass_the_checker():
    assert agentrl.check_env(Count, actions=["2", "3", "4", "x"]).findings == ()
    assert agentrl.check_env(lambda: OneRole(Count(), role="seed", others=count_on)).findings == ()


@pytest.mark.parametrize(("cut_off", "ended"), [(True, (False, True, "truncated")), (False, (True, False, "done"))])
async def test_a_limit_of_the_game_itself_truncates(cut_off, ended):
    async with Count() as env:
        await env.areset(seed=0, options={"from": 1, "to": 2})
        env.cut_off = cut_off
        *_, terminated, truncated, info = await env.astep("2")
        assert (terminated, truncated, info["stop_reason"]) == ended
        assert info["outcomes"] == {"ann": 1.0, "bob": 1.0, "cem": 1.0}
