"""Says of an observation whether the trainer evidence a promise, with evidence. Pure functions, standard library only.

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
    name = NAME.fullmatch(sample.name)
    assert name is not None, sample.name
    return int(name[1]), int(name[2])


def trained_turns(seen: Observation) -> tuple[list[Trained], list[str]]:
    """The sampled turns in the loss, and what else is in it: one line for each scored stretch that is none."""
    by_tokens = {sample.tokens: sample for sample in seen.samples}
    turns: list[Trained] = []
    faults: list[str] = []
    for row in seen.rows:
        for start, end in row.spans():
            tokens = row.tokens[start:end]
            sample = by_tokens.get(tokens)
            if sample is None:
                faults.append(_stranger(seen, tokens))
            elif not sample.is_whole:
                faults.append(f"{sample.name} is trained as if it had ended where the engine failed")
            else:
                turns.append(Trained(sample, row, start, end))
    return turns, faults


def _stranger(seen: Observation, tokens: tuple[int, ...]) -> str:
    """Describe a scored stretch that no sample equals."""
    text = decode(tokens)
    name = NAME.search(text)
    sample = next((each for each in seen.samples if name is not None and each.name == name[0]), None)
    if sample is None:
        return f"{len(tokens)} scored tokens that nobody sampled: {text[:60]!r}"
    if tokens[: len(sample.tokens)] == sample.tokens:
        more = len(tokens) - len(sample.tokens)
        return f"{more} tokens behind {sample.name} are scored and nobody sampled them: {decode(tokens[-more:])[:60]!r}"
    if sample.tokens[: len(tokens)] == tokens:
        return f"{len(tokens)} of the {len(sample.tokens)} tokens of {sample.name} are scored"
    if text == decode(sample.tokens):
        return f"{sample.name} was tokenized again: {len(tokens)} tokens for {len(sample.tokens)} sampled ones"
    return f"{sample.name} is scored with other tokens than were sampled: {text[:60]!r}"


def token_faults(seen: Observation) -> list[str]:
    """Whatever is wrong with the tokens in the loss: which they are, after which context, how likely, how often."""
    turns, faults = trained_turns(seen)
    for turn in turns:
        if turn.row.tokens[: turn.start] != turn.sample.prompt:
            faults.append(f"{turn.sample.name} is trained after another context than it was sampled after")
        logprobs = turn.row.logprobs
        if logprobs is not None:
            pairs = zip(logprobs[turn.start : turn.end], turn.sample.logprobs, strict=True)
            if (apart := max(abs(a - b) for a, b in pairs)) > _LOGPROB or math.isnan(apart):
                faults.append(f"{turn.sample.name} has log-probs {apart:.2g} nats from those that it was sampled with")
    scored = {turn.sample.name for turn in turns}
    for row in seen.rows:
        for sample in seen.samples:
            if sample.name not in scored and sample.is_whole and _contains(row.tokens, sample.tokens):
                faults.append(f"{sample.name} is in the context of a trained turn and is not trained itself")
                scored.add(sample.name)
    counts = Counter((turn.sample.name, turn.row.life) for turn in turns)
    faults += [f"{name} is trained {count} times" for (name, _), count in counts.items() if count > 1]
    return faults


def _contains(tokens: tuple[int, ...], part: tuple[int, ...]) -> bool:
    size = len(part)
    return any(
        tokens[start : start + size] == part for start in range(len(tokens) - size + 1) if tokens[start] == part[0]
    )


def advantage_faults(seen: Observation, scenario: Scenario, *, optional: Collection[int] = ()) -> list[str]:
    """Whatever is wrong with who is trained, and with which advantage. `optional` members may be trained or left out;
    members without a reward must be left out."""
    turns, faults = trained_turns(seen)
    values = defaultdict[tuple[int, int], set[float]](set)
    for turn in turns:
        if turn.row.advantages is not None:
            values[turn.member].update(turn.row.advantages[turn.start : turn.end])
    if any(math.isnan(value) for each in values.values() for value in each):
        return [*faults, "an advantage is not a number"]
    present = {turn.member for turn in turns}
    for group in {group for group, _ in present}:
        faults += _group_faults(group, values, present, scenario, optional)
    return faults


def _group_faults(
    group: int,
    values: dict[tuple[int, int], set[float]],
    present: Collection[tuple[int, int]],
    scenario: Scenario,
    optional: Collection[int],
) -> Iterator[str]:
    rewards: dict[int, float] = {}
    for number, member in enumerate(scenario.members):
        place = (group, number)
        is_moved = any(abs(value) > 1e-6 for value in values.get(place, ()))
        if not isinstance(member.grade, float | int):
            if is_moved:
                yield f"g{group}m{number} has no reward and is trained with advantage {max(values[place], key=abs):.3g}"
            elif place in present and place not in values:
                yield f"g{group}m{number} has no reward and is handed on as if it had one"
        elif number not in optional or is_moved:
            rewards[number] = member.grade
    if not rewards:
        return
    mean = math.fsum(rewards.values()) / len(rewards)
    missing = [number for number in rewards if abs(rewards[number] - mean) > 1e-9 and (group, number) not in present]
    if missing:
        yield f"finished and not trained: {', '.join(f'g{group}m{number}' for number in missing)}"
    seen = {number: values[group, number] for number in rewards if values.get((group, number))}
    if any(max(each) - min(each) > 1e-5 for each in seen.values()):
        yield "tokens of one episode have different advantages, though only its end is rewarded"
    distances = {number: rewards[number] - mean for number in seen}
    norm = math.fsum(distance * distance for distance in distances.values())
    if not seen or norm == 0:
        if any(abs(value) > 1e-6 for each in seen.values() for value in each):
            yield "equal rewards have an advantage"
        return
    advantages = {number: next(iter(each)) for number, each in seen.items()}
    scale = math.fsum(advantages[number] * distances[number] for number in seen) / norm
    largest = max(map(abs, advantages.values()))
    off = max(abs(advantages[number] - scale * distances[number]) for number in seen)
    if scale <= 0 or off > _SHARE * max(largest, 1e-9):
        written = ", ".join(f"m{number}: {advantages[number]:.3f}" for number in sorted(advantages))
        yield f"advantages ({written}) do not follow the rewards around the mean of those judged ({mean:.3g})"


def weight_faults(seen: Observation) -> list[str]:
    return [] if all(seen.finite) else ["weights are not numbers any more"]


def verdict(seen: Observation, faults: list[str], evidence: str) -> Verdict:
    """The verdict of a case in which `faults` were looked for; `evidence` is that of a promise that was kept."""
    if "rows" in seen.unseen:
        return Verdict("not observed", seen.unseen["rows"])
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        return Verdict("breaks", faults[0] + more)
    if seen.stopped is not None:
        return Verdict("stops", seen.stopped)
    if not seen.finished:
        return Verdict("stops", "it did not come to its end before the deadline")
    return Verdict("holds", evidence)


def summary(seen: Observation) -> str:
    """One line about the content of the loss, and about the parts of it that could not be seen."""
    turns, _ = trained_turns(seen)
    tokens = sum(len(turn.sample.tokens) for turn in turns)
    parts = [f"{len({turn.member for turn in turns})} episodes, {len(turns)} turns, {tokens} tokens as sampled"]
    for column, is_seen in (
        ("advantages", any(row.advantages is not None for row in seen.rows)),
        ("log-probs", any(row.logprobs is not None for row in seen.rows)),
    ):
        if seen.rows and not is_seen:
            parts.append(f"{column} not observed")
    return "; ".join(parts)


# --- the judges of the cases ------------------------------------------------------------------------------------------


def as_sampled(seen: Observation, scenario: Scenario) -> Verdict:
    """Every episode is trained, exactly as sampled."""
    faults = token_faults(seen) + advantage_faults(seen, scenario) + weight_faults(seen)
    return verdict(seen, faults or _nothing(seen), summary(seen))


def _nothing(seen: Observation) -> list[str]:
    is_over = seen.finished and not seen.rows and "rows" not in seen.unseen
    return ["it came to its end and trained nothing"] if is_over else []


def without(*members: int) -> Judge:
    """`members` may be missing from loss and baseline, and what is trained is as sampled."""

    def judge(seen: Observation, scenario: Scenario) -> Verdict:
        faults = token_faults(seen) + advantage_faults(seen, scenario, optional=members) + weight_faults(seen)
        names = ", ".join(f"m{member} {_part_of(member, seen)}" for member in members)
        evidence = f"{summary(seen)}; {names}" if names else summary(seen)
        return verdict(seen, faults or _nothing(seen), evidence)

    return judge


def _part_of(member: int, seen: Observation) -> str:
    """Describe the part that a member has in the loss."""
    rows = [turn.row for turn in trained_turns(seen)[0] if turn.member[1] == member]
    if not rows:
        return "is left out"
    has_advantage = any(row.advantages is None or any(row.advantages) for row in rows)
    return "is trained" if has_advantage else "is in the loss with advantage 0"


def equal_rewards(seen: Observation, scenario: Scenario) -> Verdict:
    faults = token_faults(seen) + advantage_faults(seen, scenario) + weight_faults(seen)
    rows = f"{len(seen.rows)} rows" if seen.rows else "no row"
    return verdict(seen, faults, f"{rows} in the loss, none with an advantage; all weights are numbers")


def no_control_tokens(seen: Observation, scenario: Scenario) -> Verdict:
    """The tool's text stands in the context as text."""
    more = [sum(token < len(SPECIAL) for token in row.tokens) - _own_control_tokens(row) for row in seen.rows]
    forged = [f"a text of the tool became {count} control tokens" for count in more if count > 0]
    faults = forged + token_faults(seen) + advantage_faults(seen, scenario)
    return verdict(seen, faults or _nothing(seen), summary(seen))


