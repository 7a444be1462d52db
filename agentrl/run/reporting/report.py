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
from agentrl.env.gymnasium_wrappers import printable
from agentrl.host.installation import DISTRIBUTION
from agentrl.records import POLICY, Message, Trajectory
from agentrl.run.alarms import PATIENCE, no_signal
from agentrl.run.evaluation import held_out as evaluation
from agentrl.run.reporting import failed_tasks, notice_counts, step_rates
from agentrl.run.reward_services import by_function
from agentrl.run.reward_services import failures as score_failures
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
    steps = [row.values for row in store.metrics.values("step")]
    learner_s = sum(map(step_rates.wall_s, steps))
    waits = store.metrics.waited()
    drops, replays = store.metrics.drops(), store.replays.counts(config.rollout.max_replays)
    idle_end = no_signal(steps, patience=min(PATIENCE, len(steps)), skipped=drops.get("no_signal", 0))
    started, ended = TRAIN_STARTED_S.of(store.meta) or 0.0, TRAIN_ENDED_S.of(store.meta) or 0.0
    sets = {
        held_out.name: {
            when: result and result.figures()
            for when in ("before", "after")
            for result in [evaluation.result(store, held_out.name, evaluation.label(held_out.name, when))]
        }
        for held_out in config.eval.sets
    }
    first = sets[config.eval.sets[0].name] if config.eval.sets else {"before": None, "after": None}
    summary: dict[str, Any] = {
        "name": config.name,
        "seed": config.seed,
        "model": config.model,
        "model_params": MODEL_PARAMS.of(store.meta),
        "eval": {**first, "tasks": config.eval.sets[0].n if config.eval.sets else 0, "sets": sets},
        "steps": len(steps),
        "episodes": store.metrics.episodes_trained(),
        "steps_updated": sum(bool(row["updated"]) for row in steps),
        "tokens_trained": sum(map(step_rates.trained_tokens, steps)),
        "no_signal": None if idle_end is None else str(idle_end),
        "stopped_early": STOPPED_EARLY.of(store.meta),
        "wall_s": time.time() - (CREATED_S.of(store.meta) or time.time()),
        # By marks in the store and not by this process's clock: a run that was resumed was trained by several
        # processes.
        "train_s": ended - started,
        "trainer_idle_share": step_rates.idle_share(steps),
        "held_at_bound_share": sum(row.get("held_s", 0.0) for row in steps) / learner_s if learner_s else 0.0,
        "episode_engine_share": waits.engine_s / sum(waits) if any(waits) else 0.0,
        "max_lag_seen": max((row["lag_max"] for row in steps), default=0),
        "weight_pause_ms": 1e3 * fmean(row["pause_s"] for row in steps) if steps else 0.0,
        "reward_functions": by_function(steps),
        "drops": drops,
        "notices": notice_counts.totals(store.metrics),
        "replays": {"played": replays.played, "waiting": replays.waiting, "given_up": replays.exhausted},
        "members_dropped": store.metrics.members_dropped(),
        "bias": finite(asdict(store.metrics.training_bias(returns_of(config)))),
        "buffer": {"order": config.buffer.order, "close": _close(config)},
        "unmeasured": evaluation.unmeasured(store, config, "after"),
        "reward_failures": [
            asdict(failure) | {"line": str(failure)} for failure in score_failures(store) if failure.matters
        ],
        "failed_tasks": failed_tasks.as_rows(store.metrics.failed_tasks(), config),
        "quarantined": [
            {"env": entry.task.env, "seed": entry.task.seed, "episode": entry.episode_id, "reason": entry.reason}
            for entry in store.deaths.quarantined()
        ],
        "restarts": restarts,
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES}
        | {"python": platform.python_version()},
    }
    new_file = run.summary.with_name(f"{run.summary.name}.new")
    new_file.write_text(json.dumps(summary, indent=2) + "\n")
    new_file.replace(run.summary)  # others read it as soon as it is there
    return summary


def _close(config: RunConfig) -> str:
    return "full" if config.quorum is None else f"quorum of {config.quorum}"


