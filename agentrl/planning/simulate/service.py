"""How long things take: episodes and optimizer steps as distributions, from the user or measured in a run.

Owns the random draws. Never knows a group's state or the learner's clock. All times are in seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from agentrl.errors import UsageError


class Play(NamedTuple):
    """One episode. `turns` are (start, end, tokens) of each turn, in seconds since the episode's start; tokens are
    sampled evenly between the two. `scored`: it enters the loss and its group's baseline; `silent`: its group gives no
    signal."""

    duration_s: float
    turns: tuple[tuple[float, float, int], ...]
    tokens: int  # of all turns
    scored: bool = True
    silent: bool = False


class Episodes(Protocol):
    """Source of a group's episodes."""

    def group(self, size: int, chance: Random) -> list[Play]:
        """The episodes of one group."""
        ...


class Steps(Protocol):
    """Durations of optimizer steps."""

    def seconds(self, tokens: int, chance: Random) -> float:
        """Draw the seconds of one step that trains so many tokens."""
        ...

    def sped_up(self, times: float) -> Steps:
        """Return the durations on a learner that is `times` times as fast."""
        ...


_TOKENS_A_MEAN = 50  # tokens of an episode of mean length: enough to tell its parts apart


class Draw(Protocol):
    """A random number of seconds."""

    def __call__(self, chance: Random) -> float: ...


@dataclass(frozen=True, slots=True)
class _Lognormal:
    mu: float
    sigma: float

    def __call__(self, chance: Random) -> float:
        # The standard library's own generator, and no numpy: a simulation must repeat itself from its seed on any
        # machine.
        return chance.lognormvariate(self.mu, self.sigma)


@dataclass(frozen=True, slots=True)
class _Pareto:
    least: float
    alpha: float

    def __call__(self, chance: Random) -> float:
        return self.least * chance.paretovariate(self.alpha)


@dataclass(frozen=True, slots=True)
class _Same:
    value: float

    def __call__(self, chance: Random) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class _Product:
    factors: tuple[Draw, ...]

    def __call__(self, chance: Random) -> float:
        return math.prod(factor(chance) for factor in self.factors)


@dataclass(frozen=True, slots=True)
class IndependentEpisodes:
    """Episodes that sample tokens from start to end and take independent times, cut at `deadline_s`."""

    draw: Draw
    mean_s: float
    deadline_s: float = math.inf

    def group(self, size: int, chance: Random) -> list[Play]:
        return [self._play(min(self.draw(chance), self.deadline_s)) for _ in range(size)]

    def _play(self, duration_s: float) -> Play:
        token_count = max(1, round(duration_s / self.mean_s * _TOKENS_A_MEAN))
        return Play(duration_s, ((0.0, duration_s, token_count),), token_count)


@dataclass(frozen=True, slots=True)
class Constant:
    """Every step takes the same time."""

    step_s: float

    def seconds(self, tokens: int, chance: Random) -> float:
        return self.step_s

    def sped_up(self, times: float) -> Constant:
        return Constant(self.step_s / times)


