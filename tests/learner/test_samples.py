"""Rows made from groups: what is scored, once, by whom, worth what."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from each_case import each_case

from agentrl.algos.gigpo import GiGPO
from agentrl.algos.grpo import GRPO
from agentrl.algos.importance import Origin
from agentrl.algos.ppo import PPO
from agentrl.engine.router.router import Fleet
from agentrl.errors import EngineUnavailable
from agentrl.learner.data.batch import GroupRows, group_rows
from agentrl.learner.data.shares import weigh
from agentrl.protocols import GenerateRequest
from agentrl.records import Group, GroupState, SamplingParams, Step, StopReason, Trajectory, Turn, VersionSpan
from tests.parts.fake_engine import Failure, FakeEngine

from .making import episode, group_of, random_group, turn


def rows_of(
    group: Group, *, max_lag: int = 100, step_now: int = 0, quorum: int | None = None, **algo: object
) -> GroupRows:
    return group_rows(
        group,
        GRPO.model_validate(algo),
        step_of=lambda version: version,
        step_now=step_now,
        max_lag=max_lag,
        quorum=quorum,
    )


def sibling(outcome: float = 0.0) -> object:
    return episode(9, [turn(0, [1], [2])], outcome)


def test_the_worked_example_of_records() -> None:
    first = turn(0, [10, 11], [12, 13], logprobs=[-0.1, -0.2], reward=1.0)
    second = turn(1, [14], [15], parent=0, logprobs=[-0.3], reward=0.5)
    got = rows_of(group_of([episode(0, [first, second], 1.0), sibling()]))
    row = got.rows[0]
    assert row.token_ids == (10, 11, 12, 13, 14, 15)
    assert row.place_S.tolist() == [2, 3, 5]
    torch.testing.assert_close(row.columns["behaviour"], torch.tensor([-0.1, -0.2, -0.3]))
    # the sibling has outcome 0 and no process reward: 1 + 1.5 for the first turn, 1 + 0.5 for the second
    torch.testing.assert_close(row.columns["advantage"], torch.tensor([2.5, 2.5, 1.5]))
    assert (got.outcomes, got.process, got.successes) == ((1.0, 0.0), (1.5, 0.0), (True, False))


def test_a_turn_is_judged_by_siblings_turns_that_answered_the_same_text() -> None:
    """Also by those of members that are not trained in this step: their states are in the record."""
    one = episode(0, [turn(0, [1], [2]), turn(1, [8], [3], parent=0), turn(2, [9], [4], parent=1)], 1.0)
    two = episode(1, [turn(0, [1], [5]), turn(1, [8], [6], parent=0), turn(2, [7], [4], parent=1)], 0.0)
    algo = GiGPO(step_weight=10.0, step_discount=1.0)
    whole = group_of([one, two])
    apart = replace(whole, trajectories=(one,), record={0: one.record, 1: two.record})
    for group in (whole, apart):
        row = group_rows(group, algo, step_of=lambda version: 0, step_now=0, max_lag=9).rows[0]
        assert row.columns["advantage"].tolist() == [11.0, 11.0, 1.0]


def test_a_fork_is_a_second_row() -> None:
    turns = [turn(0, [1, 2], [3]), turn(1, [9, 3, 8], [4])]  # history was rewritten; the old token 3 is context now
    first, second, _ = rows_of(group_of([episode(0, turns, 1.0), sibling()])).rows
    assert (first.token_ids, first.place_S.tolist()) == ((1, 2, 3), [2])
    assert (second.token_ids, second.place_S.tolist()) == ((9, 3, 8, 4), [3])


def test_turns_that_share_a_parent_score_its_tokens_once() -> None:
    turns = [turn(0, [1], [2, 3]), turn(1, [4], [5], parent=0), turn(2, [6], [7], parent=0)]
    first, second, _ = rows_of(group_of([episode(0, turns, 1.0), sibling()])).rows
    assert (first.token_ids, first.place_S.tolist()) == ((1, 2, 3, 4, 5), [1, 2, 4])
    assert (second.token_ids, second.place_S.tolist()) == ((1, 2, 3, 6, 7), [4])


def test_tokens_of_a_given_policy_are_context() -> None:
    turns = [turn(0, [1], [2]), turn(1, [3], [4], parent=0, learns=False), turn(2, [5], [6], parent=1)]
    row = rows_of(group_of([episode(0, turns, 1.0), sibling()])).rows[0]
    assert (row.token_ids, row.place_S.tolist()) == ((1, 2, 3, 4, 5, 6), [1, 5])


def test_a_masked_turn_stays_in_context_and_out_of_the_loss() -> None:
    masked = turn(1, [3], [4], parent=0, reward=-1.0, masked=True)
    turns = [turn(0, [1], [2]), masked, turn(2, [5], [6], parent=1)]
    row = rows_of(group_of([episode(0, turns, 1.0), sibling()])).rows[0]
    assert (row.token_ids, row.place_S.tolist()) == ((1, 2, 3, 4, 5, 6), [1, 5])
    assert row.columns["advantage"].tolist() == [
        0.0,
        1.0,
    ]  # the masked turn's penalty is still a consequence of the first


def test_a_turns_reward_is_the_environments_and_the_weighted_sum_of_what_sources_said() -> None:
    scored = replace(turn(0, [1], [2], reward=0.25), scores={"prm": 3.0}, score=1.5)
    weights = {"prm": 0.5}
    members = [episode(0, [scored], 1.0), episode(1, [turn(0, [1], [3], reward=0.5)], 1.0)]
    group = group_of([replace(member, weights=weights) for member in members])
    rows = rows_of(group)
    assert [row.columns["advantage"].tolist() for row in rows.rows] == [[1.25], [-1.25]]
    assert rows.process == (1.75, 0.5)
    assert scored.rewards == {"env": 0.25, "prm": 3.0}


def test_roles_are_judged_apart_by_their_own_outcomes_and_rewards() -> None:
    """ann and bob by turns. Outcomes ann 1 and 0, bob -1 and 3; bob's move costs ann 2, which is her turn's before."""

    def game(member: int, ann: float, bob: float, cost: float) -> Trajectory:
        turns = [
            turn(0, [1], [2], role="ann", reward=0.5),
            turn(1, [9], [3], role="bob", reward=0.25, rewards={"ann": cost}),
            turn(2, [4], [5], parent=0, role="ann"),
        ]
        return replace(episode(member, turns, ann), outcomes={"ann": ann, "bob": bob})

    group = group_of([game(0, 1.0, -1.0, -2.0), game(1, 0.0, 3.0, 0.0)])
    first_ann, first_bob, second_ann, second_bob = sorted(
        rows_of(group).rows, key=lambda row: (row.episode_id, row.token_ids[0])
    )
    assert (first_ann.token_ids, first_bob.token_ids) == ((1, 2, 4, 5), (9, 3))
    # ann: outcomes 1 against 0; her first turn's rewards to go are 0.5 - 2 against 0.5, her second's 0 against 0
    assert first_ann.columns["advantage"].tolist() == [1.0 - 2.0, 1.0]
    assert second_ann.columns["advantage"].tolist() == [-1.0 + 2.0, -1.0]
    # bob: outcomes -1 against 3, rewards alike
    assert (first_bob.columns["advantage"].tolist(), second_bob.columns["advantage"].tolist()) == ([-4.0], [4.0])


def test_a_role_that_never_acted_has_no_rows_and_its_sibling_a_baseline() -> None:
    both = [turn(0, [1], [2], role="ann"), turn(1, [9], [3], role="bob")]
    short = [turn(0, [1], [4], role="ann")]
    members = [episode(0, both, 1.0), episode(1, short, 0.5)]
    assert [row.columns["advantage"].tolist() for row in rows_of(group_of(members)).rows] == [[0.5], [0.5], [-0.5]]


def test_a_turn_cut_before_its_first_token_and_one_without_an_answer() -> None:
    cut = turn(1, [4, 4], [], parent=0)
    row = rows_of(group_of([episode(0, [turn(0, [1], [2]), cut], 0.5, stop=StopReason.TIME_LIMIT), sibling()])).rows[0]
    assert row.token_ids == (1, 2)  # nothing sampled follows, so its prompt is not computed
    unanswered = Turn(
        index=0,
        parent=None,
        prompt_ids=(1,),
        token_ids=(2,),
        logprobs=(-1.0,),
        spans=(VersionSpan(0, 0, 1),),
        finish="abort",
        text="",
        step=None,
    )
    got = rows_of(group_of([episode(0, [unanswered], 0.5, stop=StopReason.TIME_LIMIT), sibling()]))
    assert got.rows[0].columns["advantage"].tolist() == [0.5]


def test_a_first_token_without_context_is_refused() -> None:
    with pytest.raises(ValueError, match="without any context"):
        rows_of(group_of([episode(0, [turn(0, [], [2])], 1.0), sibling()]))


def test_law_3_only_the_policys_own_doing_is_scored() -> None:
    """A sandbox failure leaves loss and baseline; a tool timeout, which the policy can cause, stays in both."""
    good = episode(0, [turn(0, [1], [2])], 1.0)
    slow = episode(1, [turn(0, [1], [3])], 0.0, stop=StopReason.TOOL_TIME_LIMIT)
    broken = episode(2, [turn(0, [1], [4], reward=50.0)], 100.0, stop=StopReason.SANDBOX_FAILED)
    unscored = episode(3, [turn(0, [1], [5])], None)
    got = rows_of(group_of([good, slow, broken, unscored]))
    assert [row.episode_id for row in got.rows] == [good.episode_id, slow.episode_id]
    assert [row.columns["advantage"].tolist() for row in got.rows] == [[1.0], [-1.0]]
    assert got.left_out == 2


@each_case("reason", list(StopReason))
def test_a_member_that_any_limit_ended_counts_as_limited(reason: StopReason) -> None:
    got = rows_of(group_of([episode(0, [turn(0, [1], [2])], 1.0, stop=reason), sibling()]))
    assert [member.limited for member in got.members] == [reason.value.endswith("_limit"), False]


@each_case("reason", list(StopReason))
def test_law_3_every_stop_reason(reason: StopReason) -> None:
    got = rows_of(group_of([episode(0, [turn(0, [1], [2])], 1.0, stop=reason), sibling()]))
    assert len(got.rows) == (2 if reason.by_policy else 1)


def over_weights(*versions: int) -> Turn:
    """A turn whose tokens were sampled one by one under these versions."""
    spans = tuple(VersionSpan(version, at, at + 1) for at, version in enumerate(versions))
    tokens = [2 + at for at in range(len(versions))]
    return replace(turn(0, [1], tokens), spans=spans)


@pytest.mark.parametrize(
    ("keeps_kv", "origins"),
    [
        (True, [Origin.PLAIN, Origin.PLAIN, Origin.MIXED_KV, Origin.UNDONE]),
        (False, [Origin.PLAIN, Origin.PLAIN, Origin.PLAIN, Origin.UNDONE]),  # engines computed all anew
    ],
)
def test_tokens_tell_what_besides_their_age_sets_them_apart(keeps_kv: bool, origins: list[Origin]) -> None:
    group = group_of([episode(0, [over_weights(3, 3, 5, 9)], 1.0), episode(1, [turn(0, [1], [2])], 0.0)])
    got = group_rows(
        group,
        GRPO(),
        step_of=lambda version: version,
        step_now=8,
        max_lag=100,
        undone=lambda version: version == 9,
        keeps_kv=keeps_kv,
    )
    assert got.rows[0].columns["origin"].tolist() == origins
    assert got.rows[0].columns["lag"].tolist() == [5, 5, 3, 0]
    assert got.rows[1].columns["origin"].tolist() == [Origin.PLAIN]


def test_ppo_centres_a_roles_turn_on_the_others_turn_of_the_same_number_whoever_began() -> None:
    """By hand: without a critic, an advantage is what the role still earns. Ann begins the first episode."""
    played = [
        [("ann", 1.0), ("bob", 2.0), ("ann", 10.0)],  # to go: 11, 2, 10
        [("bob", 4.0), ("ann", 3.0), ("bob", 6.0), ("ann", 20.0)],  # 10, 23, 6, 20
        [("bob", 9.0), ("ann", 5.0)],
    ]
    expected = [
        [11 - (23 + 5) / 2, 2 - (10 + 9) / 2, 10 - 20],
        [10 - (2 + 9) / 2, 23 - (11 + 5) / 2, 6, 20 - 10],  # nobody else had a second turn as bob
        [9 - (2 + 10) / 2, 5 - (11 + 23) / 2],
    ]
    members = [
        episode(member, [turn(at, [1], [2], role=role, reward=reward) for at, (role, reward) in enumerate(turns)], 0.0)
        for member, turns in enumerate(played)
    ]
    algo = PPO(gae_lambda=1.0, discount=1.0)
    rows = group_rows(group_of(members), algo, step_of=lambda _: 0, step_now=0, max_lag=9).rows
    tokens = {name: torch.cat([row.columns[name] for row in rows]) for name in rows[0].columns}
    tokens |= {"values": torch.zeros(len(tokens["turn"])), "proximal": tokens["behaviour"]}
    by_turn = dict(
        zip(
            zip(tokens["episode"].tolist(), tokens["turn"].tolist(), strict=True),
            algo.advantages(tokens)["advantage"].tolist(),
            strict=True,
        )
    )
    got = [[by_turn[member.episode_id, at] for at in range(len(member.turns))] for member in members]
    assert got == [pytest.approx(line) for line in expected]


async def test_tokens_sampled_at_another_engine_have_keys_of_its_version_alone() -> None:
    """The engine of version 3 breaks after two tokens. The next one computes prompt and both tokens anew under 5."""
    gone = Failure(request=0, error=EngineUnavailable("gone"), after=2)
    engines = FakeEngine(version=3, failures=[gone], url="fake://a"), FakeEngine(version=5, url="fake://b")
    request = GenerateRequest(request_id="r", session="s", token_ids=(1,), sampling=SamplingParams(max_tokens=4))
    sampled = await Fleet(engines).generate(request)
    went_on = replace(turn(0, [1], sampled.token_ids), spans=sampled.spans)
    assert went_on.versions == (3, 3, 5, 5)
    got = rows_of(group_of([episode(0, [went_on], 1.0), sibling()]), step_now=8, max_lag=100)
    assert got.rows[0].columns["origin"].tolist() == [Origin.PLAIN] * 4


def test_keys_are_mixed_again_after_an_update_at_the_second_engine() -> None:
    """Under 3, then 5 by an update; a new request goes on under 5, then under 9 by an update."""
    spans = (VersionSpan(3, 0, 1), VersionSpan(5, 1, 2), VersionSpan(5, 2, 3, recomputed=True), VersionSpan(9, 3, 4))
    one = replace(turn(0, [1], [2, 3, 4, 5]), spans=spans)
    got = rows_of(group_of([episode(0, [one], 1.0), sibling()]), step_now=8, max_lag=100)
    expected = [Origin.PLAIN, Origin.MIXED_KV, Origin.PLAIN, Origin.MIXED_KV]
    assert got.rows[0].columns["origin"].tolist() == expected


def test_law_5_no_token_beyond_the_lag_bound_enters_the_loss() -> None:
    mixed = Turn(
        index=0,
        parent=None,
        prompt_ids=(1,),
        token_ids=(2, 3, 4, 5),
        logprobs=(-1.0, -2.0, -3.0, -4.0),
        spans=(VersionSpan(3, 0, 1), VersionSpan(5, 1, 3), VersionSpan(9, 3, 4)),
        finish="stop",
        text="",
        step=Step(observation=()),
    )
    group = group_of([episode(0, [mixed], 1.0), episode(1, [turn(0, [1], [2], version=1)], 0.0)])
    got = rows_of(group, step_now=8, max_lag=3)
    assert got.stale == {5: 1, 7: 1}  # version 3 is 5 steps old, the sibling's version 1 is 7
    (row,) = got.rows
    assert row.columns["lag"].tolist() == [3, 3, 0]  # a version newer than the learner's step has lag 0
    assert row.place_S.tolist() == [2, 3, 4]
    assert row.columns["behaviour"].tolist() == [-2.0, -3.0, -4.0]
    assert row.columns["advantage"].tolist() == [1.0] * 3  # the stale sibling still judges


def test_process_rewards_can_be_switched_off() -> None:
    members = [episode(0, [turn(0, [1], [2], reward=5.0)], 1.0), sibling()]
    assert rows_of(group_of(members), process_weight=0.0).rows[0].columns["advantage"].tolist() == [1.0]


def test_weights_are_shares_of_the_whole_update() -> None:
    two = [turn(0, [1], [2, 3]), turn(1, [9], [4], parent=None)]  # one episode, two rows
    group = group_of([episode(0, two, 1.0), episode(1, [turn(0, [1], [2])], 0.0)])
    (rows,) = weigh([[rows_of(group, normalise="sequence")]])[0]
    assert [len(row.columns["weight"]) for row in rows] == [2, 1, 1]
    assert torch.cat([row.columns["weight"] for row in rows]).tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    (rows,) = weigh([[rows_of(group)]])[0]
    assert torch.cat([row.columns["weight"] for row in rows]).tolist() == pytest.approx([0.25] * 4)
    assert weigh([[rows_of(group_of([]))]]) == [[[]]]


def test_what_ended_by_its_length_is_told_of_the_turns_that_learn() -> None:
    cut = replace(turn(1, [4, 4], [5], parent=0), finish="length")
    given = replace(turn(2, [6], [7], parent=1, learns=False), finish="length")
    failed = episode(1, [replace(turn(0, [1], [2]), finish="length")], None, stop=StopReason.ENV_FAILED)
    assert rows_of(group_of([episode(0, [turn(0, [1], [2]), cut, given], 0.5), failed])).cut == (False, True)


def late_group(*, size: int, record: list[Trajectory], taken: list[Trajectory], **changes: object) -> Group:
    """`taken` members of a group that recorded `record`."""
    kept = {one.member: one.record for one in record}
    return replace(group_of(taken), size=size, record=kept, **changes)  # pyright: ignore[reportArgumentType]


def test_a_late_member_is_judged_turn_by_turn_against_what_was_recorded() -> None:
    """Recorded: outcomes 1 and 0, rewards 0.5, 0.25 and 0.1 (it stopped). Late: outcome 2, rewards 0, 1, 3."""
    first = episode(0, [turn(0, [1], [2], reward=0.5), turn(1, [3], [4], parent=0, reward=0.25)], 1.0)
    second = episode(1, [turn(0, [1], [2], reward=0.1)], 0.0)
    turns = [
        turn(index, [1], [5 + index], parent=index - 1 if index else None, reward=float(r))
        for index, r in enumerate([0, 1, 3])
    ]
    late = episode(2, turns, 2.0)
    (row,) = rows_of(late_group(size=3, record=[first, second], taken=[late])).rows
    outcome = 2 - (1 + 0) / 2
    to_go = [4 - (0.75 + 0.1) / 2, 4 - (0.25 + 0) / 2, 3 - 0]  # who stopped has nothing to go
    assert row.columns["advantage"].tolist() == pytest.approx([outcome + each for each in to_go])


def test_recorded_members_are_judged_alike_with_and_without_a_late_one() -> None:
    members = random_group(7, seed=7, members=5).trajectories
    closed = late_group(size=5, record=list(members[:4]), taken=list(members[:4]))
    with_late = late_group(size=5, record=list(members[:4]), taken=list(members))
    alone = rows_of(closed, max_lag=100).rows
    beside = rows_of(with_late, max_lag=100).rows[: len(alone)]
    assert [row.columns["advantage"].tolist() for row in alone] == [row.columns["advantage"].tolist() for row in beside]
    assert rows_of(with_late).late == 1


@each_case("waits", [0, 1])
@each_case("rewarded", ["quick", "slow"])
def test_with_a_quorum_the_gradient_is_exact_also_where_slow_members_earn_more(rewarded: str, waits: int) -> None:
    """Four members each choose with probability p to be slow. The group closes when three have ended, or (`waits`) when
    one more has. Over all 16 courses the expected gradient is that of the expected outcome, 4 p (1 - p) up to its sign:
    nobody's baseline may depend on whether he himself was slow."""
    size, quorum, p = 4, 3, 0.3
    total = 0.0
    for slow in itertools.product([False, True], repeat=size):
        members = [episode(at, [turn(0, [1], [2])], float(one == (rewarded == "slow"))) for at, one in enumerate(slow)]
        ended = sorted(members, key=lambda one: (slow[one.member], one.member))
        group = late_group(size=size, record=ended[: quorum + waits], taken=members)
        chance = math.prod(p if one else 1 - p for one in slow)
        for one, row in zip(slow, rows_of(group, quorum=quorum).rows, strict=True):
            total += chance * float(row.columns["advantage"][0]) * ((1 - p) if one else -p)
    assert total == pytest.approx(size * p * (1 - p) * (1 if rewarded == "slow" else -1))


