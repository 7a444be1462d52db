"""Sends spans of a run to OpenTelemetry, with the package `opentelemetry-sdk`.

Names are those of the semantic conventions for generative AI where there is one (`gen_ai.*`), and `rl.*` elsewhere. An
episode is a trace of its own: `invoke_agent`, with its turns (`chat`) and the environment's times (`execute_tool`).
Texts of the model are not sent. Never knows the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Final

from agentrl.errors import UsageError
from agentrl.host.installation import install_command
from agentrl.offline.run_spans import RunSpan, SpanKind
from agentrl.records import Json

_OPERATION: Final[Mapping[SpanKind, str]] = {"episode": "invoke_agent", "turn": "chat", "environment": "execute_tool"}
_NAMES: Final[Mapping[SpanKind, str]] = {"wait": "rl.wait", "step": "rl.step", "sync": "rl.sync"}
_KNOWN: Final = {
    "prompt_tokens": "rl.turn.prompt_tokens",
    "tokens": "gen_ai.usage.output_tokens",
    "episode": "gen_ai.conversation.id",
    "env": "gen_ai.agent.name",
    "turn": "rl.turn.id",
    "role": "rl.turn.role",
}
_DEADLINE_S: Final = 30.0
# Collectors bound the size of a request by some megabytes; 500 spans with their attributes are far below.
_BATCH: Final = 500  # spans that are sent at once, and those of the last episode


def otlp_exporter(url: str) -> Any:
    """An exporter to an OTLP endpoint over HTTP, such as `http://localhost:4318/v1/traces`. Raises UsageError if the
    package is missing."""
    try:
        exporters: Any = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        raise UsageError(f"OpenTelemetry is not installed ({error}): {install_command('otel')}") from None
    return exporters.OTLPSpanExporter(endpoint=url, timeout=_DEADLINE_S)


def export_spans(spans: Iterable[RunSpan], exporter: Any, *, run: str, model: str) -> int:
    """Send spans, and those inside them, to an exporter of OpenTelemetry's SDK; returns how many they were. `run` names
    the service's instance. Raises UsageError if the exporter refuses spans."""
    try:
        sdk_trace: Any = import_module("opentelemetry.sdk.trace")
        resources: Any = import_module("opentelemetry.sdk.resources")
        export_results: Any = import_module("opentelemetry.sdk.trace.export")
        sampling: Any = import_module("opentelemetry.sdk.trace.sampling")
        trace_api: Any = import_module("opentelemetry.trace")
        context_api: Any = import_module("opentelemetry.context")
    except ImportError as error:
        raise UsageError(f"OpenTelemetry is not installed ({error}): {install_command('otel')}") from None
    resource = resources.Resource.create({"service.name": "agentrl", "service.instance.id": run})
    ended_spans: list[Any] = []
    # every span is sent, whatever the environment says of a live service
    provider = sdk_trace.TracerProvider(resource=resource, shutdown_on_exit=False, sampler=sampling.ALWAYS_ON)
    provider.add_span_processor(_collector(sdk_trace, ended_spans))
    tracer = provider.get_tracer("agentrl")
    sent_count = 0

    # The exporter is called here, not by a BatchSpanProcessor: that one drops spans when its queue is full and only
    # logs when an endpoint refuses them. This is an export of a finished record, in which none may be missing.
    def send() -> int:
        if ended_spans and exporter.export(ended_spans) is not export_results.SpanExportResult.SUCCESS:
            correction = "is an OTLP endpoint there?"
            raise UsageError(f"{sent_count} spans are sent, and the next {len(ended_spans)} were refused: {correction}")
        batch_size = len(ended_spans)
        ended_spans.clear()
        return batch_size

    def make(span: RunSpan, parent: Any) -> None:
        exported = tracer.start_span(
            _name(span, model), context=parent, start_time=_ns(span.began_s), attributes=_attributes(span, model)
        )
        inner_context = trace_api.set_span_in_context(exported)
        for inner_span in span.inside:
            make(inner_span, inner_context)
        exported.end(end_time=_ns(span.ended_s))

    for run_span in spans:
        # An empty context, so that each episode is the root of a trace of its own even if the calling process is
        # traced itself.
        make(run_span, context_api.Context())
        if len(ended_spans) >= _BATCH:
            sent_count += send()
    return sent_count + send()


def _collector(sdk: Any, ended: list[Any]) -> Any:
    # Defined in a function because its base exists only where the optional package is installed.
    class Collector(sdk.SpanProcessor):
        def on_end(self, span: Any) -> None:
            ended.append(span)

    return Collector()


def _name(span: RunSpan, model: str) -> str:
    operation = _OPERATION.get(span.kind)
    if operation is None:
        return _NAMES[span.kind]
    return f"{operation} {({'episode': span.facts.get('env'), 'turn': model}).get(span.kind, 'environment')}"


def _attributes(span: RunSpan, model: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    if (operation := _OPERATION.get(span.kind)) is not None:
        attributes["gen_ai.operation.name"] = operation
    if span.kind == "turn":
        attributes |= {"gen_ai.provider.name": "agentrl", "gen_ai.request.model": model}
        attributes["gen_ai.response.finish_reasons"] = [str(span.facts.get("finish"))]
    if span.kind == "environment":
        attributes["gen_ai.tool.name"] = "environment"
    for fact_name, fact_value in span.facts.items():
        attributes[_KNOWN.get(fact_name, f"rl.{span.kind}.{fact_name}")] = _plain(fact_name, fact_value)
    return attributes


def _plain(name: str, value: Json) -> Json:
    # OpenTelemetry allows these types and drops others with a warning. A conversation's id is text by the
    # conventions.
    return str(value) if name == "episode" or not isinstance(value, bool | int | float | str) else value


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