@dataclass(frozen=True, slots=True)
class Measured:
    """Episodes of a finished run: a drawn group's, so that siblings stay as alike as they were."""

    groups: Sequence[Sequence[Play]]

    def group(self, size: int, chance: Random) -> list[Play]:
        # Whole groups are drawn, and not single episodes: siblings play one task and take times that are alike. Drawn
        # apart, every group would hold one straggler, and waiting for all would look far worse than it is.
        group_plays = list(chance.choice(self.groups))
        chance.shuffle(group_plays)
        return group_plays[:size] + chance.choices(group_plays, k=max(0, size - len(group_plays)))


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Steps of a finished run: a straight line through seconds by tokens, times a drawn deviation from it."""

    base_s: float
    token_s: float
    deviations: Sequence[float]

    def seconds(self, tokens: int, chance: Random) -> float:
        return (self.base_s + self.token_s * tokens) * chance.choice(self.deviations)

    def sped_up(self, times: float) -> MeasuredSteps:
        return MeasuredSteps(self.base_s / times, self.token_s / times, self.deviations)

    @classmethod
    def fit(cls, steps: Sequence[tuple[int, float]]) -> MeasuredSteps:
        """Through (tokens, seconds) by least squares. Neither base nor slope is below 0."""
        step_count = len(steps)
        mean_tokens = sum(tokens for tokens, _ in steps) / step_count
        mean_s = sum(seconds for _, seconds in steps) / step_count
        spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in steps)
        slope = sum((tokens - mean_tokens) * (seconds - mean_s) for tokens, seconds in steps) / spread if spread else 0
        # Steps with more tokens that were shorter are chance
        # (`test_steps_that_got_shorter_with_more_tokens_have_no_slope`), and a base below 0 would give negative times
        # for small steps.
        slope = min(max(slope, 0.0), mean_s / mean_tokens if mean_tokens else 0.0)
        base_s = max(mean_s - slope * mean_tokens, 0.0)
        fitted_seconds = [base_s + slope * tokens for tokens, _ in steps]
        # As factors: a step that is twice as large is also twice as far off.
        pairs = zip(fitted_seconds, steps, strict=True)
        deviations = [seconds / fitted_s if fitted_s else 1.0 for fitted_s, (_, seconds) in pairs]
        return cls(base_s, slope, deviations)


_FORMS = "lognormal:SIGMA[:MEAN_S], pareto:ALPHA[:MEAN_S], constant:MEAN_S, or a product such as lognormal:1*pareto:1.5"


def parse_episodes(text: str, *, deadline_s: float = math.inf) -> IndependentEpisodes:
    """Episodes whose seconds follow the distribution in `text`, such as `pareto:1.5`, each cut at `deadline_s`. The
    mean is 1 s by default, before the cut. A product is that of independent factors, such as two roles' tails. Raises
    UsageError."""
    factors = [_factor(part.strip(), text) for part in text.split("*")]
    draws = tuple(draw for draw, _ in factors)
    mean_s = math.prod(factor_mean for _, factor_mean in factors)
    return IndependentEpisodes(draws[0] if len(draws) == 1 else _Product(draws), mean_s, deadline_s)


def _factor(part: str, whole: str) -> tuple[Draw, float]:
    kind, *number_texts = part.split(":")
    numbers = [float(number_text) for number_text in number_texts if re.fullmatch(r"\d+(\.\d*)?|\.\d+", number_text)]
    if len(numbers) != len(number_texts) or any(number <= 0 for number in numbers):
        raise UsageError(f"--episode {whole!r}: its numbers must be above 0, as 1.5; give {_FORMS}")
    match kind, numbers:
        case "lognormal", [sigma, *mean_option] if len(mean_option) <= 1:
            if sigma > 5:  # the median is then 4e-6 of the mean
                raise UsageError(
                    f"--episode {whole!r}: sigma {sigma:g} is too large; give lognormal:SIGMA of at most 5"
                )
            mean_s = mean_option[0] if mean_option else 1.0
            # exp(mu + sigma² / 2) is the mean, which is what the user gives: with mu alone, a longer tail would be a
            # slower environment as well.
            return _Lognormal(math.log(mean_s) - sigma * sigma / 2, sigma), mean_s
        case "pareto", [alpha, *mean_option] if len(mean_option) <= 1:
            if alpha <= 1:
                raise UsageError(f"--episode {whole!r}: a Pareto tail of alpha {alpha:g} has no mean; give one above 1")
            mean_s = mean_option[0] if mean_option else 1.0
            return _Pareto(mean_s * (alpha - 1) / alpha, alpha), mean_s
        case "constant", [mean_s]:
            return _Same(mean_s), mean_s
        case _:
            raise UsageError(f"--episode {whole!r} is not known: give {_FORMS}")