@each_case("algo", [{}, {"scale": "std"}, {"baseline": "group_mean"}, {"baseline": "none"}])
@each_case("seed", range(3))
def test_a_full_group_gives_the_same_rows_bit_for_bit_with_its_record(seed: int, algo: dict[str, str]) -> None:
    members = [*random_group(7, seed=seed, members=4).trajectories]
    members[2] = replace(members[2], stop_reason=StopReason.ENGINE_FAILED)
    scored = [one for one in members if one.scored]
    without = rows_of(group_of(members), **algo)
    recorded = rows_of(late_group(size=4, record=scored, taken=scored, left_out=(members[2],)), **algo)
    assert len(without.rows) == len(recorded.rows)
    for one, other in zip(without.rows, recorded.rows, strict=True):
        assert torch.equal(one.place_S, other.place_S)
        assert one.columns.keys() == other.columns.keys()
        for name, column in one.columns.items():
            assert torch.equal(column, other.columns[name]), name
    assert sorted(without.members, key=repr) == sorted(recorded.members, key=repr)
    assert replace(without, rows=(), members=()) == replace(recorded, rows=(), members=())


@each_case(
    ("state", "taken_step", "before"),
    [
        (GroupState.TAKEN, None, False),
        (GroupState.TAKEN, 6, False),
        (GroupState.TAKEN, 5, True),
        (GroupState.EXPIRED, None, True),
    ],
)
def test_a_group_that_an_earlier_step_took_or_that_expired_counts_once(
    state: GroupState, taken_step: int | None, before: bool
) -> None:
    member = episode(0, [turn(0, [1], [2], version=5)], 1.0)
    group = replace(late_group(size=1, record=[member], taken=[member]), state=state, taken_step=taken_step)
    assert rows_of(group, step_now=5, max_lag=3).taken_before is before


