"""Judges that say of an observation whether the trainer keeps a promise, with evidence. Standard library only.

A judge never asks how a trainer computes. Tokens, log-probs and contexts are compared with the engine's record. The
advantages of a group are held to what every group baseline has in common (the mean, leave-one-out, with or without
division by the deviation): they are a positive multiple of each reward's distance from the mean of those judged.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from agentrl.conformance.observation import Observation, Row, Sample
from agentrl.conformance.scenario import NAME, Scenario
from agentrl.conformance.tiny_model import SPECIAL, decode

Outcome = Literal["holds", "breaks", "stops", "not observed", "not applicable"]
"""`stops`: the trainer ended with an error, and nothing that it trained until then breaks the promise."""

_LOGPROB: Final = 1e-4  # nats: rounding of float32
_SHARE: Final = 2e-3  # of the largest advantage


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    evidence: str


Judge = Callable[[Observation, Scenario], Verdict]


@dataclass(frozen=True, slots=True)
class Trained:
    """A sampled turn in the loss: tokens `start` to `end` of `row`."""

    sample: Sample
    row: Row
    start: int
    end: int

    @property
    def member(self) -> tuple[int, int]:
        return member_of(self.sample)


def member_of(sample: Sample) -> tuple[int, int]:
    """Group and member that a sample names."""
    name_match = NAME.fullmatch(sample.name)
    assert name_match is not None, sample.name
    return int(name_match[1]), int(name_match[2])


def trained_turns(seen: Observation) -> tuple[list[Trained], list[str]]:
    """The sampled turns in the loss, and what else is in it: one line for each scored stretch that is none."""
    by_tokens = {sample.tokens: sample for sample in seen.samples}
    turns: list[Trained] = []
    strangers: list[str] = []
    for row in seen.rows:
        for stretch_start, stretch_end in row.spans():
            stretch_tokens = row.tokens[stretch_start:stretch_end]
            sample = by_tokens.get(stretch_tokens)
            if sample is None:
                strangers.append(_stranger(seen, stretch_tokens))
            elif not sample.is_whole:
                strangers.append(f"{sample.name} is trained as if it had ended where the engine failed")
            else:
                turns.append(Trained(sample, row, stretch_start, stretch_end))
    return turns, strangers


def _stranger(seen: Observation, tokens: tuple[int, ...]) -> str:
    """Describe a scored stretch that no sample equals."""
    scored_text = decode(tokens)
    name_match = NAME.search(scored_text)
    namesake = next(
        (any_sample for any_sample in seen.samples if name_match is not None and any_sample.name == name_match[0]), None
    )
    if namesake is None:
        return f"{len(tokens)} scored tokens that nobody sampled: {scored_text[:60]!r}"
    if tokens[: len(namesake.tokens)] == namesake.tokens:
        excess = len(tokens) - len(namesake.tokens)
        excess_text = decode(tokens[-excess:])[:60]
        return f"{excess} tokens behind {namesake.name} are scored and nobody sampled them: {excess_text!r}"
    if namesake.tokens[: len(tokens)] == tokens:
        return f"{len(tokens)} of the {len(namesake.tokens)} tokens of {namesake.name} are scored"
    if scored_text == decode(namesake.tokens):
        return f"{namesake.name} was tokenized again: {len(tokens)} tokens for {len(namesake.tokens)} sampled ones"
    return f"{namesake.name} is scored with other tokens than were sampled: {scored_text[:60]!r}"


def token_faults(seen: Observation) -> list[str]:
    """Whatever is wrong with the tokens in the loss: which they are, after which context, how likely, how often."""
    turns, faults = trained_turns(seen)
    for turn in turns:
        if turn.row.tokens[: turn.start] != turn.sample.prompt:
            faults.append(f"{turn.sample.name} is trained after another context than it was sampled after")
        row_logprobs = turn.row.logprobs
        if row_logprobs is not None:
            logprob_pairs = zip(row_logprobs[turn.start : turn.end], turn.sample.logprobs, strict=True)
            if (
                distance := max(
                    abs(trained_logprob - sampled_logprob) for trained_logprob, sampled_logprob in logprob_pairs
                )
            ) > _LOGPROB or math.isnan(distance):
                faults.append(
                    f"{turn.sample.name} has log-probs {distance:.2g} nats from those that it was sampled with"
                )
    scored_names = {turn.sample.name for turn in turns}
    for row in seen.rows:
        for sample in seen.samples:
            if sample.name not in scored_names and sample.is_whole and _contains(row.tokens, sample.tokens):
                faults.append(f"{sample.name} is in the context of a trained turn and is not trained itself")
                scored_names.add(sample.name)
    times_by_sample = Counter((turn.sample.name, turn.row.life) for turn in turns)
    faults += [
        f"{sample_name} is trained {times} times" for (sample_name, _), times in times_by_sample.items() if times > 1
    ]
    return faults


def _contains(tokens: tuple[int, ...], part: tuple[int, ...]) -> bool:
    part_length = len(part)
    return any(
        tokens[start_index : start_index + part_length] == part
        for start_index in range(len(tokens) - part_length + 1)
        if tokens[start_index] == part[0]
    )


def advantage_faults(seen: Observation, scenario: Scenario, *, optional: Collection[int] = ()) -> list[str]:
    """Whatever is wrong with who is trained, and with which advantage. `optional` members may be trained or left out;
    members without a reward must be left out."""
    turns, faults = trained_turns(seen)
    values_by_member = defaultdict[tuple[int, int], set[float]](set)
    for turn in turns:
        if turn.row.advantages is not None:
            values_by_member[turn.member].update(turn.row.advantages[turn.start : turn.end])
    if any(math.isnan(advantage) for member_values in values_by_member.values() for advantage in member_values):
        return [*faults, "an advantage is not a number"]
    present_members = {turn.member for turn in turns}
    for group_index in {group_index for group_index, _ in present_members}:
        faults += _group_faults(group_index, values_by_member, present_members, scenario, optional)
    return faults


def _group_faults(
    group: int,
    values: dict[tuple[int, int], set[float]],
    present: Collection[tuple[int, int]],
    scenario: Scenario,
    optional: Collection[int],
) -> Iterator[str]:
    judged_rewards: dict[int, float] = {}
    for index, scenario_member in enumerate(scenario.members):
        member_key = (group, index)
        is_moved = any(abs(advantage) > 1e-6 for advantage in values.get(member_key, ()))
        if not isinstance(scenario_member.grade, float | int):
            if is_moved:
                largest = max(values[member_key], key=abs)
                yield f"g{group}m{index} has no reward and is trained with advantage {largest:.3g}"
            elif member_key in present and member_key not in values:
                yield f"g{group}m{index} has no reward and is handed on as if it had one"
        elif index not in optional or is_moved:
            judged_rewards[index] = scenario_member.grade
    if not judged_rewards:
        return
    mean = math.fsum(judged_rewards.values()) / len(judged_rewards)
    untrained = [
        index for index in judged_rewards if abs(judged_rewards[index] - mean) > 1e-9 and (group, index) not in present
    ]
    if untrained:
        yield f"finished and not trained: {', '.join(f'g{group}m{index}' for index in untrained)}"
    values_by_index = {index: values[group, index] for index in judged_rewards if values.get((group, index))}
    if any(max(member_values) - min(member_values) > 1e-5 for member_values in values_by_index.values()):
        yield "tokens of one episode have different advantages, though only its end is rewarded"
    distances = {index: judged_rewards[index] - mean for index in values_by_index}
    squared_distance = math.fsum(distance * distance for distance in distances.values())
    if not values_by_index or squared_distance == 0:
        if any(abs(advantage) > 1e-6 for member_values in values_by_index.values() for advantage in member_values):
            yield "equal rewards have an advantage"
        return
    advantages = {index: next(iter(member_values)) for index, member_values in values_by_index.items()}
    scale = math.fsum(advantages[index] * distances[index] for index in values_by_index) / squared_distance
    largest_advantage = max(map(abs, advantages.values()))
    deviation = max(abs(advantages[index] - scale * distances[index]) for index in values_by_index)
    if scale <= 0 or deviation > _SHARE * max(largest_advantage, 1e-9):
        advantage_list = ", ".join(f"m{index}: {advantages[index]:.3f}" for index in sorted(advantages))
        yield f"advantages ({advantage_list}) do not follow the rewards around the mean of those judged ({mean:.3g})"


def weight_faults(seen: Observation) -> list[str]:
    return [] if all(seen.finite) else ["weights are not numbers any more"]


def verdict(seen: Observation, faults: list[str], evidence: str) -> Verdict:
    """The verdict of a case in which `faults` were looked for; `evidence` is that of a promise that was kept."""
    if "rows" in seen.unseen:
        return Verdict("not observed", seen.unseen["rows"])
    if faults:
        further_faults = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        return Verdict("breaks", faults[0] + further_faults)
    if seen.stopped is not None:
        return Verdict("stops", seen.stopped)
    if not seen.finished:
        return Verdict("stops", "it did not come to its end before the deadline")
    return Verdict("holds", evidence)


def summary(seen: Observation) -> str:
    """One line about the content of the loss, and about the parts of it that could not be seen."""
    turns, _ = trained_turns(seen)
    token_count = sum(len(turn.sample.tokens) for turn in turns)
    clauses = [f"{len({turn.member for turn in turns})} episodes, {len(turns)} turns, {token_count} tokens as sampled"]
    for column_name, is_observed in (
        ("advantages", any(row.advantages is not None for row in seen.rows)),
        ("log-probs", any(row.logprobs is not None for row in seen.rows)),
    ):
        if seen.rows and not is_observed:
            clauses.append(f"{column_name} not observed")
    return "; ".join(clauses)


# --- the judges of the cases ------------------------------------------------------------------------------------------


def as_sampled(seen: Observation, scenario: Scenario) -> Verdict:
    """Every episode is trained, exactly as sampled."""
    faults = token_faults(seen) + advantage_faults(seen, scenario) + weight_faults(seen)
    return verdict(seen, faults or _nothing(seen), summary(seen))


def _nothing(seen: Observation) -> list[str]:
    is_empty_run = seen.finished and not seen.rows and "rows" not in seen.unseen
    return ["it came to its end and trained nothing"] if is_empty_run else []


def without(*members: int) -> Judge:
    """`members` may be missing from loss and baseline, and what is trained is as sampled."""

    def judge(seen: Observation, scenario: Scenario) -> Verdict:
        faults = token_faults(seen) + advantage_faults(seen, scenario, optional=members) + weight_faults(seen)
        member_parts = ", ".join(f"m{optional_member} {_part_of(optional_member, seen)}" for optional_member in members)
        evidence = f"{summary(seen)}; {member_parts}" if member_parts else summary(seen)
        return verdict(seen, faults or _nothing(seen), evidence)

    return judge


def _part_of(member: int, seen: Observation) -> str:
    """Describe the part that a member has in the loss."""
    member_rows = [turn.row for turn in trained_turns(seen)[0] if turn.member[1] == member]
    if not member_rows:
        return "is left out"
    has_advantage = any(member_row.advantages is None or any(member_row.advantages) for member_row in member_rows)
    return "is trained" if has_advantage else "is in the loss with advantage 0"


def equal_rewards(seen: Observation, scenario: Scenario) -> Verdict:
    faults = token_faults(seen) + advantage_faults(seen, scenario) + weight_faults(seen)
    row_count = f"{len(seen.rows)} rows" if seen.rows else "no row"
    return verdict(seen, faults, f"{row_count} in the loss, none with an advantage; all weights are numbers")


def no_control_tokens(seen: Observation, scenario: Scenario) -> Verdict:
    """The tool's text stands in the context as text."""
    excess_counts = [
        sum(token_id < len(SPECIAL) for token_id in row.tokens) - _own_control_tokens(row) for row in seen.rows
    ]
    forged_tokens = [
        f"a text of the tool became {excess_count} control tokens" for excess_count in excess_counts if excess_count > 0
    ]
    faults = forged_tokens + token_faults(seen) + advantage_faults(seen, scenario)
    return verdict(seen, faults or _nothing(seen), summary(seen))


