"""Teachers that engines serve: what they say of each token is journaled, and an episode never depends on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock

from agentrl import config
from agentrl.config.sections import RewardSource
from agentrl.engine.rendering.renderer import Renderer
from agentrl.engine.scoring_client import ScoringClient
from agentrl.errors import ConfigError
from agentrl.models.resolve import model_dir
from agentrl.records import context_ids
from agentrl.rewards.scorer import Scorer
from agentrl.rewards.teacher import Teacher, prefix_of
from agentrl.run.reward_services import check_teachers, teacher_of
from agentrl.store import RunStore
from tests.rewards.test_sources import desk, eventually
from tests.store.play import play_all

MODEL = "agentrl/tiny-coder"


def settings(**changes: Any) -> RewardSource:
    said = {"source": "big", "kind": "teacher", "url": "http://big", "late": "partial", "retries": 0}
    return RewardSource(**{**said, **changes})


def logprob(at: int, token: int) -> float:
    return -(at * 100 + token) / 1000


class Server(httpx.AsyncBaseTransport):
    """Says of the token at a place what `logprob` does; refuses every request with `status` if it is set, and divides
    texts as `tokens` does."""

    def __init__(self, status: int = 200, tokens: Renderer | None = None) -> None:
        self.status, self.seen, self._tokens = status, list[list[int]](), tokens

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        if request.url.path == "/tokenize":
            if self._tokens is None:
                return httpx.Response(404)
            return httpx.Response(200, json={"tokens": self._tokens.tokens(body["prompt"])})
        self.seen.append(body["token_ids"])
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": "this prompt is too long"}})
        said = [{str(token): {"logprob": logprob(at, token)}} for at, token in enumerate(body["token_ids"])]
        return httpx.Response(200, json={"prompt_logprobs": [None, *said[1:]]})


def teacher(server: Server, **given: Any) -> Teacher:
    client = ScoringClient("http://big", deadline_s=5.0, transport=server)

    async def clients() -> Sequence[ScoringClient]:
        return [client]

    return Teacher(clients, **given)


async def taught(store: RunStore, ask: Teacher) -> None:
    """Two members of two turns are played and taught to their end."""
    play_all(store, turns=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Scorer(settings(), desk(store), ask).serve)
        await eventually(lambda: store.buffer.ready_count() == 1)
        nursery.cancel_scope.cancel()


async def test_what_a_teacher_says_of_each_token_is_journaled(store: RunStore, autojump_clock: MockClock) -> None:
    server = Server()
    await taught(store, teacher(server, prefix=(90, 91)))
    for trajectory in store.reads.trajectories("train"):
        for turn in trajectory.turns:
            before = (90, 91, *context_ids(trajectory.turns, turn.index))
            assert [*before, *turn.token_ids] in server.seen  # as sampled, after the teacher's own prompt
            expected = [logprob(len(before) + k, token) for k, token in enumerate(turn.token_ids)]
            assert turn.columns["teacher"] == pytest.approx(expected)
            assert turn.scores["big"] == pytest.approx(
                sum(a - b for a, b in zip(expected, turn.logprobs, strict=True)) / len(expected)
            )
            assert turn.step is not None and turn.reward == turn.step.reward  # no part of the reward
    with RunStore.read(store.path) as again:
        assert [t.turns for t in again.reads.trajectories("train")] == [
            t.turns for t in store.reads.trajectories("train")
        ]


async def test_a_teacher_that_refuses_costs_no_episode(store: RunStore, autojump_clock: MockClock) -> None:
    """A context that is too long for it, say: a policy could write one at will."""
    server = Server(status=400)
    play_all(store, turns=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Scorer(settings(), desk(store), teacher(server)).serve)
        await eventually(lambda: len(server.seen) >= 4)
        nursery.cancel_scope.cancel()
    assert store.buffer.ready_count() == 0
    waited = store.scores.expire_sources(1e12)
    assert len(waited["big"]) == 2
    assert store.buffer.ready_count() == 1
    members = list(store.reads.trajectories("train"))
    assert all(one.scored for one in members)
    assert not any(turn.columns for one in members for turn in one.turns)


async def test_a_teacher_says_nothing_of_environments_that_it_does_not_teach(
    store: RunStore, autojump_clock: MockClock
) -> None:
    server = Server()
    await taught(store, teacher(server, envs=frozenset({"other/Env-v0"})))
    assert server.seen == []
    assert not any(turn.columns for one in store.reads.trajectories("train") for turn in one.turns)


def run_file(*sources: dict[str, Any], distil_weight: float = 1.0, **more: Any) -> config.RunConfig:
    rewards = [{"source": "big", "kind": "teacher", "url": "http://big", "late": "partial", **one} for one in sources]
    algo = {"distil_weight": distil_weight, **more.pop("algo", {})}
    return config.parse(
        {"model": MODEL, "env": {"id": "agentrl/TinyCoder-v0"}, "rewards": rewards, "algo": algo, **more}
    )


def test_teachers_are_checked_before_anything_is_played(capsys: pytest.CaptureFixture[str]) -> None:
    own = Renderer(model_dir(MODEL))
    check_teachers(run_file({}), Server(tokens=own))
    assert capsys.readouterr().err == ""
    check_teachers(run_file({}), Server())
    assert "http://big does not say how it divides a text" in capsys.readouterr().err

    class Other(Renderer):
        def tokens(self, text: str) -> tuple[int, ...]:
            return super().tokens(text)[::-1]

    wrong: list[tuple[config.RunConfig, Server, str]] = [
        (run_file({}), Server(tokens=Other(model_dir(MODEL))), r"rewards\.url.*into other tokens"),
        (run_file({}), Server(status=400), r"rewards\.url.*does not say how probable.*too long"),
        (run_file(), Server(), r"algo\.distil_weight.*nobody teaches"),
        (run_file({}, distil_weight=0.0), Server(), r"rewards\.source.*teaches nothing"),
        (run_file({}, algo={"teacher": MODEL}), Server(), r"algo\.teacher.*leave one out"),
        (run_file({}, rollout={"temperature": 0.7}), Server(), r"rollout\.temperature.*temperature 1"),
    ]
    for document, server, says in wrong:
        with pytest.raises(ConfigError, match=says):
            check_teachers(document, server)


def test_each_environment_is_checked_with_its_own_algorithm_and_teachers() -> None:
    """TinyCoder-v0 learns from rewards, b from a teacher behind an engine, c from one in the learner."""
    taught, inside = {"distil_weight": 1.0}, {"distil_weight": 1.0, "teacher": MODEL}

    def tasks(of_b: dict[str, Any] | None, of_c: dict[str, Any] | None) -> dict[str, Any]:
        tables = [("agentrl/TinyCoder-v0", None), ("b", of_b), ("c", of_c)]
        return {"tasks": [{"id": id, "algo": algo} if algo else {"id": id} for id, algo in tables]}

    own = Renderer(model_dir(MODEL))
    check_teachers(run_file({"envs": ["b"]}, distil_weight=0.0, **tasks(taught, inside)), Server(tokens=own))
    role = {"roles": [{"name": "critic", "algo": taught}]}
    check_teachers(run_file({}, distil_weight=0.0, **role), Server(tokens=own))
    wrong = [
        (run_file(distil_weight=0.0, **role), r"roles\.0\.algo\.distil_weight.*nobody"),
        (run_file({"envs": ["b"]}, distil_weight=0.0, **tasks(None, inside)), r"rewards\.source.*teaches nothing"),
        (
            run_file({"envs": ["b"]}, distil_weight=0.0, **tasks(taught, taught)),
            r"tasks\.2\.algo\.distil_weight.*nobody",
        ),
        (
            run_file({"envs": ["c"]}, distil_weight=0.0, **tasks(None, inside)),
            r"tasks\.2\.algo\.teacher.*leave one out",
        ),
    ]
    for document, says in wrong:
        with pytest.raises(ConfigError, match=says):
            check_teachers(document, Server(tokens=own))


def test_a_late_teacher_may_not_drop_episodes() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.late.*give 'partial'"):
        settings(late="drop")


def test_a_prompt_of_the_teachers_own_comes_before_the_conversation() -> None:
    renderer = Renderer(model_dir(MODEL))
    asked = {"role": "user", "content": "mend it"}
    prefix = prefix_of(renderer, "You know the answer.")
    whole = renderer.start([{"role": "system", "content": "You know the answer."}, asked])  # pyright: ignore
    assert prefix + renderer.start([asked]) == whole  # pyright: ignore[reportArgumentType]
    assert prefix and prefix_of(renderer, None) == ()


async def test_the_policys_own_engines_are_those_that_serve_now() -> None:
    """None before the first one serves; a client stays for as long as its engine does."""
    meta: dict[str, str] = {}

    async def read(key: str) -> str | None:
        return meta.get(key)

    clients = teacher_of(run_file({}), read, settings(url="policy")).clients
    assert await clients() == []
    meta["engine_urls"] = '["http://a", "http://b"]'
    first = await clients()
    meta["engine_urls"] = '["http://b"]'
    assert [one.url for one in first] == ["http://a", "http://b"] and await clients() == [first[1]]
