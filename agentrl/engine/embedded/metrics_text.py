"""The text of `/metrics`: the batcher's counters and durations at the HTTP side, by vLLM's names.

Owns the histograms. Measures nothing itself.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field

from agentrl.engine.embedded.batching import Batcher, Emission

_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class Histogram:
    """Counts of durations by upper bound, in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float, weight: int = 1) -> None:
        """Count one duration, `weight` times."""
        self.counts[bisect_left(_BOUNDS_S, seconds)] += weight
        self.total_s += seconds * weight

    def render(self, name: str, labels: str) -> list[str]:
        """Prometheus' lines of this histogram."""
        metric_lines = [f"# TYPE {name} histogram"]
        cumulative_count = 0
        for bound, count in zip([*map(str, _BOUNDS_S), "+Inf"], self.counts, strict=True):
            cumulative_count += count
            metric_lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {cumulative_count}')
        return [*metric_lines, f"{name}_sum{{{labels}}} {self.total_s}", f"{name}_count{{{labels}}} {cumulative_count}"]


@dataclass(slots=True)
class Histograms:
    """Durations as seen at the HTTP side."""

    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)
    weight_update: Histogram = field(default_factory=Histogram)

    def observe(self, emission: Emission, since_start_s: float, since_last_s: float, *, first: bool) -> None:
        """Note one chunk. Tokens leave in chunks, so the first token's time is that of the first chunk."""
        token_count = len(emission.token_ids)
        if first:
            self.first_token.add(since_start_s)
        if token_count:
            self.between_tokens.add(since_last_s / token_count, token_count)


def render(batcher: Batcher, histograms: Histograms, model: str) -> str:
    """The text of `/metrics`."""
    # vLLM's names and labels, also where they say little here: dashboards and the router's `Aimd` read one engine
    # like the other.
    labels = f'model_name="{model}",engine="0"'
    counters = batcher.counters
    gauge_values = {
        "vllm:num_requests_running": len(batcher.running),
        "vllm:num_requests_waiting": len(batcher.waiting),
        "vllm:kv_cache_usage_perc": float(batcher.slots.busy.mean()),
    }
    counter_values = {
        "vllm:prefix_cache_queries_total": counters.prefix_queries,
        "vllm:prefix_cache_hits_total": counters.prefix_hits,
        "vllm:num_preemptions_total": 0,  # a running request's slot is never taken from it
        "vllm:prompt_tokens_total": counters.prompt,
        "vllm:generation_tokens_total": counters.generated,
    }
    metric_lines: list[str] = []
    for metric_type, metric_values in (("gauge", gauge_values), ("counter", counter_values)):
        for metric_name, metric_value in metric_values.items():
            metric_lines += [f"# TYPE {metric_name} {metric_type}", f"{metric_name}{{{labels}}} {metric_value}"]
    running_adapters, waiting_adapters = (
        sorted({request.adapter.name for request in requests if request.adapter is not None})
        for requests in (batcher.running.values(), batcher.waiting)
    )
    lora_labels = (
        f'running_lora_adapters="{",".join(running_adapters)}",waiting_lora_adapters="{",".join(waiting_adapters)}"'
    )
    metric_lines.append(f"vllm:lora_requests_info{{{lora_labels}}} {time.time()}")
    metric_lines += histograms.first_token.render("vllm:time_to_first_token_seconds", labels)
    metric_lines += histograms.between_tokens.render("vllm:inter_token_latency_seconds", labels)
    metric_lines += histograms.weight_update.render("vllm:rl_weight_update_operation_duration_seconds", labels)
    return "\n".join(metric_lines) + "\n"