def _own_control_tokens(row: Row) -> int:
    """How many control tokens the template writes around the messages of a row: two each, and those of a system
    message with the tools."""
    turn_count = len(row.spans())
    has_system = decode(row.tokens[:12]).startswith("<|im_start|>sys")
    return 2 * (1 + has_system + turn_count + turn_count - 1)


def names_dropped_answers(seen: Observation, scenario: Scenario) -> Verdict:
    """A trainer refuses a template that drops the tool's answer, names it, or shows the answer all the same."""
    if seen.stopped is not None and not seen.rows:
        return Verdict("holds", f"refused: {seen.stopped}")
    rows_with_answer = [row for row in seen.rows if scenario.tool_text in decode(row.tokens)]
    if seen.rows and len(rows_with_answer) == len(seen.rows):
        return verdict(seen, token_faults(seen), "the answer is shown all the same")
    template_notice = next(
        (notice_line for notice_line in seen.notices if "tool" in notice_line and "template" in notice_line), None
    )
    if template_notice is not None:
        return verdict(seen, token_faults(seen), f"named: {template_notice}")
    silent_drop = ["trained without the tool's answers, and no word about it"] if seen.rows else []
    return verdict(seen, silent_drop, "nothing was trained")


def retried_requests(seen: Observation, scenario: Scenario) -> Verdict:
    """A turn whose request came twice is trained once, and as sampled."""
    turns, _ = trained_turns(seen)
    names_by_turn = defaultdict[str, set[str]](set)
    for turn in turns:
        names_by_turn[turn.sample.name[:-1]].add(turn.sample.name)
    faults = [
        f"{turn_name} is trained as {' and as '.join(sorted(sample_names))}: its client read one of them"
        for turn_name, sample_names in names_by_turn.items()
        if len(sample_names) > 1
    ]
    faults += token_faults(seen) + advantage_faults(seen, scenario)
    times_by_turn = Counter(sample.name[:-1] for sample in seen.samples if sample.is_whole)
    sampled_again = ", ".join(
        f"{turn_name} was sampled {times_sampled} times"
        for turn_name, times_sampled in times_by_turn.items()
        if times_sampled > 1
    )
    return verdict(seen, faults or _nothing(seen), "; ".join(filter(None, (summary(seen), sampled_again))))


