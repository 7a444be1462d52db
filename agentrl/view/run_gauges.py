"""Figures of runs for Prometheus, read from their folders when it asks: a part that hangs holds no answer up. Those of
an engine itself are what it last reported to the run's supervisor.

Serves names, counts and numbers; no text of a model. Every sample has the label `run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

from agentrl.errors import AgentRLError, UsageError
from agentrl.host.installation import install_command
from agentrl.records import Json
from agentrl.run.children.engine_metrics import figures
from agentrl.view.opened_runs import OpenedRun, OpenedRuns, is_live
from agentrl.view.page_server import in_thread

PORT: Final = 9464
_FRESH_S = 60.0  # older figures of an engine are none: the run has ended, or the engine left
Sample = tuple[dict[str, str], float]

FAMILIES: Final = {
    "agentrl_up": ("gauge", "1 if the run's supervisor is under way, by phase"),
    "agentrl_step": ("counter", "optimizer steps done"),
    "agentrl_steps_wanted": ("gauge", "train.steps"),
    "agentrl_last_step_age_seconds": ("gauge", "since the last optimizer step ended"),
    "agentrl_step_metric": ("gauge", "a metric of the newest step, by the name that docs/reference/metrics.md has"),
    "agentrl_held_out_success": ("gauge", "success on the held-out sets, at the last measured step"),
    "agentrl_held_out_pass_at": ("gauge", "pass@k of a held-out set at the last measured step, with its interval"),
    "agentrl_groups": ("gauge", "training groups by state"),
    "agentrl_groups_dropped": ("counter", "training groups that never enter the loss, by reason"),
    "agentrl_episodes": ("counter", "ended training episodes, by why they ended"),
    "agentrl_parts": ("gauge", "engines, workers and learner ranks that are there"),
    "agentrl_engine_requests": ("gauge", "requests of a worker under way at an engine"),
    "agentrl_engine_ready": ("gauge", "1 if an engine takes requests, by its state"),
    "agentrl_engine_scrapes": ("counter", "requests for an engine's own metrics, since the run started"),
    "agentrl_engine_scrapes_failed": ("counter", "how often it gave none within its deadline"),
    "agentrl_weights_lag_seconds": ("gauge", "from the minting of the newest weights until engines served them"),
}
"""Every family with its type and meaning. Counters have `_total` behind their names where they are served."""


class RunsCollector:
    """Collector of samples for Prometheus's client. A run that cannot be read is left out of an answer."""

    def __init__(self, runs: OpenedRuns, client: Any, now: Callable[[], float] = time.time) -> None:
        self._runs, self._client, self._now = runs, client, now

    def collect(self) -> Iterator[Any]:
        """All families, with the samples of all runs that are there."""
        samples: dict[str, list[Sample]] = {family_name: [] for family_name in FAMILIES}
        engine_families: dict[str, Any] = {}
        for opened_run in self._runs.all():
            # Per run, and its samples are made before any is added: a run that cannot be read leaves the answer as a
            # whole, not by halves, and the others stay.
            # `tests/view/test_run_gauges.py::test_a_run_that_cannot_be_read_does_not_hide_the_others`.
            with suppress(AgentRLError, OSError):
                run_samples = list(_samples(opened_run, self._now()))
                for family_name, labels, sample_value in run_samples:
                    samples[family_name].append(({"run": opened_run.id, **labels}, sample_value))
                for engine_figures in figures(opened_run.run.engine_figures):
                    labels = {"run": opened_run.id, "engine": engine_figures.engine}
                    samples["agentrl_engine_scrapes"].append((labels, engine_figures.scrapes))
                    samples["agentrl_engine_scrapes_failed"].append((labels, engine_figures.failed))
                    # An old figure looks like a current one in a graph. Absent, it is a gap, which alerts can see.
                    if self._now() - engine_figures.time_s < _FRESH_S:
                        _add_own(engine_families, self._client, labels, engine_figures.text)
        for family_name, (family_kind, meaning) in FAMILIES.items():
            # Families are made anew at each scrape, not as the client's Gauge and Counter objects: these live in a
            # process and would go on serving the series of runs that have gone.
            metric_family = self._client.Metric(family_name, meaning, family_kind)
            for labels, sample_value in samples[family_name]:
                metric_family.add_sample(family_name + "_total" * (family_kind == "counter"), labels, sample_value)
            yield metric_family
        yield from engine_families.values()