def _own_control_tokens(row: Row) -> int:
    """How many control tokens the template writes around the messages of a row: two each, and those of a system
    message with the tools."""
    turns = len(row.spans())
    has_system = decode(row.tokens[:12]).startswith("<|im_start|>sys")
    return 2 * (1 + has_system + turns + turns - 1)


def names_dropped_answers(seen: Observation, scenario: Scenario) -> Verdict:
    """A trainer refuses a template that drops the tool's answer, names it, or shows the answer all the same."""
    if seen.stopped is not None and not seen.rows:
        return Verdict("holds", f"refused: {seen.stopped}")
    shown = [row for row in seen.rows if scenario.tool_text in decode(row.tokens)]
    if seen.rows and len(shown) == len(seen.rows):
        return verdict(seen, token_faults(seen), "the answer is shown all the same")
    notice = next((line for line in seen.notices if "tool" in line and "template" in line), None)
    if notice is not None:
        return verdict(seen, token_faults(seen), f"named: {notice}")
    silent = ["trained without the tool's answers, and no word about it"] if seen.rows else []
    return verdict(seen, silent, "nothing was trained")


def retried_requests(seen: Observation, scenario: Scenario) -> Verdict:
    """A turn whose request came twice is trained once, and as sampled."""
    turns, _ = trained_turns(seen)
    by_turn = defaultdict[str, set[str]](set)
    for turn in turns:
        by_turn[turn.sample.name[:-1]].add(turn.sample.name)
    faults = [
        f"{name} is trained as {' and as '.join(sorted(names))}: its client read one of them"
        for name, names in by_turn.items()
        if len(names) > 1
    ]
    faults += token_faults(seen) + advantage_faults(seen, scenario)
    sampled = Counter(sample.name[:-1] for sample in seen.samples if sample.is_whole)
    again = ", ".join(f"{name} was sampled {count} times" for name, count in sampled.items() if count > 1)
    return verdict(seen, faults or _nothing(seen), "; ".join(filter(None, (summary(seen), again))))