def noticed_loss(seen: Observation, scenario: Scenario) -> Verdict:
    """Nothing is trained that was sampled after the first delivery was lost, unless the trainer names it."""
    late_steps = [row.step for row in seen.rows if row.step > 1]
    faults = token_faults(seen)
    if late_steps and not any("weights" in notice_line for notice_line in seen.notices):
        faults.append(f"step {late_steps[0]} trains tokens of weights that never arrived, and no word about it")
    if seen.stopped is not None and not faults:
        return Verdict("holds", f"refused after step {max((row.step for row in seen.rows), default=0)}: {seen.stopped}")
    return verdict(seen, faults, "named, or nothing was trained")


def bounded_age(seen: Observation, scenario: Scenario) -> Verdict:
    """No token is trained that is older than the bound; to stop is as good as to go on.

    The scenario's engine keeps its first weights, so a token in the loss of step n is n - 1 steps old."""
    turns, faults = trained_turns(seen)
    too_late = sorted({turn.row.step for turn in turns if turn.row.step - 1 > scenario.max_lag})
    if too_late:
        faults.append(
            f"step {too_late[-1]} trains tokens that are {too_late[-1] - 1} steps old; the bound is {scenario.max_lag}"
        )
    largest_lag = max((turn.row.step - 1 for turn in turns), default=0)
    evidence = f"no trained token has a lag above {largest_lag}, the bound is {scenario.max_lag}"
    if seen.stopped is not None and not faults:
        return Verdict("holds", f"{evidence}; then it stopped: {seen.stopped}")
    return verdict(seen, faults or _nothing(seen), evidence)


