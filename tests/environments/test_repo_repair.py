"""`RepoRepair`: its tasks, its catalogue, and episodes played in real boxes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rollout.conftest import context, renderer, store  # noqa: F401  (fixtures)
from rollout.saying import saying

import agentrl
from agentrl.env.checks.oracles import judge as play_oracles
from agentrl.errors import ConfigError
from agentrl.records import Task
from agentrl.rollout.episode import play
from agentrl.sandbox import backend
from agentrl_environments.judging import SourceJudge
from agentrl_environments.repo_repair import RepoRepair, make_task
from agentrl_environments.repo_repair.breaking import MUTATIONS, applied, features, mutations, stubs
from agentrl_environments.repo_repair.catalogue import entries
from agentrl_environments.repo_repair.repository import REPOSITORIES, encoded, load
from agentrl_environments.repo_repair.tasks import choices, level_of, task_of
from agentrl_environments.repo_repair.texts import prompt, report, steady


@asynccontextmanager
async def mending(seed: int, **kwargs: Any) -> AsyncIterator[tuple[RepoRepair, str]]:
    env = RepoRepair(**kwargs)
    try:
        opening, _ = await env.areset(seed=seed)
        yield env, opening[-1]["content"]
    finally:
        await env.aclose()


def content(observation: Any, index: int = 0) -> str:
    return observation[index]["content"]


# --- tasks ---------------------------------------------------------------------------------------------------------


def test_a_seed_is_a_task() -> None:
    assert make_task(3) == make_task.__wrapped__(3)
    assert len({make_task(seed).breakage for seed in range(20)}) > 10


def test_splits_share_no_repository() -> None:
    for split, names in REPOSITORIES.items():
        assert {entry.repository for entry in choices(split, "all")} == set(names)


def test_the_catalogue_is_large_and_varied() -> None:
    for split in REPOSITORIES:
        for level in ("easy", "medium", "hard"):
            assert len(choices(split, level)) > 50
    kinds = {entry.breakage.kind for entry in entries()}
    assert kinds == {*MUTATIONS, "several", "stub", "feature"}
    assert len(entries()) > 800 and len({(entry.repository, entry.breakage.edits) for entry in entries()}) > 800


@pytest.mark.medium
def test_every_task_has_what_it_needs() -> None:
    for entry in random.Random(2).sample(entries(), 200):
        task = task_of(entry, random.Random(0))
        assert task.fails and task.passes and not set(task.fails) & set(task.passes)
        assert {*task.fails, *task.passes} == set(load(entry.repository).test_ids)
        assert task.broken != task.gold and task.broken.keys() == task.gold.keys()
        feature = entry.breakage.kind == "feature"
        assert bool(task.shown_failing) != feature and bool(entry.breakage.signature) == feature
        assert any(test not in task.hidden for test in task.passes)


def test_levels_grow_harder() -> None:
    for entry in entries():
        one_bug, many_fail = entry.breakage.kind in MUTATIONS, len(entry.fails) >= 3
        whole = entry.breakage.kind in ("several", "feature")
        assert level_of(entry) == ("hard" if whole else "easy" if one_bug and many_fail else "medium")


@pytest.mark.medium
def test_nothing_shown_holds_the_solution() -> None:
    """The lines that a breakage took out stand in no file and no word that the policy gets."""
    for seed in range(60):
        task = make_task(seed, "train", "medium")
        if task.breakage.kind != "stub":
            continue
        (edit,) = task.breakage.edits
        body = "\n".join(task.gold[edit.path].split("\n")[edit.line - 1 : edit.line - 1 + edit.count])
        shown = "\n".join([*task.broken.values(), *task.visible.values(), task.readme, prompt(task)])
        assert body.strip() not in shown


SOURCE = '''"""A module."""


def f(a, b=2):
    """Say something."""
    if a < b and not a:
        log(a)
    return a + b


class C:
    def g(self):
        """Go."""
        self.x = 1
        self.y = [self.x, True]
        return self.y
'''


def test_breakages_are_the_ones_that_a_reader_would_list() -> None:
    changed = {(found.kind, found.subject, found.edits[0].new) for found in mutations({"m.py": SOURCE})}
    assert changed == {
        ("constant", "f", ("def f(a, b=3):",)),
        ("comparison", "f", ("    if a <= b and not a:",)),
        ("control", "f", ("    if a < b or not a:",)),
        ("control", "f", ("    if a < b and a:",)),
        ("control", "f", ("    if not (a < b and not a):",)),
        ("removal", "f", ("        pass",)),
        ("operator", "f", ("    return a - b",)),
        ("control", "f", ("    return None",)),
        ("removal", "C.g", ()),
        ("constant", "C.g", ("        self.x = 2",)),
        ("constant", "C.g", ("        self.y = [self.x, False]",)),
        ("control", "C.g", ("        return None",)),
    }
    (stub,) = [found for found in stubs({"m.py": SOURCE}) if found.subject == "C.g"]
    assert applied({"m.py": SOURCE}, stub.edits)["m.py"].endswith('"""Go."""\n        raise NotImplementedError\n')
    (feature,) = [found for found in features({"m.py": SOURCE}) if found.subject == "f"]
    assert feature.signature == 'def f(a, b=2):\n    """Say something."""'
    assert "def f" not in applied({"m.py": SOURCE}, feature.edits)["m.py"]
    assert "f" not in {found.subject for found in features({"m.py": SOURCE, "n.py": "from m import f\n"})}


def test_what_differs_from_run_to_run_is_not_shown() -> None:
    assert (
        steady("<Shelf object at 0x7f3a90>\nRan 3 tests in 0.004s\n\nOK") == "<Shelf object at 0x…>\nRan 3 tests\n\nOK"
    )


def test_the_verdict_comes_first() -> None:
    assert report("..F\nRan 3 tests in 1.2s\n\nFAILED (failures=1)").startswith("FAILED (failures=1)\n\n..F\n")
    assert report("[ended after 20 s]") == "[ended after 20 s]"


def test_bad_settings_are_named() -> None:
    for wrong in ({"split": "test"}, {"level": "harder"}, {"process": ["style"]}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            RepoRepair(**wrong)  # type: ignore[arg-type]


# --- boxes ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.bubblewrap
async def test_the_catalogue_says_what_the_boxes_say() -> None:
    boxes = backend("bubblewrap")
    judge = SourceJudge(boxes)
    for entry in random.Random(1).sample(entries(), 24):
        repository = load(entry.repository)
        verdicts = await judge.run(
            encoded(applied(repository.sources, entry.breakage.edits)), encoded(repository.tests)
        )
        assert verdicts.whole and verdicts.passed == set(repository.test_ids) - set(entry.fails), entry
    await boxes.aclose()


@pytest.mark.medium
@pytest.mark.bubblewrap
@pytest.mark.parametrize("level", ["easy", pytest.param("medium", marks=pytest.mark.long), "hard"])
@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.long), "held_out"])
async def test_oracles_get_what_they_must(split: str, level: str) -> None:
    for seed in range(3):
        verdicts = await play_oracles(lambda: agentrl.make("agentrl/RepoRepair-v0", split=split, level=level), seed)
        names = ["gold", "no-op", "delete the tests", "empty the sources"]
        assert [(verdict.name, verdict.got) for verdict in verdicts] == list(zip(names, [1, 0, 0, 0], strict=True))


@pytest.mark.medium
@pytest.mark.bubblewrap
async def test_an_episode_with_all_tools() -> None:
    task = make_task(16)
    (edit,) = task.breakage.edits
    right = task.gold[edit.path].split("\n")[edit.line - 1]
    async with mending(16) as (env, opening):
        assert all(f"- {test}\n" in opening for test in task.shown_failing)
        assert not any(test in opening for test in task.hidden)
        look = env.call("list_files") + env.call("search", pattern=edit.new[0].strip(), path=edit.path)
        observation, *_ = await env.astep(look + env.call("read_file", path=edit.path, first=edit.line, last=edit.line))
        files = sorted(["README.md", *task.broken, *(f"tests/{name}" for name in task.visible)])
        assert content(observation).split("\n") == files
        assert f"{edit.path}:{edit.line}:" in content(observation, 1)
        assert content(observation, 2) == f"{edit.line}\t{edit.new[0]}"
        observation, reward, *_ = await env.astep(env.call("run_tests"))
        assert content(observation).startswith(f"FAILED (failures={len(task.shown_failing)})\n") and reward == 0.0
        patch = f"--- a/{edit.path}\n+++ b/{edit.path}\n@@ -{edit.line},1 +{edit.line},1 @@\n-{edit.new[0]}\n+{right}\n"
        observation, reward, *_ = await env.astep(env.call("apply_patch", patch=patch) + env.call("run_tests"))
        assert content(observation, 1).startswith("OK\n")
        assert reward == pytest.approx(len(task.fails) / (len(task.fails) + len(task.passes)))
        _, _, terminated, _, info = await env.astep(env.call("submit"))
        assert terminated and (info["outcome"], info["mended"], info["kept"]) == (1.0, 1.0, 1.0)


@pytest.mark.medium
@pytest.mark.bubblewrap
async def test_a_feature_is_described_and_its_tests_are_hidden() -> None:
    seed = next(seed for seed in range(99) if make_task(seed, "train", "hard").breakage.kind == "feature")
    task = make_task(seed, "train", "hard")
    async with mending(seed, level="hard") as (env, opening):
        assert f"Add {task.breakage.subject} to {task.breakage.edits[0].path}" in opening
        assert task.breakage.signature in opening
        observation, *_ = await env.astep(env.call("run_tests"))
        assert content(observation).startswith("OK\n")  # nothing that is visible misses it
        *_, info = await env.astep(env.call("submit"))
        assert (info["outcome"], info["mended"], info["kept"]) == (0.0, 0.0, 1.0)


@pytest.mark.bubblewrap
async def test_breaking_what_worked_does_not_succeed() -> None:
    """All that failed is mended, but something else is broken on the way."""
    task = make_task(16)
    assert not any(test.startswith("test_planning.PlanningTest") for test in task.fails)
    async with mending(16, process=()) as (env, _):
        writes = [env.call("write_file", path=path, content=text) for path, text in task.gold.items()]
        path = "spans/planning.py"
        broken = task.gold[path].replace("return most", "return most + 1")
        await env.astep("".join(writes) + env.call("write_file", path=path, content=broken))
        *_, info = await env.astep(env.call("submit"))
    assert (info["outcome"], info["mended"]) == (0.0, 1.0) and info["kept"] < 1.0


@pytest.mark.bubblewrap
async def test_the_declared_sources_are_the_work_also_once_the_episode_is_over() -> None:
    task = make_task(16)
    async with mending(16, process=()) as (env, _):
        assert await env.artifacts() == encoded(task.broken)
        writes = [env.call("write_file", path=path, content=text) for path, text in task.gold.items()]
        await env.astep(
            "".join(writes) + env.call("write_file", path="tests/mine.py", content="x") + env.call("submit")
        )
        assert await env.artifacts() == encoded({**task.broken, **task.gold})


@pytest.mark.medium
@pytest.mark.bubblewrap
async def test_both_potentials_add_up() -> None:
    task = make_task(16)
    total = len(task.fails) + len(task.passes)
    async with mending(16, process=("tests", "lint")) as (env, _):
        path = task.breakage.edits[0].path
        untidy = env.call("write_file", path=path, content=f"import os\n{task.gold[path]}")
        _, first, *_ = await env.astep(untidy)
        assert first == pytest.approx(len(task.fails) / total + 1 / 2 - 1)
        _, last, *_ = await env.astep(env.call("submit"))
    assert first + last == pytest.approx(0.0)


@pytest.mark.slow
@pytest.mark.bubblewrap
def test_it_keeps_the_contract() -> None:
    env = RepoRepair()
    actions = [env.call("list_files"), env.call("run_tests"), env.call("write_file", path="lru/cache.py", content="x")]
    assert agentrl.check_env("agentrl/RepoRepair-v0", actions=actions).findings == ()


@pytest.mark.medium
async def test_it_also_plays_without_walls() -> None:
    """On a machine that has no sandbox, if its user says so."""
    verdicts = await play_oracles(lambda: RepoRepair(sandbox="local-unsafe"), 1)
    assert [verdict.got for verdict in verdicts] == [1, 0, 0, 0]


@pytest.mark.medium
@pytest.mark.bubblewrap
async def test_whoever_ends_an_episode_to_solve_and_submit_earns_as_much_as_to_solve_and_dawdle(
    renderer: Any,  # noqa: F811
    store: Any,  # noqa: F811
    context: Any,  # noqa: F811
) -> None:
    """At a run's default turns, and where the run has fewer than the environment."""

    async def earned(*turns: str, seed: int, **settings: Any) -> float:
        store.groups.add_groups([Task(index=seed, env="test/Env", seed=3)], size=1, purpose="train")
        (claim,) = store.leases.claim("w", 1, lease_s=1e6)
        room = {"max_context": 1_000_000, "max_tokens_per_turn": 100_000, **settings}
        await play(claim, context(RepoRepair(), saying(renderer, *turns), **room))
        trajectory = store.reads.trajectory(claim.episode_id)
        assert trajectory.outcome is not None
        return trajectory.outcome + sum(trajectory.rewards)

    env = RepoRepair()
    await env.areset(seed=3)
    repair = env._repair
    await env.aclose()
    mended = [path for path, text in repair.gold.items() if text != repair.broken[path]]
    solve = "".join(env.call("write_file", path=path, content=repair.gold[path]) for path in mended)
    submit, dawdle = env.call("submit"), env.call("list_files")
    assert await earned(solve, submit, seed=0) == pytest.approx(1.0)
    assert await earned(solve, dawdle, seed=1) == pytest.approx(1.0)
    assert await earned(solve, dawdle, seed=2, max_turns=8) == pytest.approx(1.0)
    assert await earned(dawdle, seed=3, max_turns=8) == pytest.approx(0.0)
