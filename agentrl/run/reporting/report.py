"""The results of a finished run for a reader: summary, plot, transcripts. Reads the store, writes files."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from agentrl.config import RunConfig
from agentrl.host.installation import DISTRIBUTION
from agentrl.host.terminal_text import printable
from agentrl.records import POLICY, Message, Trajectory
from agentrl.run.alarms import PATIENCE, no_signal
from agentrl.run.evaluation import held_out as evaluation
from agentrl.run.reporting import failed_tasks, notice_counts, step_rates
from agentrl.run.reporting.reward_figures import by_function
from agentrl.run.reporting.reward_figures import failures as score_failures
from agentrl.run.run_folder import RunDir
from agentrl.run.take_orders import returns_of
from agentrl.store import RunStore
from agentrl.store.metrics import finite
from agentrl.store.run_values import CREATED_S, MODEL_PARAMS, STOPPED_EARLY, TRAIN_ENDED_S, TRAIN_STARTED_S

_MOST_NOTICES = 10  # lines at the end of a run; the summary has all
_PACKAGES = (DISTRIBUTION, "torch", "transformers", "gymnasium", "trio", "httpx")


def summarise(run: RunDir, config: RunConfig, store: RunStore, *, restarts: dict[str, int]) -> dict[str, Any]:
    """Write `summary.json` and return it. All times are seconds, shares are in [0, 1]. `tokens_trained` counts steps
    that changed the weights; `no_signal` says why the last steps did not change them, None if they did;
    `stopped_early` why training ended before its last step, None if it did not."""
    step_rows = [step_row.values for step_row in store.metrics.values("step")]
    learner_s = sum(map(step_rates.wall_s, step_rows))
    waited_times = store.metrics.waited()
    drop_counts, replay_counts = store.metrics.drops(), store.replays.counts(config.rollout.max_replays)
    idle_end = no_signal(step_rows, patience=min(PATIENCE, len(step_rows)), skipped=drop_counts.get("no_signal", 0))
    train_began_s, train_ended_s = TRAIN_STARTED_S.of(store.meta) or 0.0, TRAIN_ENDED_S.of(store.meta) or 0.0
    results_by_set = {
        held_out.name: {
            moment: eval_result and eval_result.figures()
            for moment in ("before", "after")
            for eval_result in [evaluation.result(store, held_out.name, evaluation.label(held_out.name, moment))]
        }
        for held_out in config.eval.sets
    }
    first_results = results_by_set[config.eval.sets[0].name] if config.eval.sets else {"before": None, "after": None}
    run_summary: dict[str, Any] = {
        "name": config.name,
        "seed": config.seed,
        "model": config.model,
        "model_params": MODEL_PARAMS.of(store.meta),
        "eval": {**first_results, "tasks": config.eval.sets[0].n if config.eval.sets else 0, "sets": results_by_set},
        "steps": len(step_rows),
        "episodes": store.metrics.episodes_trained(),
        "steps_updated": sum(bool(step_row["updated"]) for step_row in step_rows),
        "tokens_trained": sum(map(step_rates.trained_tokens, step_rows)),
        "no_signal": None if idle_end is None else str(idle_end),
        "stopped_early": STOPPED_EARLY.of(store.meta),
        "wall_s": time.time() - (CREATED_S.of(store.meta) or time.time()),
        # By marks in the store and not by this process's clock: a run that was resumed was trained by several
        # processes.
        "train_s": train_ended_s - train_began_s,
        "trainer_idle_share": step_rates.idle_share(step_rows),
        "held_at_bound_share": sum(step_row.get("held_s", 0.0) for step_row in step_rows) / learner_s
        if learner_s
        else 0.0,
        "episode_engine_share": waited_times.engine_s / sum(waited_times) if any(waited_times) else 0.0,
        "max_lag_seen": max((step_row["lag_max"] for step_row in step_rows), default=0),
        "weight_pause_ms": 1e3 * fmean(step_row["pause_s"] for step_row in step_rows) if step_rows else 0.0,
        "reward_functions": by_function(step_rows),
        "drops": drop_counts,
        "notices": notice_counts.totals(store.metrics),
        "replays": {
            "played": replay_counts.played,
            "waiting": replay_counts.waiting,
            "given_up": replay_counts.exhausted,
        },
        "members_dropped": store.metrics.members_dropped(),
        "bias": finite(asdict(store.metrics.training_bias(returns_of(config)))),
        "buffer": {"order": config.buffer.order, "close": _close(config)},
        "unmeasured": evaluation.unmeasured(store, config, "after"),
        "reward_failures": [
            asdict(failure) | {"line": str(failure)} for failure in score_failures(store) if failure.matters
        ],
        "failed_tasks": failed_tasks.as_rows(store.metrics.failed_tasks(), config),
        "quarantined": [
            {
                "env": lost_task.task.env,
                "seed": lost_task.task.seed,
                "episode": lost_task.episode_id,
                "reason": lost_task.reason,
            }
            for lost_task in store.deaths.quarantined()
        ],
        "restarts": restarts,
        "versions": {package_name: importlib.metadata.version(package_name) for package_name in _PACKAGES}
        | {"python": platform.python_version()},
    }
    new_file = run.summary.with_name(f"{run.summary.name}.new")
    new_file.write_text(json.dumps(run_summary, indent=2) + "\n")
    new_file.replace(run.summary)  # others read it as soon as it is there
    return run_summary


def _close(config: RunConfig) -> str:
    return "full" if config.quorum is None else f"quorum of {config.quorum}"


def during(store: RunStore, config: RunConfig) -> Iterator[tuple[int, float]]:
    """Held-out success of the first set by step: before, during, after."""
    for held_out in config.eval.sets[:1]:
        for eval_step, eval_result in measured(store, held_out.name):
            assert eval_result.success is not None, "it has episodes"
            yield eval_step, eval_result.success


def measured(store: RunStore, name: str) -> Iterator[tuple[int, evaluation.EvalResult]]:
    """The finished evaluations of a held-out set by step: before, during, after."""
    purpose_by_step = {0: evaluation.label(name, "before")}
    read_labels = [
        (purpose, evaluation.read_label(purpose, now=store.versions.current_version().step))
        for purpose in store.groups.purposes()
    ]
    for moment in ("during", "after"):  # the last one holds for a step that has both
        purpose_by_step |= {
            label_parts.step: purpose
            for purpose, label_parts in read_labels
            if label_parts and (label_parts.name, label_parts.when) == (name, moment)
        }
    for eval_step in sorted(purpose_by_step):
        eval_result = evaluation.result(store, name, purpose_by_step[eval_step])
        if eval_result is not None and eval_result.n and evaluation.finished(store, purpose_by_step[eval_step]):
            yield eval_step, eval_result


def plot(run: RunDir, config: RunConfig, store: RunStore) -> Path:
    """Draw `curves.png`: training reward and held-out success by step, staleness and waiting below."""
    import matplotlib

    # Without a display: a backend that opens windows would fail on the machine in which runs end most often, one
    # without a screen.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    step_values = [step_row.values for step_row in store.metrics.values("step")]
    step_numbers = [step_row.step for step_row in store.metrics.values("step")]
    figure, (top_axes, bottom_axes) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[2, 1])
    top_axes.plot(
        step_numbers,
        [step_row["outcome_mean"] for step_row in step_values],
        color="#9bb8d3",
        linewidth=1,
        label="outcome reward, training",
    )
    for function_name in by_function(step_values):
        drawn_means: list[tuple[int, float]] = []
        for step_number, step_row in zip(step_numbers, step_values, strict=True):
            function_means: dict[str, float] = step_row.get("reward_functions") or {}
            if function_name in function_means:
                drawn_means.append((step_number, function_means[function_name]))
        top_axes.plot(
            *zip(*drawn_means, strict=True), linewidth=1, linestyle=":", label=function_name.rpartition("/")[2]
        )
    for held_out, color in zip(config.eval.sets[:1] + config.eval.sets_during[1:], _SETS, strict=False):
        success_curve = list(measured(store, held_out.name))
        for sample_count in _shown_k(success_curve):
            _draw_pass(top_axes, held_out.name, sample_count, success_curve, color)
    top_axes.set_ylim(min(0, top_axes.dataLim.y0), max(1, top_axes.dataLim.y1))  # rewards may be negative, or beyond 1
    top_axes.set_ylabel("mean per episode")
    top_axes.legend(loc="lower right", frameon=False)
    top_axes.set_title(f"{config.name}: {config.env.id}, seed {config.seed}")
    bottom_axes.plot(
        step_numbers,
        [step_row["lag_mean"] for step_row in step_values],
        color="#7d3c98",
        linewidth=1,
        label="mean lag of a token, steps",
    )
    idle_shares = [step_rates.idle_share([step_row]) for step_row in step_values]
    bottom_axes.plot(step_numbers, idle_shares, color="#7f8c8d", linewidth=1, label="learner idle share")
    bottom_axes.set_xlabel("optimizer step")
    bottom_axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    for shown_axes in (top_axes, bottom_axes):
        shown_axes.spines[["top", "right"]].set_visible(False)
        shown_axes.grid(alpha=0.2)
    plot_path = run.path / "curves.png"
    figure.tight_layout()
    figure.savefig(str(plot_path), dpi=130)  # pyright: ignore[reportUnknownMemberType]
    pyplot.close(figure)
    return plot_path


_SETS = ("#c0392b", "#b9770e", "#1e8449", "#117a65", "#6c3483")
"""Colours of held-out sets."""


def _shown_k(curve: Sequence[tuple[int, evaluation.EvalResult]]) -> list[str]:
    """The first and the last k of pass@k that were measured."""
    sample_counts = list(curve[-1][1].pass_at) if curve else []
    return list(dict.fromkeys([*sample_counts[:1], *sample_counts[-1:]]))


def _draw_pass(axes: Any, name: str, k: str, curve: Iterable[tuple[int, evaluation.EvalResult]], color: str) -> None:
    """Draw pass@k by step, with its interval."""
    drawn_rates = [(eval_step, eval_result.pass_at[k]) for eval_step, eval_result in curve if k in eval_result.pass_at]
    pass_values = [pass_rate["value"] for _, pass_rate in drawn_rates]
    error_bars = [
        [pass_rate["value"] - pass_rate["low"] for _, pass_rate in drawn_rates],
        [pass_rate["high"] - pass_rate["value"] for _, pass_rate in drawn_rates],
    ]
    curve_label = f"success, {name}" if k == "1" else f"pass@{k}, {name}"
    line_style = {"linewidth": 2, "linestyle": "-" if k == "1" else "--", "capsize": 2, "elinewidth": 1}
    axes.errorbar(
        [eval_step for eval_step, _ in drawn_rates],
        pass_values,
        yerr=error_bars,
        color=color,
        marker="o",
        label=curve_label,
        **line_style,
    )


def transcripts(run: RunDir, config: RunConfig, store: RunStore, n: int = 3) -> Path:
    """Write `transcripts.md`: the same `n` held-out tasks before and after training."""
    text_parts = [f"# {config.name}: episodes before and after training\n"]
    for held_out in config.eval.sets[:1]:
        for moment in ("before", "after"):
            text_parts += [
                f"\n## {episode_title}, {moment}: {episode_text}"
                for episode_title, episode_text in held_out_episodes(store, held_out.name, moment, n)
            ]
    transcripts_path = run.path / "transcripts.md"
    transcripts_path.write_text("\n".join(text_parts))
    return transcripts_path


def held_out_episodes(store: RunStore, name: str, when: str, n: int) -> Iterator[tuple[str, str]]:
    """The first `n` episodes of an evaluation: the set and the task; how it went, with the transcript."""
    for trajectory in itertools.islice(store.reads.trajectories(evaluation.label(name, when)), n):
        yield f"{name}, task {trajectory.task.seed}", f"{verdict(trajectory)}\n\n{transcript(trajectory)}"


def verdict(trajectory: Trajectory) -> str:
    """One phrase on how an episode went."""
    success_text = {True: "solved", False: "not solved", None: "unscored"}[trajectory.success]
    ending_text = trajectory.stop_reason.value if trajectory.stop_reason else "unfinished"
    return f"{success_text} in {len(trajectory.turns)} turns ({ending_text})"


def transcript(trajectory: Trajectory) -> str:
    """An episode as text: every message, indented so that no part of it is read as markup."""
    text_lines = list(quoted(trajectory.start))
    for played_turn in trajectory.turns:
        shown_role = "assistant" if played_turn.role == POLICY else played_turn.role
        text_lines += quoted(({"role": shown_role, "content": played_turn.text},))
        if played_turn.step is not None:
            text_lines += quoted(played_turn.step.observation)
            reward_texts = [
                f", {source_name} {turn_reward:+.2f}"
                for source_name, turn_reward in played_turn.rewards.items()
                if turn_reward or source_name != "env"
            ]
            text_lines.append(f"    (turn {played_turn.id}{''.join(reward_texts)})")
    return "\n".join(text_lines) + "\n"


def quoted(messages: Iterable[Message]) -> Iterator[str]:
    """The lines of these messages, indented, without control characters."""
    for message in messages:
        # Indented by four, which Markdown shows as it is: a policy's text may hold headings, links and HTML, and this
        # file is opened in a viewer.
        yield f"    [{message['role']}]"
        call_texts = (
            json.dumps(tool_call["function"], ensure_ascii=False) for tool_call in message.get("tool_calls", ())
        )
        for text_line in (*message["content"].splitlines(), *call_texts):
            yield f"    {printable(text_line)}"
        yield ""


def show(console: Console, path: Path, summary: dict[str, Any]) -> None:
    """Print a run's summary: a table, the failed and the quarantined tasks, warnings, and where its files lie."""
    summary_table = Table(
        title=f"{summary['name']}: {summary['steps']} steps, seed {summary['seed']}", title_justify="left"
    )
    summary_table.add_column("")
    summary_table.add_column("before", justify="right")
    summary_table.add_column("after", justify="right")
    for shown_name, set_results in summary["eval"]["sets"].items():
        table_cells = [_success(set_results[moment]) for moment in ("before", "after")]
        summary_table.add_row(f"success, {shown_name}", *table_cells)
        results_after = cast("dict[str, Any]", set_results["after"] or {})
        for sample_count in list(cast("dict[str, Any]", results_after.get("pass_at", {})))[1:]:
            table_cells = [_pass(set_results[moment], sample_count) for moment in ("before", "after")]
            summary_table.add_row(f"pass@{sample_count}, {shown_name}", *table_cells)
    for row_label, row_value in (
        ("training time", f"{summary['train_s']:.0f} s"),
        ("wall time", f"{summary['wall_s']:.0f} s"),
        ("steps that changed weights", f"{summary['steps_updated']} of {summary['steps']}"),
        ("episodes trained", f"{summary['episodes']:,}"),
        ("tokens trained", f"{summary['tokens_trained']:,}"),
        ("trainer idle share", f"{summary['trainer_idle_share']:.0%}"),
        ("episodes' time in the engine", f"{summary['episode_engine_share']:.0%}"),
        ("oldest token trained", f"{summary['max_lag_seen']} steps"),
    ):
        summary_table.add_row(row_label, "", row_value)
    for shown_name, function_means in summary["reward_functions"].items():
        row_label = f"reward function {shown_name.rpartition('/')[2]}, first and last steps"
        summary_table.add_row(row_label, f"{function_means['first']:.3f}", f"{function_means['last']:.3f}")
        if function_means["judged"] < summary["episodes"]:
            summary_table.add_row(
                f"episodes that {shown_name.rpartition('/')[2]} judged", "", f"{function_means['judged']:,}"
            )
        if function_means["late"]:
            summary_table.add_row(
                f"answers not judged in time by {shown_name.rpartition('/')[2]}: 0", "", f"{function_means['late']:,}"
            )
    console.print(summary_table)
    show_bias(console, summary)
    if any(summary["replays"].values()):
        replay_texts = ", ".join(
            f"{replay_count} {replay_kind.replace('_', ' ')}"
            for replay_kind, replay_count in summary["replays"].items()
        )
        console.print(
            f"tasks that infrastructure lost: {replay_texts} (rollout.max_replays)", markup=False, highlight=False
        )
    if summary["failed_tasks"]:
        console.print(failed_tasks.table(summary["failed_tasks"], most=failed_tasks.MOST_ROWS))
        console.print(f"all of them: agentrl tasks {path} --failed", markup=False, highlight=False)
    for failure in summary["reward_failures"]:
        warning_line = printable(f"{failure['line']}: agentrl rewards {path}")
        console.print(f"warning: {warning_line}", style="bold red", markup=False, highlight=False)
    for warning_line in notice_counts.lines(summary["notices"])[:_MOST_NOTICES]:
        console.print(f"not used: {printable(warning_line)}", markup=False, highlight=False)
    for lost_task in summary["quarantined"]:
        console.print(
            f"not played again: {lost_task['reason']} (episode {lost_task['episode']})", markup=False, highlight=False
        )
    if summary.get("stopped_early"):
        console.print(f"training ended early: {summary['stopped_early']}", markup=False, highlight=False)
    if summary["no_signal"]:
        console.print(f"warning: {summary['no_signal']}", style="bold red", markup=False, highlight=False)
    console.print(f"run directory: {path}", markup=False, highlight=False)
    # The transcripts are hundreds of lines, which would scroll the table away.
    for shown_name, shown_path in (
        ("plot", path / "curves.png"),
        ("episodes, before and after", path / "transcripts.md"),
    ):
        if shown_path.exists():
            console.print(f"{shown_name}: {shown_path}", markup=False, highlight=False)