def trained_once(seen: Observation, scenario: Scenario) -> Verdict:
    """In the lineage of the checkpoint that the last life began from, every group is trained, and no episode twice."""
    last_life = max((row.life for row in seen.rows), default=0)
    if last_life == 0 and seen.finished:
        return Verdict("not observed", "it came to its end before it could be killed")
    resumed_step = seen.resumed or 0
    lineage = Observation(
        samples=seen.samples, rows=[row for row in seen.rows if row.life == last_life or row.step <= resumed_step]
    )
    turns, faults = trained_turns(lineage)
    # By member and turn, and not by sample: a step that is repeated with episodes played anew is one too many as well.
    times_by_turn = Counter((*turn.member, turn.sample.name.rpartition("t")[2][:-1]) for turn in turns)
    repetitions = [
        f"g{group_index}m{member_index}t{turn_index}: {times_trained} times"
        for (group_index, member_index, turn_index), times_trained in times_by_turn.items()
        if times_trained > 1
    ]
    faults += [
        f"trained more than once in the lineage of step {resumed_step}: {repetition}" for repetition in repetitions
    ]
    trained_groups = {turn.member[0] for turn in turns}
    if seen.finished and (missing_groups := set(range(scenario.groups)) - trained_groups):
        faults.append(f"groups {sorted(missing_groups)} are never trained")
    times_finished = Counter(
        member_of(sample) for sample in seen.samples if sample.is_whole and scenario.is_last(sample.name)
    )
    replayed_count = sum(times_trained - 1 for times_trained in times_finished.values())
    evidence = (
        f"went on from step {resumed_step}; {len(trained_groups)} groups, {len(times_by_turn)} turns, each trained once"
    )
    if replayed_count:
        evidence += f"; {replayed_count} finished episodes were played again"
    return verdict(seen, faults, evidence)
