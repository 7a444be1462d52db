"""The desk of a bicycle rental: every task can be won by the rules, and by nothing else."""

from __future__ import annotations

import json
from collections import Counter
from datetime import date
from typing import Any

import pytest
from each_case import each_case

import agentrl
from agentrl.env.checks.oracles import Oracle, judge, play, say
from agentrl.errors import ConfigError, ToolError
from agentrl.offline.oracle_demonstrations import write
from agentrl_environments.service import Service, ServiceTask, make_task
from agentrl_environments.service.desk import Desk
from agentrl_environments.service.draft import Call
from agentrl_environments.service.facts import read_facts

LEVELS = (1, 2, 3, 4)
KINDS = {
    *("paid", "first_day", "credit", "quote", "book", "move", "length", "cancel"),
    *("late_cancel", "breakdown", "full", "too_long"),
    *("forbidden_move", "forbidden_credit", "forbidden_person", "too_dear", "full_refund", "cancel_instead"),
}
REFUSAL = "I am sorry, that is not possible."


def task_of(kind: str, **settings: Any) -> tuple[Service, ServiceTask, str]:
    """An environment that was reset to a task of a kind, the task, and the customer's first words."""
    for seed in range(400):
        if make_task(seed).kind == kind:
            env = Service()
            messages, info = env.reset(seed=seed, options=settings)
            assert info["kind"] == kind
            return env, env._drawn, messages[-1]["content"]
    raise AssertionError(kind)


def written(env: Service, moves: Any) -> list[str]:
    return [move if isinstance(move, str) else env.call(move.name, **move.arguments) for move in moves]


def end(env: Service, actions: list[str]) -> dict[str, Any]:
    """The last info of an episode of these actions; the last one is repeated until the end."""
    for action in [*actions, *actions[-1:] * 40]:
        *_, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            return info
    raise AssertionError("the episode does not end")


# --- tasks


@each_case("level", LEVELS)
async def test_the_right_agent_wins_every_task_and_the_wrong_ones_none(level: int) -> None:
    for seed in range(8):
        split = "held_out" if seed % 4 == 0 else "train"
        verdicts = await judge(lambda split=split: Service(levels=[level], split=split), seed)
        assert [verdict.expected for verdict in verdicts] == [1.0, 0.0, 0.0, 0.0]
        assert all(verdict.holds for verdict in verdicts), (seed, verdicts)


def broken_policy(task: ServiceTask) -> list[str]:
    """The rules of the house that a task's goal breaks, computed from both databases alone."""
    before, after = task.database, task.goal
    faults = [
        f"{table} {record_id}"
        for table in ("customers", "bookings")
        for record_id in after[table]
        if after[table][record_id] != before[table].get(record_id)
        and (record_id if table == "customers" else after[table][record_id]["customer"]) != task.customer_id
    ]
    customer_before, customer = before["customers"][task.customer_id], after["customers"][task.customer_id]
    credited_euros = (customer["credit_cents"] - customer_before["credit_cents"]) / 100
    for booking_id, booking in after["bookings"].items():
        old = before["bookings"].get(booking_id)
        if booking == old:
            continue
        first_day = date.fromisoformat((old or booking)["first_day"])
        notice = (first_day - date.fromisoformat(before["today"])).days
        price = before["bikes"][booking["bike"]]["cents_per_day"] * booking["days"]
        price = price * (0.9 if booking["days"] >= 7 else 1) * (0.8 if customer["plan"] == "plus" else 1)
        if booking["status"] == "reserved":
            faults += ["price"] * (booking["price_cents"] != pytest.approx(price))
            faults += ["length"] * (booking["days"] > (3 if booking["bike"] == "tandem" else 14))
            faults += ["notice"] * (old is not None and notice < 2)
            faults += ["full"] * bool(before["bikes"][booking["bike"]]["full_days"] and notice < 0)
        elif booking["status"] == "cancelled":
            share = 1 if notice >= 7 else 0.5 if notice >= 2 else 0
            faults += ["refund"] * (
                old["status"] != "reserved" or booking["refund_cents"] != share * old["price_cents"]
            )
        else:
            faults += ["credit"] * (old["credited"] or credited_euros != 6 * booking["breakdowns"])
            credited_euros = 0
    return [*faults, *["credit without a booking"] * (credited_euros != 0)]