def during(store: RunStore, config: RunConfig) -> Iterator[tuple[int, float]]:
    """Held-out success of the first set by step: before, during, after."""
    for held_out in config.eval.sets[:1]:
        for step, result in measured(store, held_out.name):
            assert result.success is not None, "it has episodes"
            yield step, result.success


def measured(store: RunStore, name: str) -> Iterator[tuple[int, evaluation.EvalResult]]:
    """The finished evaluations of a held-out set by step: before, during, after."""
    purposes = {0: evaluation.label(name, "before")}
    labels = [
        (purpose, evaluation.read_label(purpose, now=store.versions.current_version().step))
        for purpose in store.groups.purposes()
    ]
    for when in ("during", "after"):  # the last one holds for a step that has both
        purposes |= {read.step: purpose for purpose, read in labels if read and (read.name, read.when) == (name, when)}
    for step in sorted(purposes):
        result = evaluation.result(store, name, purposes[step])
        if result is not None and result.n and evaluation.finished(store, purposes[step]):
            yield step, result


def plot(run: RunDir, config: RunConfig, store: RunStore) -> Path:
    """Draw `curves.png`: training reward and held-out success by step, staleness and waiting below."""
    import matplotlib

    # Without a display: a backend that opens windows would fail on the machine in which runs end most often, one
    # without a screen.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row.values for row in store.metrics.values("step")]
    steps = [row.step for row in store.metrics.values("step")]
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[2, 1])
    top.plot(
        steps, [row["outcome_mean"] for row in rows], color="#9bb8d3", linewidth=1, label="outcome reward, training"
    )
    for name in by_function(rows):
        drawn: list[tuple[int, float]] = []
        for step, row in zip(steps, rows, strict=True):
            means: dict[str, float] = row.get("reward_functions") or {}
            if name in means:
                drawn.append((step, means[name]))
        top.plot(*zip(*drawn, strict=True), linewidth=1, linestyle=":", label=name.rpartition("/")[2])
    for held_out, color in zip(config.eval.sets[:1] + config.eval.sets_during[1:], _SETS, strict=False):
        curve = list(measured(store, held_out.name))
        for k in _shown_k(curve):
            _draw_pass(top, held_out.name, k, curve, color)
    top.set_ylim(min(0, top.dataLim.y0), max(1, top.dataLim.y1))  # rewards may be negative, or beyond 1
    top.set_ylabel("mean per episode")
    top.legend(loc="lower right", frameon=False)
    top.set_title(f"{config.name}: {config.env.id}, seed {config.seed}")
    bottom.plot(
        steps, [row["lag_mean"] for row in rows], color="#7d3c98", linewidth=1, label="mean lag of a token, steps"
    )
    share = [step_rates.idle_share([row]) for row in rows]
    bottom.plot(steps, share, color="#7f8c8d", linewidth=1, label="learner idle share")
    bottom.set_xlabel("optimizer step")
    bottom.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    target = run.path / "curves.png"
    figure.tight_layout()
    figure.savefig(str(target), dpi=130)  # pyright: ignore[reportUnknownMemberType]
    pyplot.close(figure)
    return target


_SETS = ("#c0392b", "#b9770e", "#1e8449", "#117a65", "#6c3483")
"""Colours of held-out sets."""


def _shown_k(curve: Sequence[tuple[int, evaluation.EvalResult]]) -> list[str]:
    """The first and the last k of pass@k that were measured."""
    ks = list(curve[-1][1].pass_at) if curve else []
    return list(dict.fromkeys([*ks[:1], *ks[-1:]]))


def _draw_pass(axes: Any, name: str, k: str, curve: Iterable[tuple[int, evaluation.EvalResult]], color: str) -> None:
    """Draw pass@k by step, with its interval."""
    drawn = [(step, result.pass_at[k]) for step, result in curve if k in result.pass_at]
    values = [rate["value"] for _, rate in drawn]
    errors = [[rate["value"] - rate["low"] for _, rate in drawn], [rate["high"] - rate["value"] for _, rate in drawn]]
    label = f"success, {name}" if k == "1" else f"pass@{k}, {name}"
    line = {"linewidth": 2, "linestyle": "-" if k == "1" else "--", "capsize": 2, "elinewidth": 1}
    axes.errorbar([step for step, _ in drawn], values, yerr=errors, color=color, marker="o", label=label, **line)