def test_law_5_what_leaves_stale_is_counted_by_its_lag_and_still_tells_its_outcome() -> None:
    young, old = episode(0, [turn(0, [1], [2], version=8)], 1.0), episode(1, [turn(0, [1], [3, 4], version=2)], 0.0)
    group = late_group(size=2, record=[young, old], taken=[young], left_out=(old,))
    got = rows_of(group, step_now=8, max_lag=3)
    assert (got.stale, got.members_stale, got.outcomes) == ({6: 2}, 1, (1.0, 0.0))
    assert got.rows[0].columns["advantage"].tolist() == [1.0], "it judges, though nothing of it is trained"
    assert got.left_out == 0


def test_what_is_left_out_has_no_share_of_the_updates_loss() -> None:
    """Two tokens of a member are too old; the weights of the one left, and of its sibling's three, sum to 1."""
    mixed = replace(turn(0, [1], [2, 3, 4]), spans=(VersionSpan(1, 0, 2), VersionSpan(8, 2, 3)))
    sibling_of = episode(1, [turn(0, [1], [5, 6, 7], version=8)], 0.0)
    group = group_of([episode(0, [mixed], 1.0), sibling_of])
    (weighed,) = weigh([[rows_of(group, step_now=8, max_lag=1)]])[0]
    assert torch.cat([row.columns["weight"] for row in weighed]).tolist() == [0.25] * 4
    (weighed,) = weigh([[rows_of(group, step_now=8, max_lag=1, normalise="sequence")]])[0]
    assert torch.cat([row.columns["weight"] for row in weighed]).tolist() == pytest.approx([0.5, 1 / 6, 1 / 6, 1 / 6])


