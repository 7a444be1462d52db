"""The groups and the order in which `agentrl --help` lists the commands, and the examples that end the help of each.
A second example shows another use; an option that the help explains needs none.

The commands of a user's week come first, whatever they are about: a newcomer finds what to type without reading the
rest. Those below them are grouped by what they are about.
"""

from __future__ import annotations

from typing import Any, Final

import typer
from typer.core import TyperGroup

GROUPS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "A week with agentrl": {
        "demo": ("demo --view", "demo --real"),
        "train": ("train examples/tiny_coder.toml --view", "train --resume runs/tiny_coder --set train.steps=200"),
        "eval": ("eval runs/mine --n 64 --show 3", "eval agentrl/smollm2-135m --env agentrl/Calculator-v0"),
        "view": ("view runs", "view --demo --open"),
        "status": ("status", "status runs/mine"),
        "health": ("health runs/mine",),
        "pause": ("pause runs/mine",),
        "resume": ("resume runs/mine",),
        "stop": ("stop runs/mine",),
        "show": ("show agentrl/Calculator-v0", "show calculator"),
        "play": ("play agentrl/Calculator-v0",),
        "validate": ("validate agentrl/CodeRepair-v0", "validate agentrl/Harbor-v0 --all --out checked"),
        "new": ("new env my_env",),
        "doctor": ("doctor",),
        "export": ("export runs/mine --hf out/model --step 40",),
    },
    "More on training": {
        "sft": ("sft warm_start.toml",),
        "demos": ("demos agentrl/CodeRepair-v0 --n 200 --mistakes 0.5 --out demos.jsonl",),
        "submit": ("submit run.toml --address http://head:8265",),
    },
    "Steer a run": {
        "set": ("set runs/mine train.lr=1e-6 buffer.max_lag=2",),
        "scale": ("scale runs/mine --engines 3 --workers 4",),
        "requeue": ("requeue runs/mine --failed", "requeue runs/mine --group 12 --group 31 --dry-run"),
    },
    "Read a run": {
        "logs": ("logs runs/mine learner -n 50", "logs runs/mine --follow"),
        "tasks": ("tasks runs/mine --failed",),
        "compare": ("compare runs/one runs/other", "compare --plan 500 --samples 4"),
        "rewards": ("rewards runs/mine",),
        "metrics": ("metrics runs",),
        "audit": ("audit runs/mine",),
        "trace": ("trace runs/mine", "trace runs/mine --otlp http://localhost:4318/v1/traces"),
    },
    "Work on a run's episodes": {
        "export-episodes": (
            "export-episodes runs/mine --out best.jsonl --format messages --best-of 8",
            "export-episodes runs/mine --out episodes.parquet --format parquet --min-outcome 1",
        ),
        "fork": ("fork runs/mine 12 --turn 3",),
        "rescore": ("rescore runs/mine --source judge",),
        "retrain": ("retrain runs/mine --step 12 --dump runs/mine/tokens/12.jsonl",),
        "store": ("store copy runs/mine --to postgresql://agentrl@db.example/agentrl",),
    },
    "Plan": {
        "plan": ("plan run.toml --gpu l40s --n 2 --price 1.2",),
        "simulate": ("simulate run.toml --gpus 8", "simulate --from runs/mine --max-lag 0,1,2,4"),
    },
    "Engines": {
        "serve": ("serve agentrl/smollm2-135m", "serve out/model --kind vllm --gpus 0,1 --port 8001"),
        "record": (
            "record --engine http://127.0.0.1:8000 --model agentrl/smollm2-135m --out runs/recorded",
            "record --engine http://127.0.0.1:8000 --model out/model --out runs/mine -- python my_agent.py",
        ),
        "canary": (
            "canary http://127.0.0.1:8000 --model out/model",
            "canary http://127.0.0.1:8000 --model Qwen/Qwen3-0.6B --adapter out/adapter --candidates out/step-10",
        ),
        "conformance": (
            "conformance --trainer agentrl",
            "conformance --trainer trl --python .venv-peers/bin/python --case grader-fails --json",
        ),
        "vllm-plugin": ("vllm-plugin",),
    },
    "This installation": {
        "list": ("list environments",),
        "keys": ("keys", "keys rollout"),
        "bench": ("bench loop",),
    },
}


class OrderedCommands(TyperGroup):
    """Lists commands in the order of `GROUPS`; Typer lists groups of commands first, then the order of registration."""

    def list_commands(self, ctx: Any) -> list[str]:
        command_order = [command_name for commands in GROUPS.values() for command_name in commands]
        # `index` raises for a command without a place in the list: who adds one has to decide where a newcomer finds
        # it.
        return sorted(super().list_commands(ctx), key=command_order.index)


def arrange(app: typer.Typer) -> None:
    """Give each command its group and its examples."""
    help_by_command = {
        command_name: (panel_title, examples)
        for panel_title, commands in GROUPS.items()
        for command_name, examples in commands.items()
    }
    for command in [*app.registered_commands, *app.registered_groups]:
        command_name = str(command.name or getattr(command.callback, "__name__", "")).replace("_", "-")
        if command_name in help_by_command:
            command.rich_help_panel, examples = help_by_command[command_name]
            help_text = " ".join((command.help or (command.callback and command.callback.__doc__) or "").split())
            if help_text:  # the list has room for a sentence; the command's own help shows all
                command.short_help = help_text.split(". ")[0].removesuffix(".")
            heading = "Example:" if len(examples) == 1 else "Examples:"
            command.epilog = "\n\n".join([heading, *(f"agentrl {example}" for example in examples)])