def transcripts(run: RunDir, config: RunConfig, store: RunStore, n: int = 3) -> Path:
    """Write `transcripts.md`: the same `n` held-out tasks before and after training."""
    parts = [f"# {config.name}: episodes before and after training\n"]
    for held_out in config.eval.sets[:1]:
        for when in ("before", "after"):
            parts += [
                f"\n## {title}, {when}: {text}" for title, text in held_out_episodes(store, held_out.name, when, n)
            ]
    target = run.path / "transcripts.md"
    target.write_text("\n".join(parts))
    return target


def held_out_episodes(store: RunStore, name: str, when: str, n: int) -> Iterator[tuple[str, str]]:
    """The first `n` episodes of an evaluation: the set and the task; how it went, with the transcript."""
    for trajectory in itertools.islice(store.reads.trajectories(evaluation.label(name, when)), n):
        yield f"{name}, task {trajectory.task.seed}", f"{verdict(trajectory)}\n\n{transcript(trajectory)}"


def verdict(trajectory: Trajectory) -> str:
    """One phrase on how an episode went."""
    result = {True: "solved", False: "not solved", None: "unscored"}[trajectory.success]
    reason = trajectory.stop_reason.value if trajectory.stop_reason else "unfinished"
    return f"{result} in {len(trajectory.turns)} turns ({reason})"


def transcript(trajectory: Trajectory) -> str:
    """An episode as text: every message, indented so that no part of it is read as markup."""
    lines = list(quoted(trajectory.start))
    for turn in trajectory.turns:
        role = "assistant" if turn.role == POLICY else turn.role
        lines += quoted(({"role": role, "content": turn.text},))
        if turn.step is not None:
            lines += quoted(turn.step.observation)
            parts = [f", {source} {value:+.2f}" for source, value in turn.rewards.items() if value or source != "env"]
            lines.append(f"    (turn {turn.id}{''.join(parts)})")
    return "\n".join(lines) + "\n"


def quoted(messages: Iterable[Message]) -> Iterator[str]:
    """The lines of these messages, indented, without control characters."""
    for message in messages:
        # Indented by four, which Markdown shows as it is: a policy's text may hold headings, links and HTML, and this
        # file is opened in a viewer.
        yield f"    [{message['role']}]"
        calls = (json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ()))
        for line in (*message["content"].splitlines(), *calls):
            yield f"    {printable(line)}"
        yield ""


