"""A conversation that outgrows its context goes on from less of it, is trained whole, and survives a kill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from each_case import each_case

from agentrl import config as configuration
from agentrl.algos.grpo import GRPO
from agentrl.config.sections import CompactionSettings
from agentrl.engine.rendering.renderer import Renderer
from agentrl.errors import ConfigError, LeaseLost
from agentrl.learner.data.batch import group_rows
from agentrl.protocols import GenerateRequest
from agentrl.records import Message, Step, StopReason, context_ids
from agentrl.rollout import compaction
from agentrl.rollout.episode import play
from agentrl.store import RunStore
from agentrl.store.audit import audit
from tests.parts.fake_engine import FakeEngine
from tests.parts.outside_audit import OutsideAuditor

from .conftest import ScriptedEnv, done, going, said
from .test_partial_turns import Killed, Mortal
from .writing import instead, written

NOTES = "It is 7."
AT = {"max_context": 400, "max_tokens_per_turn": 40}
REQUEST = "NOTES?"


def writing(renderer: Renderer, chunk_tokens: int = 4) -> FakeEngine:
    """Answers the request for notes with NOTES, and everything else with "act"."""

    def script(request: GenerateRequest) -> list[int]:
        asked = renderer.decode(request.token_ids).rstrip().endswith(f"{REQUEST}<|im_end|>\n<|im_start|>assistant")
        return [*renderer.conversations.encode(NOTES if asked else "act"), *request.sampling.stop_token_ids[:1]]

    return FakeEngine(script, version=1, chunk_tokens=chunk_tokens)


def by(function: Any) -> dict[str, Any]:
    """The settings of a run whose conversations a function of the user's makes shorter."""
    return {**AT, "compaction": CompactionSettings(how=f"{__name__}:{function.__name__}")}


def summary(**more: Any) -> dict[str, Any]:
    return {**AT, "compaction": CompactionSettings(at=0.6, request=REQUEST), **more}


LONG = "x" * 190
ANSWERS = [going("a short one"), going(LONG), going("after"), done()]


@pytest.mark.parametrize("end", ["user", "tool"])
async def test_the_policy_writes_notes_and_goes_on_from_them(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer, end: str
) -> None:
    answers = [(({**answer[0][0], "role": end},), *answer[1:]) if answer[0] else answer for answer in ANSWERS]
    claim, env, engine = claim_one(), ScriptedEnv(answers), writing(renderer)
    await play(claim, context(env, engine, **summary()))
    episode = store.reads.trajectory(claim.episode_id)
    assert episode.stop_reason is StopReason.DONE and episode.outcome == 1.0
    assert env.actions == ["act"] * 4, "the environment never sees the notes"
    assert [turn.text for turn in episode.turns] == ["act", "act", NOTES, "act", "act"]
    assert [turn.parent for turn in episode.turns] == [None, 0, 1, None, 3]
    asks = [turn.step.compaction for turn in episode.turns if turn.step]
    assert asks == ["", compaction.REQUESTED, compaction.SUMMARY, "", ""]
    asked = episode.turns[1].step
    assert asked is not None
    if end == "user":
        assert asked.observation == said(f"{LONG}\n\n{REQUEST}")
    else:
        assert [message["role"] for message in asked.observation] == ["tool", "user"]
    goes_on = said(f"go\n\nYour notes on what has happened so far:\n{NOTES}")
    assert episode.turns[3].prompt_ids == renderer.start(goes_on)
    for index, request in enumerate(engine.requests):
        assert request.token_ids == context_ids(episode.turns, index)
    assert audit(store).ok


