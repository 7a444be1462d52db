"""Past selves on a real server: loaded as they join, exact beside the policy, gone when none can meet them, and back
on an engine that has none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from agentrl import config as configuration
from agentrl.config.league import from_json
from agentrl.engine.rendering.renderer import Renderer
from agentrl.engine.weight_sync import adapters
from agentrl.engine.weight_sync.adapters import AdapterClient, always
from agentrl.errors import EngineUnavailable
from agentrl.records import Task, WeightVersion, context_ids
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.episode import play
from agentrl.rollout.opponents import Opponents
from agentrl.run.children.engine_process import ServedWeights, fit
from agentrl.run.league import League, folders, game
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.audit import audit
from agentrl.store.journal_writer import JournalWriter
from agentrl.store.run_values import LEAGUE
from tests.rollout.test_roles import game as game_of

from .conftest import LORA_RANK, Server
from .policy import Policy
from .test_contract import ask
from .test_weights import ADMIN_S, EXACT

pytestmark = pytest.mark.vllm

FAR = 0.1  # nats: another adapter's log-probs are further off than this


def talking(model: Path, folder: Path) -> Path:
    """The model's tokenizer with a template that ends turns."""
    folder.mkdir()
    for file in model.glob("tokenizer*"):
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}t1{% endfor %}")
    return folder


class InTurn(Opponents):
    """One group after the other meets each member that there was when it was admitted."""

    async def version(self, store: Any, claim: Any, role: str, turns: Any, begun: Any) -> int | None:
        members = [one for one in from_json(await store.meta(LEAGUE.key)) if one.step < claim.started_step]
        return members[claim.group_id % len(members)].version if role in self.roles(claim) else None


class Scene:
    """A run whose role "bob" is played by past selves, one a step, of which two newer than the policy's are kept."""

    def __init__(self, folder: Path, policy: Policy, url: str) -> None:
        self.policy, self.url = policy, url
        document: dict[str, Any] = {
            "model": str(policy.folder),
            "env": {"id": "test/none"},
            "engine": {"kind": "vllm", "urls": [url]},
            "rollout": {"max_tokens_per_turn": 16, "max_turns": 8},
            "buffer": {"max_lag": 0},
            "train": {"lora_rank": LORA_RANK},
            "roles": [{"name": "bob", "plays": "league"}],
            "league": {"every": 1, "newest": 1},
        }
        self.config = configuration.parse(document)
        self.run = RunDir.create(folder / "run", self.config)
        self.store = RunStore.open(self.run.store_path)
        self.league = League(self.config, self.run, self.store)
        self.renderer = Renderer(talking(policy.folder, folder / "tokenizer"))
        self.steps, self.current = 0, WeightVersion(version=0, step=0)
        self.adapter = folder

    async def step(self) -> int:
        """A step of the learner: a new adapter, which the engine serves and which joins the league. Its version."""
        wanted, self.adapter = self.policy.adapter()
        self.steps += 1
        while (version := self.store.versions.mint_version(self.steps)).version < wanted:
            pass
        self.current = version
        checkpoint = self.run.checkpoints / f"step-{self.steps:08d}"
        checkpoint.mkdir()
        (checkpoint / "adapter").symlink_to(self.adapter)
        async with aclosing(self.client()) as client:
            await adapters.load([client], self.adapter, version.version, deadline_s=ADMIN_S)
        self.league.join(version, checkpoint)
        await self.league.announce([self.url])
        self.store.versions.confirm_version(version)
        return version.version

    async def refit(self) -> None:
        """What a run does with an engine that was started again."""
        found = ServedWeights(
            model=self.policy.folder,
            base=WeightVersion(version=0, step=0),
            current=self.current,
            adapter=self.adapter,
            past=folders(self.run),
        )
        self.run.locks.mkdir(parents=True, exist_ok=True)
        await fit("engine-0", self.url, partial(self._found, found), self.config, self.run.locks)

    def client(self) -> AdapterClient:
        return AdapterClient(self.url, current=self._now)

    async def _now(self) -> int:
        return self.current.version

    async def _found(self, weights: ServedWeights) -> ServedWeights:
        return weights

    async def play(self, groups: int) -> set[int]:
        """Games, two of each group, all at once: each turn is of whom it should be, and the first of each with its
        log-probs. Returns who was met."""
        first = self.store.groups.tasks_started()
        tasks = [Task(index=first + at, env="test/any", seed=at) for at in range(groups)]
        self.store.groups.add_groups(tasks, size=2, purpose="train")
        claims = self.store.leases.claim("w", 2 * groups, lease_s=600)
        async with aclosing(self.client()) as client:
            place = {
                "engine": client,
                "renderer": self.renderer,
                "store": JournalWriter(self.store, inline=True, disk_wait_s=60.0),
                "settings": self.config.rollout,
                "opponents": InTurn(settings=self.config.league, plays=self.config.league_roles),
            }
            async with trio.open_nursery() as nursery:
                for claim in claims:
                    nursery.start_soon(play, claim, RolloutContext(make_env=lambda _: game_of(), **place))
        met, proved = set[int](), set[int]()
        for claim in claims:
            episode = self.store.reads.trajectory(claim.episode_id)
            found = game(episode, self.config.league_roles, version=-1)
            assert found[0] != -1 and episode.scored, episode.stop_reason
            met.add(found[0])
            for turn in episode.turns:
                wanted = self.current.version if turn.role == "ann" else found[0]
                assert {*turn.versions} == {wanted} and turn.learns == (turn.role == "ann")
                if wanted not in proved:
                    self.prove(context_ids(episode.turns, turn.index), turn.token_ids, turn.logprobs, wanted)
                proved.add(wanted)
        assert audit(self.store).violations == []
        return met

    def prove(self, context: Any, tokens: Any, logprobs: Any, version: int) -> None:
        """They are of this version's weights, and of no other's."""
        below = max(self.policy.files, default=1)
        others = {below, *folders(self.run), self.current.version} - {version or below}
        for weights, near in ((version or below, True), *((other, False) for other in others)):
            expected = self.policy.logprobs(context, tokens, weights)
            error = max(abs(one - other) for one, other in zip(logprobs, expected, strict=True))
            assert error <= EXACT if near else error > FAR, (version, weights, error)