def with_sources(member: int, env: float, prm: float, outcome: float) -> Trajectory:
    scored = replace(turn(0, [1], [2], reward=env), scores={"prm": prm}, score=0.5 * prm)
    return replace(episode(member, [scored], outcome), weights={"prm": 0.5})


def test_outcome_and_sources_may_each_be_scaled_by_their_own_spread() -> None:
    """By hand: every stream is 0, 1 and 2 in its own units, so that each says -1, 0 and 1, times its weight."""
    members = [with_sources(at, 100.0 * at, 0.01 * at, 10.0 * at) for at in range(3)]
    rows = rows_of(group_of(members), baseline="group_mean", scale="std_by_source", process_weight=2.0).rows
    got = [row.columns["advantage"].item() for row in rows]
    expected = 10 / (10 + 1e-4) + 2.0 * (100 / (100 + 1e-4) + 0.5 * 0.01 / (0.01 + 1e-4))
    assert got == pytest.approx([-expected, 0.0, expected], abs=1e-5)


def test_a_late_member_is_scaled_by_the_streams_of_the_record() -> None:
    members = [with_sources(at, 1.0 * at, 2.0 * at, 0.0) for at in range(3)]
    late = with_sources(3, 9.0, 0.0, 0.0)
    group = replace(group_of([late]), size=4, record={one.member: one.record for one in members})
    (row,) = rows_of(group, scale="leave_one_out_by_source").rows
    expected = (9 - 1) / (1 + 1e-4) + 0.5 * (0 - 2) / (2 + 1e-4)
    assert row.columns["advantage"].item() == pytest.approx(expected, abs=1e-5)


