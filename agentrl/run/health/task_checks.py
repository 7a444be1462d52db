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
    won_episodes = [
        episode
        for episode in facts.episodes
        if episode.turns and episode.success and any(map(_WRITES.search, episode.tools))
    ]
    idle_episodes = [
        episode
        for episode in won_episodes
        if not any(tool_name in episode.text for tool_name in episode.tools if _ACTS.search(tool_name))
    ]
    idle_groups = {episode.group for episode in idle_episodes}
    if (
        len(idle_episodes) < _IDLE_WINS
        or len(idle_groups) < 2
        or share(len(idle_episodes), len(won_episodes)) < _IDLE_SHARE
    ):
        return None
    return Advice(
        name="wins_without_work",
        cause="episodes win that never called a tool that changes anything: their tasks reward doing nothing",
        evidence=f"{len(idle_episodes)} of {len(won_episodes)} episodes that were read and won, of {len(idle_groups)} "
        f"groups, such as episode {idle_episodes[0].id}",
        commands=(f"agentrl validate {facts.config.env.id} --out checked", f"agentrl view {facts.path}"),
    )


def equal_actions_differ(facts: RunFacts) -> Advice | None:
    """Members of a group wrote the same, read the same, and got different outcomes."""
    equal_pairs = [
        equal_pair for members in facts.mixed if (equal_pair := next(_equal_pairs(members), None)) is not None
    ]
    if len(equal_pairs) < _DIFFER:
        return None
    first_episode, second_episode = equal_pairs[0]
    return Advice(
        name="equal_actions_differ",
        cause="equal actions on one task get different outcomes: the grader is flaky, or follows its machine",
        evidence=f"in {len(equal_pairs)} of {len(facts.mixed)} groups that were read, such as episodes "
        f"{first_episode.id} ({first_episode.outcome:g}) and {second_episode.id} ({second_episode.outcome:g})",
        commands=(f"agentrl validate {facts.config.env.id} --out checked --repeat 10", f"agentrl view {facts.path}"),
    )


def _equal_pairs(members: Sequence[EpisodeFacts]) -> Iterator[tuple[EpisodeFacts, EpisodeFacts]]:
    for member_index, first_member in enumerate(members):
        for second_member in members[member_index + 1 :]:
            # The last answer holds the grade.
            read_answers = [
                [read_turn.answer for read_turn in paired_member.turns[:-1]]
                for paired_member in (first_member, second_member)
            ]
            is_same = (
                first_member.text == second_member.text
                and read_answers[0] == read_answers[1]
                and len(first_member.text) >= _TEXT
            )
            if is_same and first_member.outcome != second_member.outcome:
                yield first_member, second_member


def outcome_follows_seconds(facts: RunFacts) -> Advice | None:
    """Members of a group lose whose last action was graded for longer."""
    graded_pairs = [
        (winner.graded_s, loser.graded_s)
        for members in facts.mixed
        for winner, loser in product(members, members)
        if (winner.outcome or 0.0) > (loser.outcome or 0.0)
    ]
    slower_count = sum(lost_seconds > won_seconds for won_seconds, lost_seconds in graded_pairs)
    won_seconds = middle(graded_pair[0] for graded_pair in graded_pairs)
    lost_seconds = middle(graded_pair[1] for graded_pair in graded_pairs)
    has_few_pairs = len(graded_pairs) < _PAIRS or len(facts.mixed) < _MIXED_GROUPS
    # Wrong work may be slow by itself. So nearly every pair has to agree, and the seconds have to be far apart.
    if has_few_pairs or slower_count < _SLOWER * len(graded_pairs) or lost_seconds < _RATIO * won_seconds:
        return None
    return Advice(
        name="outcome_follows_seconds",
        cause="of one task those members lose that are graded for longer: a late grader may score its machine",
        evidence=f"{slower_count} of {len(graded_pairs)} pairs of {len(facts.mixed)} groups; from the last action to "
        f"the end {won_seconds:.2g} s where an episode won, {lost_seconds:.2g} s where it lost",
        commands=(f"agentrl validate {facts.config.env.id} --out checked --load 5", f"agentrl view {facts.path}"),
    )


def tasks_never_vary(facts: RunFacts) -> Advice | None:
    """Tasks that are drawn again and again, and whose members always get one outcome."""
    frequent_tasks = {
        task_id: task_facts
        for task_id, task_facts in facts.tasks.items()
        if len(task_facts.outcomes) >= _MEMBERS and len(task_facts.groups) >= _EACH
    }
    constant_tasks = {
        task_id: task_facts for task_id, task_facts in frequent_tasks.items() if len({*task_facts.outcomes}) == 1
    }
    if len(constant_tasks) < 2 or share(len(constant_tasks), len(frequent_tasks)) < _NEVER:
        return None
    least_members = min(len(task_facts.outcomes) for task_facts in constant_tasks.values())
    lost_ids, won_ids = _split(constant_tasks)
    return Advice(
        name="tasks_never_vary",
        cause="tasks are drawn again and again although their members always get the same outcome: they teach nothing",
        evidence=f"{len(constant_tasks)} of {len(frequent_tasks)} tasks "
        f"({percent(len(constant_tasks), len(frequent_tasks))}) with {least_members} members and more: "
        f"{len(lost_ids)} never won, {len(won_ids)} always",
        settings=(f"rollout.skip_tasks={list(constant_tasks)[:_SHOWN]}".replace("'", '"'),),
        commands=(f"agentrl validate {facts.config.env.id} --out checked",),
    )


def _split(tasks: dict[str, TaskFacts]) -> tuple[list[str], list[str]]:
    """The tasks whose one outcome is nothing, and the others."""
    lost_ids = [task_id for task_id, task_facts in tasks.items() if task_facts.outcomes[0] <= 0]
    return lost_ids, [task_id for task_id in tasks if task_id not in lost_ids]