def _success(result: dict[str, Any] | None) -> str:
    """A held-out success, with the number of episodes that failed."""
    if result is None:
        return "-"
    success_text = "-" if result["success"] is None else f"{result['success']:.3f}{_interval(result, '1')}"
    return (
        f"{success_text} ({result['failed']} of {result['n'] + result['failed']} failed)"
        if result["failed"]
        else success_text
    )


def _pass(result: dict[str, Any] | None, k: str) -> str:
    """pass@k with its interval."""
    if result is None or k not in result["pass_at"]:
        return "-"
    return f"{result['pass_at'][k]['value']:.3f}{_interval(result, k)}"


def _interval(result: dict[str, Any], k: str) -> str:
    """The interval of pass@k; "" if it was not measured."""
    pass_rate = result["pass_at"].get(k)
    return "" if pass_rate is None else f" [{pass_rate['low']:.2f}, {pass_rate['high']:.2f}]"


def show_bias(console: Console, summary: dict[str, Any]) -> None:
    """Print whether what was trained is like what was played; nothing if every episode was trained."""
    bias_figures, buffer_rules = summary["bias"], summary["buffer"]
    played_figures, trained_figures = bias_figures["admitted"], bias_figures["trained"]
    if played_figures["episodes"] == trained_figures["episodes"]:
        return
    table_title = f"trained / played: order {buffer_rules['order']}, close {buffer_rules['close']}"
    bias_table = Table(title=table_title, title_justify="left")
    for column_name in ("", "mean", "p25", "p50", "p75", "p95"):
        bias_table.add_column(column_name, justify="right" if column_name else "left")
    for unit in ("turns", "tokens", "seconds"):
        table_cells = [
            f"{_number(trained_figures[unit][figure_name])} / {_number(played_figures[unit][figure_name])}"
            for figure_name in played_figures[unit]
        ]
        bias_table.add_row(f"{unit} of an episode", *table_cells)
    quartile_pairs = zip(trained_figures["advantage_by_quartile"], played_figures["advantage_by_quartile"], strict=True)
    bias_table.add_row(
        "advantage, shortest to longest quarter",
        "",
        *(f"{_number(trained_value)} / {_number(played_value)}" for trained_value, played_value in quartile_pairs),
    )
    weighted_tokens = f"{_number(trained_figures['weighted_tokens'])} / {_number(played_figures['weighted_tokens'])}"
    bias_table.add_row("tokens, weighted by |advantage|", weighted_tokens)
    console.print(bias_table)
    console.print(
        f"episodes: {trained_figures['episodes']:,} of {played_figures['episodes']:,} that ended", highlight=False
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