def test_a_role_has_the_same_number_whoever_begins() -> None:
    def of(first: str, second: str, member: int) -> Trajectory:
        turns = [turn(0, [1], [2], role=first), turn(1, [3], [4], parent=0, role=second)]
        return episode(member, turns, 1.0)

    group = group_of([of("white", "black", 0), of("black", "white", 1)])
    rows = group_rows(group, PPO(), step_of=lambda _: 0, step_now=0, max_lag=9).rows
    numbers = [row.columns["role"].tolist() for row in rows]
    assert numbers[0] == numbers[1][::-1]
    assert len(set(numbers[0])) == 2


def test_what_each_reward_function_said_is_summed_over_an_episodes_turns() -> None:
    """By hand: 1 and 2 in the first episode, 4 in the second; `form` spoke in the second alone; a text and a NaN do not
    count."""
    asked = turn(0, [1], [2], info={"scores": {"right": 1, "note": "x"}})
    first = episode(0, [asked, turn(1, [3], [4], parent=0, info={"scores": {"right": 2.0}})], 1.0)
    second = episode(1, [turn(0, [1], [5], info={"scores": {"right": 4, "form": 0.5, "bad": math.nan}})], 0.0)
    assert rows_of(group_of([first, second])).scores == {"form": (0.5,), "right": (3.0, 4.0)}