def noticed_loss(seen: Observation, scenario: Scenario) -> Verdict:
    """Nothing is trained that was sampled after the first delivery was lost, unless the trainer names it."""
    late = [row.step for row in seen.rows if row.step > 1]
    faults = token_faults(seen)
    if late and not any("weights" in line for line in seen.notices):
        faults.append(f"step {late[0]} trains tokens of weights that never arrived, and no word about it")
    if seen.stopped is not None and not faults:
        return Verdict("holds", f"refused after step {max((row.step for row in seen.rows), default=0)}: {seen.stopped}")
    return verdict(seen, faults, "named, or nothing was trained")


def bounded_age(seen: Observation, scenario: Scenario) -> Verdict:
    """No token is trained that is older than the bound; to stop is as good as to go on."""
    turns, faults = trained_turns(seen)
    late = sorted({turn.row.step for turn in turns if turn.row.step - 1 > scenario.max_lag})
    if late:
        faults.append(
            f"step {late[-1]} trains tokens that are {late[-1] - 1} steps old; the bound is {scenario.max_lag}"
        )
    oldest = max((turn.row.step - 1 for turn in turns), default=0)
    evidence = f"no trained token has a lag above {oldest}, the bound is {scenario.max_lag}"
    if seen.stopped is not None and not faults:
        return Verdict("holds", f"{evidence}; then it stopped: {seen.stopped}")
    return verdict(seen, faults or _nothing(seen), evidence)


def trained_once(seen: Observation, scenario: Scenario) -> Verdict:
    """In the lineage of the checkpoint that the last life began from, every group is trained, and no episode twice."""
    last = max((row.life for row in seen.rows), default=0)
    if last == 0 and seen.finished:
        return Verdict("not observed", "it came to its end before it could be killed")
    begun = seen.resumed or 0
    lineage = Observation(
        samples=seen.samples, rows=[row for row in seen.rows if row.life == last or row.step <= begun]
    )
    turns, faults = trained_turns(lineage)
    # By member and turn, and not by sample: a step that is repeated with episodes played anew is one too many as well.
    counts = Counter((*turn.member, turn.sample.name.rpartition("t")[2][:-1]) for turn in turns)
    twice = [
        f"g{group}m{member}t{number}: {count} times" for (group, member, number), count in counts.items() if count > 1
    ]
    faults += [f"trained more than once in the lineage of step {begun}: {line}" for line in twice]
    groups = {turn.member[0] for turn in turns}
    if seen.finished and (missing := set(range(scenario.groups)) - groups):
        faults.append(f"groups {sorted(missing)} are never trained")
    finished = Counter(member_of(each) for each in seen.samples if each.is_whole and scenario.is_last(each.name))
    again = sum(count - 1 for count in finished.values())
    evidence = f"went on from step {begun}; {len(groups)} groups, {len(counts)} turns, each trained once"
    if again:
        evidence += f"; {again} finished episodes were played again"
    return verdict(seen, faults, evidence)