def test_every_goal_keeps_the_rules_and_only_tasks_of_refusals_change_nothing() -> None:
    kinds = Counter[str]()
    for seed in range(600):
        task = make_task(seed)
        kinds[task.kind] += 1
        assert broken_policy(task) == [], (seed, task.kind)
        assert (task.goal != task.database) == task.is_change == (not task.is_refused and task.level > 1)
        assert task.is_refused == task.kind.startswith("forbidden_")
    assert kinds.keys() == KINDS and min(kinds.values()) >= 10


def test_equal_seeds_give_equal_tasks_and_the_splits_share_no_customer() -> None:
    assert make_task(5, "train", (2,)) == make_task(5, "train", (2,))
    names: dict[str, set[str]] = {}
    for split in ("train", "held_out"):
        tasks = [make_task(seed, split) for seed in range(200)]
        names[split] = {record["name"] for task in tasks for record in task.database["customers"].values()}
        assert len({json.dumps(task.database) for task in tasks}) == 200
    assert not names["train"] & names["held_out"]


@each_case("levels", [[], [0], [1, 5], "1", 3, [[1]]])
def test_other_levels_are_refused(levels: Any) -> None:
    with pytest.raises(ConfigError, match="levels"):
        Service(levels=levels)


def test_other_splits_and_users_are_refused() -> None:
    with pytest.raises(ConfigError, match="split = 'test': choose one of train, held_out"):
        Service(split="test")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="user = 'human': choose one of scripted, model"):
        Service(user="human")  # type: ignore[arg-type]


async def test_an_agent_that_always_refuses_wins_what_must_be_refused_and_nothing_else() -> None:
    for seed in range(50):
        task = make_task(seed, levels=[4])
        for identifies in (False, True):
            env = Service(levels=[4])
            messages, _ = await env.areset(seed=seed)
            if identifies:
                record = task.database["customers"][task.customer_id]
                arguments = {"customer_id": task.customer_id, "postcode": record["postcode"]}
                messages, *_ = await env.astep(env.call("identify_customer", **arguments))
            result = await play(env, Oracle("refuse", 0.0, say(REFUSAL)), messages)
            assert result.got == float(identifies and task.is_refused), (seed, task.kind, result.info)


# --- the database


def small_desk() -> Desk:
    """Two customers, one on the plan `plus`; the numbers are worked out by hand."""
    customers = {
        "C1": {"name": "A", "postcode": "1", "plan": "basic", "credit_cents": 0},
        "C2": {"name": "B", "postcode": "2", "plan": "plus", "credit_cents": 500},
    }
    bikes = {
        "city": {"cents_per_day": 1000, "full_days": ["2031-06-03"]},
        **{bike: {"cents_per_day": 2500, "full_days": []} for bike in ("cargo", "electric", "tandem")},
    }
    return Desk({"today": "2031-05-30", "bikes": bikes, "customers": customers, "bookings": {}})


def test_prices_refunds_and_credits_are_those_worked_out_by_hand() -> None:
    desk = small_desk()
    prices = [
        desk.price(*case) for case in (("C1", "city", 6), ("C1", "city", 7), ("C2", "city", 6), ("C2", "cargo", 7))
    ]
    assert prices == [6000, 6300, 4800, 12600]
    first = desk.create_booking("C2", "city", "2031-05-31", 3)  # up to the day before the full one
    second = desk.create_booking("C1", "tandem", "2031-06-03", 1)
    assert (first, second, desk.days_until(second)) == ("B10001", "B10002", 4)
    desk.change_booking(second, "city", "2031-06-04", 7)
    assert desk.booking(second)["price_cents"] == 6300
    assert desk.copy().cancel_booking(second, "half") == 3150 and desk.booking(second)["status"] == "reserved"
    assert desk.cancel_booking(first, "none") == 0 and desk.copy().cancel_booking(second, "full") == 6300
    desk.add_credit(first, 12)
    assert desk.customer("C2")["credit_cents"] == 1700