def _add_own(families: dict[str, Any], client: Any, labels: dict[str, str], text: str) -> None:
    """Add the samples of an engine's answer under their own names. A label that it has too is `exported_` there, as
    Prometheus does. An answer that cannot be read is left out."""
    parser: Any = import_module("prometheus_client.parser")
    try:
        parsed_families = list(parser.text_string_to_metric_families(text))
    except ValueError:
        return
    for each_family in parsed_families:
        # An engine's own metric must not pass for one of ours.
        if each_family.name not in FAMILIES:
            own_family = families.setdefault(
                each_family.name, client.Metric(each_family.name, each_family.documentation, each_family.type)
            )
            for sample in each_family.samples:
                own_labels = {
                    f"exported_{name}" if name in labels else name: value for name, value in sample.labels.items()
                }
                own_family.add_sample(sample.name, {**own_labels, **labels}, sample.value)


def _samples(opened: OpenedRun, now_s: float) -> Iterator[tuple[str, dict[str, str], float]]:
    run_state = opened.state()
    yield "agentrl_up", {"phase": str(run_state["phase"])}, float(is_live(run_state))
    yield "agentrl_step", {}, float(run_state["step"])
    yield "agentrl_steps_wanted", {}, float(run_state["steps"])
    step_rows, step_values = opened.steps(), opened.values()
    if step_rows:
        yield "agentrl_last_step_age_seconds", {}, max(0.0, now_s - step_rows[-1].time_s)
        for name, value in step_values[-1].items():
            if value is not None:
                # One family with a label, not a family for each metric: their names come from algorithms and users
                # and need not be names that Prometheus takes.
                yield "agentrl_step_metric", {"metric": name.replace(".", "/")}, value
    held_out = cast("dict[str, float]", run_state["held_out"])
    if held_out:
        yield "agentrl_held_out_success", {}, list(held_out.values())[-1]
    for name, pass_estimates in run_state["pass_at"].items():
        for k, estimate in pass_estimates.items():
            if k != "step":
                for bound in ("value", "low", "high"):
                    yield "agentrl_held_out_pass_at", {"set": name, "k": k, "bound": bound}, estimate[bound]
    for name, count in run_state["groups"].items():
        yield "agentrl_groups", {"state": name}, float(count)
    for reason, count in run_state["dropped"].items():
        yield "agentrl_groups_dropped", {"reason": str(reason)}, float(count)
    with opened.store() as run_store:
        for reason, count in run_store.metrics.endings().items():
            yield "agentrl_episodes", {"stop_reason": reason.value}, float(count)
        fleet_rows = run_store.metrics.values("fleet", after=run_state["step"] - 2)
        newest_served = run_store.versions.served_versions()[-1:]
    for part_name, count in cast("dict[str, Json]", run_state["size"].get("present", {})).items():
        if isinstance(count, int | float):
            yield "agentrl_parts", {"part": part_name}, float(count)
    if fleet_rows:
        yield from _engines(fleet_rows[-1].values)
    for estimate in newest_served:
        yield "agentrl_weights_lag_seconds", {}, estimate.confirmed_s - estimate.minted_s


def _engines(gauges: Any) -> Iterator[tuple[str, dict[str, str], float]]:
    """The newest view that a worker had of its engines."""
    states, running = cast("Sequence[str]", gauges.get("state", ())), cast("Sequence[float]", gauges.get("running", ()))
    for engine_number, (state, request_count) in enumerate(zip(states, running, strict=False)):
        yield "agentrl_engine_ready", {"engine": str(engine_number), "state": state}, float(state == "ready")
        yield "agentrl_engine_requests", {"engine": str(engine_number)}, float(request_count)


@contextmanager
def exported(places: Iterable[Path], *, host: str = "127.0.0.1", port: int = PORT) -> Generator[str]:
    """Serve `/metrics` of the runs in `places` from threads while the block goes on; its address. Port 0 takes a free
    one. Raises UsageError if the address is not to be had, or the package is missing."""
    try:
        prometheus: Any = import_module("prometheus_client")
    except ImportError as error:
        raise UsageError(f"prometheus-client is not installed ({error}): {install_command('prometheus')}") from None
    opened_runs, registry = OpenedRuns(list(places)), prometheus.CollectorRegistry(auto_describe=False)
    registry.register(RunsCollector(opened_runs, prometheus))
    try:
        with in_thread(prometheus.make_asgi_app(registry), host, port) as url:
            yield f"{url}/metrics"
    finally:
        opened_runs.close()
