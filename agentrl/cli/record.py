"""The command `agentrl record`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl.host.quick_imports import quick_imports


def record(
    engine: Annotated[str, typer.Option(help="The URL of a running engine, as agentrl serve prints it")],
    model: Annotated[
        str, typer.Option(help="The model that it serves: a folder or an id; its name there with --kind openai")
    ],
    out: Annotated[Path, typer.Option(help="The folder of the recordings; the same one again goes on with it")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="A program to start and to record")
    ] = None,
    kind: Annotated[
        Literal["vllm", "sglang", "embedded", "openai"],
        typer.Option(help="Which engine it is; openai: any other server, recorded as text"),
    ] = "vllm",
    key_variable: Annotated[str | None, typer.Option(help="The environment variable with the engine's key")] = None,
    host: Annotated[str, typer.Option(help="Where to listen; by default only this machine can reach it")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one", min=0, max=65535)] = 8644,
    api_key_env: Annotated[
        str | None, typer.Option(help="The environment variable with the key that clients show")
    ] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Let everybody who reaches the address use it")] = False,
    idle_s: Annotated[float, typer.Option(min=1, help="Seconds of silence that end a conversation")] = 3600.0,
    max_context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a conversation; default: those that the engine takes")
    ] = None,
) -> None:
    """Record what any client of OpenAI's or Anthropic's API does with a model: every token with its log-prob, in a
    folder that agentrl view, status and export-episodes read. With a command after --, record one program."""
    with quick_imports():
        from agentrl.run.recording.record import RecordSettings
        from agentrl.run.recording.record import record as record_all

    settings = RecordSettings(
        engine=engine,
        model=model,
        out=out,
        kind=kind,
        engine_key=key_variable,
        host=host,
        port=0 if command else port,
        key_variable=api_key_env,
        no_key=no_key,
        idle_s=idle_s,
        max_context=max_context,
        command=tuple(command or ()),
    )
    raise SystemExit(record_all(settings))