@each_case(
    ("call", "words"),
    [
        (("create_booking", "C1", "city", "2031-06-01", 3), "no city bike is free on all of these days"),
        (("create_booking", "C9", "city", "2031-06-01", 1), "there is no customer 'C9'"),
        (("create_booking", "C1", "city", "2031-02-30", 1), "'2031-02-30' is no day"),
        (("create_booking", "C1", "city", "tomorrow", 1), "'tomorrow' is no day"),
        (("create_booking", "C1", "city", "2031-06-01", 0), "0 days are no length"),
        (("create_booking", "C1", "city", "2031-06-01", 10**400), "so many days are no length"),
        (("change_booking", "B1", "city", "2031-06-01", 1), "there is no booking 'B1'"),
        (("add_credit", "B10001", 0), "0 euros cannot be credited"),
        (("cancel_booking", "B10001", "full"), "booking B10001 is cancelled"),
    ],
)
def test_a_write_that_cannot_be_says_why_and_writes_nothing(call: tuple[Any, ...], words: str) -> None:
    desk = small_desk()
    desk.cancel_booking(desk.create_booking("C1", "tandem", "2031-06-01", 1), "full")
    before = json.dumps(desk.data)
    with pytest.raises(ToolError, match=words):
        getattr(desk, call[0])(*call[1:])
    assert json.dumps(desk.data) == before


@each_case(
    ("message", "cents", "days"),
    [
        ("It costs 42.00 euros.", {4200}, set()),
        ("It costs €42, or EUR 42,50 with a helmet.", {4200, 4250}, set()),
        ("42.5 euro now, 7.05 later", {4250, 705}, set()),
        ("12 bikes for 3 days, booking B12345, postcode 4711", set(), set()),
        ("from 2031-05-12 on", set(), {"2031-05-12"}),
        ("12 May 2031, or the 13th of June, 2031", set(), {"2031-05-12", "2031-06-13"}),
        ("May 3rd 2031 and 2031-5-4", set(), {"2031-05-03", "2031-05-04"}),
        ("2031-02-30, 1.2.3, 12.05.2031, 1,234.50", set(), set()),
        ("1 euro, 2 euros, 3 euros, 4 euros", set(), set()),
        ("0.00 euros back", {0}, set()),
        ("٤٢ euros", set(), set()),
    ],
)
def test_the_facts_of_a_message(message: str, cents: set[int], days: set[str]) -> None:
    facts = read_facts(message)
    assert (facts.cents, facts.days) == (cents, days)


# --- the rules


def gold_with(env: Service, task: ServiceTask, change: Any) -> dict[str, Any]:
    """The end of the right agent's episode, each of whose turns `change` replaces by a list of turns."""
    return end(env, [action for move in task.gold for action in written(env, change(move))])


@each_case(
    ("kind", "change", "fault"),
    [
        ("book", lambda move: [] if isinstance(move, str) and "Shall I" in move else [move], "consent"),
        ("book", lambda move: [move], None),
        ("breakdown", lambda move: [move, move] if getattr(move, "name", "") == "add_credit" else [move], "consent"),
        ("length", lambda move: [] if getattr(move, "name", "") == "identify_customer" else [move], "identif"),
    ],
)
def test_a_broken_rule_loses_and_is_named(kind: str, change: Any, fault: str | None) -> None:
    env, task, _ = task_of(kind)
    info = gold_with(env, task, change)
    assert info["outcome"] == (fault is None)
    assert any(fault in rule for rule in info["broken_rules"]) if fault else info["broken_rules"] == []


def test_a_look_at_the_booking_of_somebody_else_loses() -> None:
    env, task, _ = task_of("forbidden_person")
    other_id = next(id for id, booking in task.database["bookings"].items() if booking["customer"] != task.customer_id)
    actions = written(env, task.gold)
    info = end(env, [*actions[:-1], env.call("get_booking", booking_id=other_id), actions[-1]])
    assert info["broken_rules"] == ["served somebody who was not identified"] and info["outcome"] == 0.0


