"""Do the tasks reward what was done? What a journal alone shows of it; `agentrl validate --out` plays them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product

from agentrl.run.health.advice import Advice, middle, percent, share
from agentrl.run.health.run_facts import EpisodeFacts, RunFacts, TaskFacts

_WRITES = re.compile(r"write|replace|edit|patch|insert|create", re.IGNORECASE)
_ACTS = re.compile(rf"{_WRITES.pattern}|shell|bash|terminal|exec|command|run|python", re.IGNORECASE)
_IDLE_WINS, _IDLE_SHARE = 3, 0.1  # episodes that win without a write, and their share of those that were read and won
_TEXT = 16  # characters: a shorter text is an action, as in a game, whose world may be random
_DIFFER = 3  # groups in which equal actions got different outcomes
_PAIRS, _MIXED_GROUPS = 12, 5  # winners beside losers of one task, and tasks, whose seconds are compared
_SLOWER, _RATIO = 0.95, 2.0  # of the pairs: the loser was graded for longer; and how many times as long
_MEMBERS, _EACH = 12, 3  # members and groups after which a task that never varied is named
_NEVER = 0.5  # of the tasks that were played so often
_SHOWN = 5  # ids of tasks


def wins_without_work(facts: RunFacts) -> Advice | None:
    """Episodes win in an environment of files, and wrote nothing."""
    won = [each for each in facts.episodes if each.turns and each.success and any(map(_WRITES.search, each.tools))]
    idle = [each for each in won if not any(name in each.text for name in each.tools if _ACTS.search(name))]
    groups = {each.group for each in idle}
    if len(idle) < _IDLE_WINS or len(groups) < 2 or share(len(idle), len(won)) < _IDLE_SHARE:
        return None
    return Advice(
        name="wins_without_work",
        cause="episodes win that never called a tool that changes anything: their tasks reward doing nothing",
        evidence=f"{len(idle)} of {len(won)} episodes that were read and won, of {len(groups)} groups, such as "
        f"episode {idle[0].id}",
        commands=(f"agentrl validate {facts.config.env.id} --out checked", f"agentrl view {facts.path}"),
    )


def equal_actions_differ(facts: RunFacts) -> Advice | None:
    """Members of a group wrote the same, read the same, and got different outcomes."""
    pairs = [pair for members in facts.mixed if (pair := next(_equal_pairs(members), None)) is not None]
    if len(pairs) < _DIFFER:
        return None
    one, other = pairs[0]
    return Advice(
        name="equal_actions_differ",
        cause="equal actions on one task get different outcomes: the grader is flaky, or follows its machine",
        evidence=f"in {len(pairs)} of {len(facts.mixed)} groups that were read, such as episodes {one.id} "
        f"({one.outcome:g}) and {other.id} ({other.outcome:g})",
        commands=(f"agentrl validate {facts.config.env.id} --out checked --repeat 10", f"agentrl view {facts.path}"),
    )


def _equal_pairs(members: Sequence[EpisodeFacts]) -> Iterator[tuple[EpisodeFacts, EpisodeFacts]]:
    for at, one in enumerate(members):
        for other in members[at + 1 :]:
            read = [[turn.answer for turn in each.turns[:-1]] for each in (one, other)]  # the last one holds the grade
            same = one.text == other.text and read[0] == read[1] and len(one.text) >= _TEXT
            if same and one.outcome != other.outcome:
                yield one, other


def outcome_follows_seconds(facts: RunFacts) -> Advice | None:
    """Members of a group lose whose last action was graded for longer."""
    pairs = [
        (winner.graded_s, loser.graded_s)
        for members in facts.mixed
        for winner, loser in product(members, members)
        if (winner.outcome or 0.0) > (loser.outcome or 0.0)
    ]
    slower = sum(lost_s > won_s for won_s, lost_s in pairs)
    won_s, lost_s = middle(pair[0] for pair in pairs), middle(pair[1] for pair in pairs)
    few = len(pairs) < _PAIRS or len(facts.mixed) < _MIXED_GROUPS
    # Wrong work may be slow by itself. So nearly every pair has to agree, and the seconds have to be far apart.
    if few or slower < _SLOWER * len(pairs) or lost_s < _RATIO * won_s:
        return None
    return Advice(
        name="outcome_follows_seconds",
        cause="of one task those members lose that are graded for longer: a late grader may score its machine",
        evidence=f"{slower} of {len(pairs)} pairs of {len(facts.mixed)} groups; from the last action to the end "
        f"{won_s:.2g} s where an episode won, {lost_s:.2g} s where it lost",
        commands=(f"agentrl validate {facts.config.env.id} --out checked --load 5", f"agentrl view {facts.path}"),
    )


def tasks_never_vary(facts: RunFacts) -> Advice | None:
    """Tasks that are drawn again and again, and whose members always get one outcome."""
    often = {
        id: task for id, task in facts.tasks.items() if len(task.outcomes) >= _MEMBERS and len(task.groups) >= _EACH
    }
    never = {id: task for id, task in often.items() if len({*task.outcomes}) == 1}
    if len(never) < 2 or share(len(never), len(often)) < _NEVER:
        return None
    least = min(len(task.outcomes) for task in never.values())
    lost, won = _split(never)
    return Advice(
        name="tasks_never_vary",
        cause="tasks are drawn again and again although their members always get the same outcome: they teach nothing",
        evidence=f"{len(never)} of {len(often)} tasks ({percent(len(never), len(often))}) with {least} members and "
        f"more: {len(lost)} never won, {len(won)} always",
        settings=(f"rollout.skip_tasks={list(never)[:_SHOWN]}".replace("'", '"'),),
        commands=(f"agentrl validate {facts.config.env.id} --out checked",),
    )


def _split(tasks: dict[str, TaskFacts]) -> tuple[list[str], list[str]]:
    """The tasks whose one outcome is nothing, and the others."""
    lost = [id for id, task in tasks.items() if task.outcomes[0] <= 0]
    return lost, [id for id in tasks if id not in lost]
