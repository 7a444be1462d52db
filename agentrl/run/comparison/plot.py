"""A picture of comparisons: for each pair its differences, each with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import UsageError
from agentrl.host.installation import install_command
from agentrl.run.comparison.compare import Comparison, Measured, is_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN, _NOT_SHOWN = "#1e6fa8", "#7f8c8d"  # colours of a difference that the first measure shows, and of others


def draw(comparisons: Sequence[Comparison], path: Path) -> Figure:
    """Write the picture to `path`, whose ending names its format, and return it. One row of axes a pair, in it one for
    each unit: a success of points and tokens have no scale in common. Raises UsageError for a path that cannot be
    written, and without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UsageError(f"--plot needs matplotlib, which is not installed: {install_command('train')}") from None
    rows = [(pair, unit) for pair in comparisons for unit in _by_unit(pair.measures)]
    heights = [len(unit) + 1.5 for _, unit in rows]
    # A figure of its own and no window: pyplot would keep every figure of the process, and choose a screen.
    figure = Figure(figsize=(8, 0.4 * sum(heights) + 0.4), layout="constrained")
    axes = figure.subplots(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for (pair, unit), axis in zip(rows, axes, strict=True):
        factor = 100.0 if is_share(unit[0].name) else 1.0
        for place, measured in enumerate(reversed(unit)):
            decides = measured is pair.measures[0] and (pair.is_shown or pair.decided_after is not None)
            middle, low, high = (factor * value for value in (measured.difference, measured.low, measured.high))
            color = _SHOWN if decides else _NOT_SHOWN
            axis.plot([low, high], [place, place], color=color, linewidth=2)
            axis.plot([middle], [place], "o", color=color)
        axis.axvline(0.0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(unit)), [measured.name for measured in reversed(unit)])
        axis.set_ylim(-0.6, len(unit) - 0.4)
        axis.spines[["top", "right"]].set_visible(False)
        points = ", points" if is_share(unit[0].name) else ""
        axis.set_title(f"{pair.b} minus {pair.a}{points}: difference with its 95% interval", fontsize=9, loc="left")
    try:
        figure.savefig(str(path), dpi=130)  # pyright: ignore[reportUnknownMemberType]
    except (OSError, ValueError) as error:  # ValueError: an ending that is no format
        raise UsageError(f"--plot {path}: {error}") from None
    return figure


def _by_unit(measures: Sequence[Measured]) -> list[list[Measured]]:
    """The shares together, every other measure alone."""
    shares = [measured for measured in measures if is_share(measured.name)]
    others = [[measured] for measured in measures if not is_share(measured.name)]
    return [shares, *others] if shares else others