async def test_every_token_of_both_segments_has_the_one_outcome_s_advantage(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer
) -> None:
    for outcome in (1.0, 0.0):
        claim = claim_one()
        env = ScriptedEnv([*ANSWERS[:3], done(outcome)])
        await play(claim, context(env, writing(renderer), **summary()))
    group = store.reads.group(claim.group_id)
    rows = group_rows(group, GRPO(), step_of=store.versions.step_of, step_now=0, max_lag=0).rows
    texts = [("act", "act", NOTES), ("act", "act")]  # what the policy sampled in the two segments
    assert [len(row.place_S) for row in rows] == 2 * [sum(len(text) + 1 for text in segment) for segment in texts]
    for row in rows:
        (advantage,) = set(row.columns["advantage"].tolist())
        assert (advantage > 0) is (row.episode_id == group.trajectories[0].episode_id)


async def test_killed_between_request_notes_and_going_on_it_does_the_same_again(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies after each write of the journal in turn; another goes on, without the setting."""
    claim, writes, auditor = claim_one(), 0, OutsideAuditor(store.path)

    def dying(write: str) -> Callable[..., None]:
        journal = written(store, write)

        def call(*arguments: Any) -> None:
            journal(*arguments)
            raise Killed

        return call

    settings: dict[str, Any] = summary()
    while True:
        env = ScriptedEnv(ANSWERS)
        write = ("journal_turn", "journal_step")[writes % 2]
        try:
            with monkeypatch.context() as patch:
                instead(patch, store, write, dying(write))
                await play(claim, context(env, writing(renderer), **settings))
            break
        except (Killed, LeaseLost):
            pass
        assert auditor.look() == []
        store.deaths.release_all()
        (claim,) = [
            found for found in store.leases.claim(f"w{writes}", 9, lease_s=10) if found.episode_id == claim.episode_id
        ]
        writes += 1
        assert writes < 20
        if len(claim.turns) == 2 and claim.turns[1].step is not None:
            settings = AT  # the request stands in the journal, so the notes are still notes
    episode = store.reads.trajectory(claim.episode_id)
    assert [turn.text for turn in episode.turns] == ["act", "act", NOTES, "act", "act"]
    assert env.actions == ["act"] * 4
    assert auditor.look(ended=True) == [] and auditor.abandoned == 0 and audit(store).ok


async def test_killed_in_the_middle_of_its_notes_it_writes_the_rest_of_them(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies while the notes come, after two of their tokens: none of these is sampled anew."""
    claim, settings = claim_one(), summary(checkpoint_tokens=1)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        mortal = Mortal(writing(renderer, chunk_tokens=1), store, patch, at=2, number=2)
        await play(claim, context(ScriptedEnv(ANSWERS), mortal, **settings))
    store.deaths.release_all()
    (claim,) = [found for found in store.leases.claim("second", 9, lease_s=10) if found.episode_id == claim.episode_id]
    begun = tuple(renderer.conversations.encode(NOTES)[:2])
    assert claim.partial is not None and claim.partial.token_ids == begun
    env, engine = ScriptedEnv(ANSWERS), writing(renderer)
    await play(claim, context(env, engine, **settings))
    goes_on = engine.requests[0]
    assert goes_on.sampled == 2 and goes_on.token_ids[-2:] == begun
    episode = store.reads.trajectory(claim.episode_id)
    assert [turn.text for turn in episode.turns] == ["act", "act", NOTES, "act", "act"]
    assert env.actions == ["act"] * 4 and audit(store).ok


async def test_without_it_the_episode_ends_at_its_context(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer
) -> None:
    claim = claim_one()
    await play(claim, context(ScriptedEnv([going(LONG), going(LONG), going(LONG), done()]), writing(renderer), **AT))
    assert store.reads.trajectory(claim.episode_id).stop_reason is StopReason.CONTEXT_LIMIT


async def test_notes_are_no_turn_of_the_limit(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer
) -> None:
    claim, env = claim_one(), ScriptedEnv(ANSWERS)
    await play(claim, context(env, writing(renderer), **summary(max_turns=3)))
    episode = store.reads.trajectory(claim.episode_id)
    assert (episode.stop_reason, len(env.actions), len(episode.turns)) == (StopReason.TURN_LIMIT, 3, 4)


async def test_old_tool_answers_go(store: RunStore, claim_one: Any, context: Any, renderer: Renderer) -> None:
    def tool(text: str) -> Any:
        return ({"role": "tool", "content": text},), 0.0, False, False, {}

    claim, env = claim_one(), ScriptedEnv([tool(LONG), tool("new"), tool("newest"), done()])
    settings = {**AT, "compaction": CompactionSettings(at=0.5, how="drop_tools")}
    await play(claim, context(env, writing(renderer), **settings))
    episode = store.reads.trajectory(claim.episode_id)
    (at,) = [turn.index for turn in episode.turns if turn.step and turn.step.history is not None]
    step = episode.turns[at].step
    assert step is not None and step.compaction == compaction.SHORTENED and step.history is not None
    texts = [message["content"] for message in step.history if message["role"] == "tool"]
    assert texts[:-1] == ["(left out)"] * at and texts[-1] != "(left out)"
    assert [message["role"] for message in step.history] == ["user", *["assistant", "tool"] * (at + 1)]
    assert episode.stop_reason is StopReason.DONE and audit(store).ok


def shorten(messages: list[Message]) -> list[Message]:
    return [messages[0], {"role": "user", "content": f"{len(messages)} messages before"}]


def broken(messages: list[Message]) -> Any:
    return "no messages"


def same(messages: list[Message]) -> list[Message]:
    return messages


async def test_a_function_of_the_user_s_makes_it_shorter(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer
) -> None:
    claim = claim_one()
    await play(claim, context(ScriptedEnv(ANSWERS), writing(renderer), **by(shorten)))
    turns = store.reads.trajectory(claim.episode_id).turns
    assert turns[2].parent is None
    assert turns[2].prompt_ids == renderer.start((*said("go"), *said("5 messages before")))


async def test_one_that_gives_no_messages_fails_its_episode_by_name(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer
) -> None:
    claim = claim_one()
    ending = await play(claim, context(ScriptedEnv(ANSWERS), writing(renderer), **by(broken)))
    assert ending.stop_reason is StopReason.ENV_FAILED
    assert "rollout.compaction.how" in ending.detail and "broken" in ending.detail and "no messages" in ending.detail


async def test_one_that_makes_nothing_shorter_forks_nothing_and_says_so(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer
) -> None:
    claim = claim_one()
    await play(claim, context(ScriptedEnv(ANSWERS), writing(renderer), **by(same)))
    turns = store.reads.trajectory(claim.episode_id).turns
    assert [turn.parent for turn in turns] == [None, 0, 1, 2]
    assert turns[1].step is not None and turns[1].step.compaction == compaction.NO_SHORTER


async def test_an_environment_of_several_roles_says_that_it_has_none(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer
) -> None:
    claim = claim_one()
    ending = await play(claim, context(ScriptedEnv([going(LONG, role="black")]), writing(renderer), **summary()))
    assert ending.stop_reason is StopReason.ENV_FAILED and "environments of one role" in ending.detail


def test_the_answer_as_before_is_the_environment_s_own() -> None:
    step = Step(observation=said("a"))
    assert compaction.as_before(step, compaction.ask(step, "?")).observation == said("a\n\n?")
    other = Step(observation=said("b"))
    assert compaction.as_before(other, compaction.ask(step, "?")) == other


@each_case(
    ("table", "field"),
    [
        ({"how": "nothing"}, "rollout.compaction.how"),
        ({"at": 0.95}, "rollout.compaction.at"),
        ({"at": 1.0}, "rollout.compaction.at"),
        ({"request": ""}, "rollout.compaction.request"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(table: dict[str, Any], field: str) -> None:
    document = {"model": "m", "env": {"id": "e"}, "rollout": {"compaction": table}}
    with pytest.raises(ConfigError) as refused:
        configuration.parse(document)
    assert field in str(refused.value)