def show(console: Console, path: Path, summary: dict[str, Any]) -> None:
    """Print a run's summary: a table, the failed and the quarantined tasks, warnings, and where its files lie."""
    table = Table(title=f"{summary['name']}: {summary['steps']} steps, seed {summary['seed']}", title_justify="left")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for name, results in summary["eval"]["sets"].items():
        cells = [_success(results[when]) for when in ("before", "after")]
        table.add_row(f"success, {name}", *cells)
        after = cast("dict[str, Any]", results["after"] or {})
        for k in list(cast("dict[str, Any]", after.get("pass_at", {})))[1:]:
            cells = [_pass(results[when], k) for when in ("before", "after")]
            table.add_row(f"pass@{k}, {name}", *cells)
    for label, value in (
        ("training time", f"{summary['train_s']:.0f} s"),
        ("wall time", f"{summary['wall_s']:.0f} s"),
        ("steps that changed weights", f"{summary['steps_updated']} of {summary['steps']}"),
        ("episodes trained", f"{summary['episodes']:,}"),
        ("tokens trained", f"{summary['tokens_trained']:,}"),
        ("trainer idle share", f"{summary['trainer_idle_share']:.0%}"),
        ("episodes' time in the engine", f"{summary['episode_engine_share']:.0%}"),
        ("oldest token trained", f"{summary['max_lag_seen']} steps"),
    ):
        table.add_row(label, "", value)
    for name, means in summary["reward_functions"].items():
        label = f"reward function {name.rpartition('/')[2]}, first and last steps"
        table.add_row(label, f"{means['first']:.3f}", f"{means['last']:.3f}")
        if means["judged"] < summary["episodes"]:
            table.add_row(f"episodes that {name.rpartition('/')[2]} judged", "", f"{means['judged']:,}")
        if means["late"]:
            table.add_row(f"answers not judged in time by {name.rpartition('/')[2]}: 0", "", f"{means['late']:,}")
    console.print(table)
    show_bias(console, summary)
    if any(summary["replays"].values()):
        counts = ", ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in summary["replays"].items())
        console.print(f"tasks that infrastructure lost: {counts} (rollout.max_replays)", markup=False, highlight=False)
    if summary["failed_tasks"]:
        console.print(failed_tasks.table(summary["failed_tasks"], most=failed_tasks.MOST_ROWS))
        console.print(f"all of them: agentrl tasks {path} --failed", markup=False, highlight=False)
    for failure in summary["reward_failures"]:
        line = printable(f"{failure['line']}: agentrl rewards {path}")
        console.print(f"warning: {line}", style="bold red", markup=False, highlight=False)
    for line in notice_counts.lines(summary["notices"])[:_MOST_NOTICES]:
        console.print(f"not used: {printable(line)}", markup=False, highlight=False)
    for task in summary["quarantined"]:
        console.print(f"not played again: {task['reason']} (episode {task['episode']})", markup=False, highlight=False)
    if summary.get("stopped_early"):
        console.print(f"training ended early: {summary['stopped_early']}", markup=False, highlight=False)
    if summary["no_signal"]:
        console.print(f"warning: {summary['no_signal']}", style="bold red", markup=False, highlight=False)
    console.print(f"run directory: {path}", markup=False, highlight=False)
    # The transcripts are hundreds of lines, which would scroll the table away.
    for name, file in (("plot", path / "curves.png"), ("episodes, before and after", path / "transcripts.md")):
        if file.exists():
            console.print(f"{name}: {file}", markup=False, highlight=False)


def _success(result: dict[str, Any] | None) -> str:
    """A held-out success, with the number of episodes that failed."""
    if result is None:
        return "-"
    measured = "-" if result["success"] is None else f"{result['success']:.3f}{_interval(result, '1')}"
    return (
        f"{measured} ({result['failed']} of {result['n'] + result['failed']} failed)" if result["failed"] else measured
    )


def _pass(result: dict[str, Any] | None, k: str) -> str:
    """pass@k with its interval."""
    if result is None or k not in result["pass_at"]:
        return "-"
    return f"{result['pass_at'][k]['value']:.3f}{_interval(result, k)}"


def _interval(result: dict[str, Any], k: str) -> str:
    """The interval of pass@k; "" if it was not measured."""
    rate = result["pass_at"].get(k)
    return "" if rate is None else f" [{rate['low']:.2f}, {rate['high']:.2f}]"


def show_bias(console: Console, summary: dict[str, Any]) -> None:
    """Print whether what was trained is like what was played; nothing if every episode was trained."""
    bias, rules = summary["bias"], summary["buffer"]
    played, trained = bias["admitted"], bias["trained"]
    if played["episodes"] == trained["episodes"]:
        return
    title = f"trained / played: order {rules['order']}, close {rules['close']}"
    table = Table(title=title, title_justify="left")
    for column in ("", "mean", "p25", "p50", "p75", "p95"):
        table.add_column(column, justify="right" if column else "left")
    for unit in ("turns", "tokens", "seconds"):
        cells = [f"{_number(trained[unit][name])} / {_number(played[unit][name])}" for name in played[unit]]
        table.add_row(f"{unit} of an episode", *cells)
    pairs = zip(trained["advantage_by_quartile"], played["advantage_by_quartile"], strict=True)
    table.add_row("advantage, shortest to longest quarter", "", *(f"{_number(a)} / {_number(b)}" for a, b in pairs))
    weighted = f"{_number(trained['weighted_tokens'])} / {_number(played['weighted_tokens'])}"
    table.add_row("tokens, weighted by |advantage|", weighted)
    console.print(table)
    console.print(f"episodes: {trained['episodes']:,} of {played['episodes']:,} that ended", highlight=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
