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
    axis_rows = [
        (comparison, unit_measures) for comparison in comparisons for unit_measures in _by_unit(comparison.measures)
    ]
    row_heights = [len(unit_measures) + 1.5 for _, unit_measures in axis_rows]
    # A figure of its own and no window: pyplot would keep every figure of the process, and choose a screen.
    figure = Figure(figsize=(8, 0.4 * sum(row_heights) + 0.4), layout="constrained")
    row_axes = figure.subplots(len(axis_rows), 1, squeeze=False, height_ratios=row_heights)[:, 0]
    for (comparison, unit_measures), row_axis in zip(axis_rows, row_axes, strict=True):
        scale_factor = 100.0 if is_share(unit_measures[0].name) else 1.0
        for line_position, measured in enumerate(reversed(unit_measures)):
            is_decisive = measured is comparison.measures[0] and (
                comparison.is_shown or comparison.decided_after is not None
            )
            difference, lower_end, upper_end = (
                scale_factor * interval_point for interval_point in (measured.difference, measured.low, measured.high)
            )
            line_color = _SHOWN if is_decisive else _NOT_SHOWN
            row_axis.plot([lower_end, upper_end], [line_position, line_position], color=line_color, linewidth=2)
            row_axis.plot([difference], [line_position], "o", color=line_color)
        row_axis.axvline(0.0, color="black", linewidth=0.8)
        row_axis.set_yticks(range(len(unit_measures)), [measured.name for measured in reversed(unit_measures)])
        row_axis.set_ylim(-0.6, len(unit_measures) - 0.4)
        row_axis.spines[["top", "right"]].set_visible(False)
        unit_text = ", points" if is_share(unit_measures[0].name) else ""
        row_axis.set_title(
            f"{comparison.b} minus {comparison.a}{unit_text}: difference with its 95% interval", fontsize=9, loc="left"
        )
    try:
        figure.savefig(str(path), dpi=130)  # pyright: ignore[reportUnknownMemberType]
    except (OSError, ValueError) as save_error:  # ValueError: an ending that is no format
        raise UsageError(f"--plot {path}: {save_error}") from None
    return figure


def _by_unit(measures: Sequence[Measured]) -> list[list[Measured]]:
    """The shares together, every other measure alone."""
    share_measures = [measured for measured in measures if is_share(measured.name)]
    other_measures = [[measured] for measured in measures if not is_share(measured.name)]
    return [share_measures, *other_measures] if share_measures else other_measures