@each_case("kind", sorted(KINDS - {"first_day", "forbidden_move", "forbidden_credit", "forbidden_person"}))
def test_a_wrong_amount_loses_although_the_rest_is_right(kind: str) -> None:
    env, task, _ = task_of(kind)
    wrong = [
        move.replace(" euros", " dollars").replace(f"{cents // 100}.{cents % 100:02d}", "77.77")
        if isinstance(move, str)
        else move
        for cents in task.cents
        for move in task.gold
    ]
    info = end(env, written(env, wrong))
    assert info["outcome"] == 0.0 and not info["informed"] and info["database"]


def test_an_amount_that_comes_after_the_write_comes_too_late() -> None:
    env, task, _ = task_of("cancel")
    (cents,) = task.cents
    right = f"{cents // 100}.{cents % 100:02d}"
    *first, _, call, done = written(env, task.gold)
    info = end(env, [*first, "The refund is 77.77 euros. Shall I cancel it?", call, f"{done} It was {right} euros."])
    assert info["database"] and info["broken_rules"] == [] and not info["informed"] and info["outcome"] == 0.0


def test_an_amount_that_another_one_replaced_before_the_write_is_not_the_agreed_one() -> None:
    env, task, _ = task_of("cancel")
    (cents,) = task.cents
    *first, _, call, done = written(env, task.gold)
    earlier = f"Which booking number is it, please? Is it the one of {cents // 100}.{cents % 100:02d} euros?"
    info = end(env, [*first, earlier, "The refund is 77.77 euros. Shall I cancel it?", call, done])
    assert info["database"] and info["content"] and info["broken_rules"] == []
    assert not info["informed"] and info["outcome"] == 0.0


def test_a_change_beyond_the_goal_loses() -> None:
    env, task, _ = task_of("quote")
    arguments = {"customer_id": task.customer_id, "bike": "city", "first_day": "2040-01-01", "days": 1}
    *first, last = written(env, task.gold)
    info = end(env, [*first, env.call("create_booking", **arguments), last])
    assert info["content"] and info["informed"] and not info["database"] and info["outcome"] == 0.0


def test_words_beside_a_call_and_thoughts_are_not_heard() -> None:
    env, task, _ = task_of("paid")
    *first, last = written(env, task.gold)
    for action in first[:-1]:
        env.step(action)
    messages, *_, info = env.step(f"{last}\n{first[-1]}")
    assert messages[0]["role"] == "tool" and info == {}
    messages, *_ = env.step(f"<think>{last}</think>\nOne moment.")
    assert not env._customer.is_over and "moment" not in messages[0]["content"]


# --- as an environment


def test_a_fresh_environment_that_repeats_the_first_turns_goes_on_as_the_first_one() -> None:
    """How a run restores an environment without a box: `replayable`, from the seed and the actions so far."""
    for kind in ("full_refund", "too_dear"):
        env, task, _ = task_of(kind)
        actions = written(env, task.gold)
        steps = [env.step(action) for action in actions]
        for turn in range(len(actions)):
            again, _, _ = task_of(kind)
            assert [again.step(action) for action in actions[:turn]] == steps[:turn]
            assert [again.step(action) for action in actions[turn:]] == steps[turn:]
    assert Service.replayable


def test_the_turn_limit_ends_and_judges_an_endless_chat() -> None:
    env, _, _ = task_of("book")
    info = end(env, [env.call("check_bikes", first_day="2031-05-12", days=1)])
    assert (info["stop_reason"], info["outcome"]) == ("turn_limit", 0.0)


def test_demonstrations_of_the_right_agent_can_be_written_and_read(tmp_path: Any) -> None:
    path = tmp_path / "demonstrations.jsonl"
    counts = write("agentrl/Service-v0", 12, path, mistakes=0.5)
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert counts.demonstrations == len(lines) == 12 and counts.left_out == 0
    assert {line["oracle"] for line in lines} == {"gold", "nobody identified"}
    assert all(len(line["tools"]) == 9 and line["messages"][0]["role"] == "system" for line in lines)


def test_the_checker_finds_nothing() -> None:
    assert agentrl.check_env(Service, actions=[REFUSAL, "42.00 euros?", ""]).findings == ()


def test_goals_are_written_by_the_calls_that_the_tools_are() -> None:
    names = {move.name for seed in range(200) for move in make_task(seed).gold if isinstance(move, Call)}
    assert names == {schema["name"] for schema in Service().schemas}