@pytest.fixture
def scene_of(tmp_path: Path, policy: Policy) -> Iterator[Callable[[Server], Scene]]:
    made: list[Scene] = []

    def make(server: Server) -> Scene:
        made.append(Scene(tmp_path, policy, server.url))
        return made[-1]

    yield make
    for one in made:
        one.store.close()


async def names(url: str) -> set[str]:
    async with aclosing(AdapterClient(url, current=always(None))) as client:
        return {name for name in await adapters._places(client, ADMIN_S) if "-" in name}  # pyright: ignore[reportPrivateUsage]


async def empty(url: str) -> None:
    """As an engine is that has just been started."""
    async with aclosing(AdapterClient(url, current=always(None))) as client:
        await adapters.forget([client], deadline_s=ADMIN_S)
        left = frozenset({0})
        while left:
            left = await adapters.retire([client], keep=(), deadline_s=ADMIN_S)


async def test_past_selves_play_beside_the_policy_and_leave_when_none_can_meet_them(
    server: Server, scene_of: Callable[[Server], Scene]
) -> None:
    """More adapters than the server holds at once (`max_loras`) are asked for in one batch."""
    scene = scene_of(server)
    await empty(scene.url)
    try:
        versions = [await scene.step() for _ in range(3)]
        assert await names(scene.url) == {f"{kind}-{version}" for kind in ("policy", "league") for version in versions}
        assert await scene.play(6) == {0, *versions[:2]}, "of the steps before its own"
        versions.append(await scene.step())
        assert {name for name in await names(scene.url) if name.startswith("league")} == {
            f"league-{version}" for version in versions[1:]
        }
        async with aclosing(scene.client()) as client:
            await adapters.retire([client], keep=[versions[-1]], deadline_s=ADMIN_S)
            with pytest.raises(EngineUnavailable, match=f"no adapter 'league-{versions[0]}'"):
                await client.generate(replace(ask(), version=versions[0]))
        assert versions[0] not in await scene.play(6)
        await empty(scene.url)
        await scene.refit()
        assert await scene.play(6) == {0, *versions[1:3]}, "an engine without any was given all that may be met"
    finally:
        with trio.CancelScope(shield=True):
            await empty(scene.url)
