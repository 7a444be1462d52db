"""The groups in which `agentrl --help` lists the commands, and two examples of each, which its own help ends with."""

from __future__ import annotations

from typing import Final

import typer

GROUPS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "Train": {
        "train": ("train examples/tiny_coder.toml --view", "train --resume runs/tiny_coder --set train.steps=200"),
        "eval": ("eval runs/mine --n 64 --show 3", "eval agentrl/smollm2-135m --env agentrl/Calculator-v0"),
        "sft": ("sft warm_start.toml", "sft warm_start.toml --set train.lr=1e-5 --overwrite"),
        "demos": (
            "demos agentrl/Calculator-v0 --out demos.jsonl",
            "demos agentrl/CodeRepair-v0 --n 200 --mistakes 0.5 --out demos.jsonl",
        ),
        "export": ("export runs/mine --hf out/model", "export runs/mine --hf out/model --step 40 --merge"),
        "submit": (
            "submit run.toml --address http://head:8265",
            "submit run.toml --address http://head:8265 --set train.steps=200",
        ),
    },
    "A run under way": {
        "runs": ("runs", "runs /data/runs --json"),
        "status": ("status runs/mine", "status runs/mine --json"),
        "health": ("health runs/mine", "health runs/mine --json"),
        "view": ("view runs", "view --demo --open"),
        "metrics": ("metrics runs", "metrics runs/mine --port 9100"),
        "logs": ("logs runs/mine learner -n 50", "logs runs/mine --follow"),
        "tasks": ("tasks runs/mine --failed", "tasks runs/mine --json"),
        "rewards": ("rewards runs/mine", "rewards runs/mine --json"),
        "scale": ("scale runs/mine --workers 2", "scale runs/mine --engines 3 --workers 4"),
        "pause": ("pause runs/mine", "pause runs/mine --now"),
        "resume": ("resume runs/mine", "resume runs/other"),
        "set": ("set runs/mine train.lr=1e-6", "set runs/mine buffer.max_lag=2 rollout.max_running=64"),
        "requeue": ("requeue runs/mine --failed", "requeue runs/mine --group 12 --group 31 --dry-run"),
        "stop": ("stop runs/mine", "stop runs/mine --deadline-s 600"),
    },
    "Look into a run": {
        "audit": ("audit runs/mine", "audit runs/mine --json"),
        "trace": ("trace runs/mine", "trace runs/mine --otlp http://localhost:4318/v1/traces"),
        "retrain": (
            "retrain runs/mine --step 12",
            "retrain runs/mine --step 12 --set algo.clip_low=0.1 --dump runs/mine/tokens/12.jsonl",
        ),
        "rescore": ("rescore runs/mine --source judge", "rescore runs/other --source style"),
        "fork": ("fork runs/mine 12 --turn 3", "fork runs/mine 12 --turn 3 --k 8"),
        "export-episodes": (
            "export-episodes runs/mine --out best.jsonl --format messages --best-of 8",
            "export-episodes runs/mine --out episodes.parquet --format parquet --min-outcome 1",
        ),
        "import-episodes": (
            "import-episodes runs/other episodes.zst",
            "import-episodes runs/other episodes.zst --without-snapshots",
        ),
        "store": ("store --help", "store copy --help"),
    },
    "Plan": {
        "plan": ("plan run.toml --gpu h100", "plan run.toml --gpu l40s --price 1.2 --json"),
        "simulate": ("simulate run.toml --gpus 8", "simulate --from runs/mine --max-lag 0,1,2,4"),
        "advise": ("advise runs/mine", "advise runs/mine --gpus 8 --json"),
        "chaos": ("chaos run.toml --faults 5", "chaos run.toml --only kill:worker --out runs/hurt"),
    },
    "Environments": {
        "new": ("new env my_env", "new env --help"),
        "play": ("play agentrl/Calculator-v0", "play agentrl/Nim-v0 --seed 3"),
        "validate": ("validate agentrl/CodeRepair-v0", "validate agentrl/CodeRepair-v0 --n 100 --seed 7"),
        "list": ("list", "list environments --json"),
        "show": ("show agentrl/Calculator-v0", "show calculator"),
    },
    "Engines": {
        "serve": ("serve agentrl/smollm2-135m", "serve out/model --kind vllm --gpus 0,1 --port 8001"),
        "fleet": ("fleet fleet.toml", "fleet tenants.toml"),
        "vllm-plugin": ("vllm-plugin", "vllm-plugin /opt/agentrl-plugin"),
    },
    "This installation": {
        "doctor": ("doctor", "doctor --json"),
        "keys": ("keys rollout", "keys --page"),
        "bench": ("bench loop", "bench engine --help"),
    },
}


def arrange(app: typer.Typer) -> None:
    """Give each command its group and its examples."""
    of = {name: (group, examples) for group, commands in GROUPS.items() for name, examples in commands.items()}
    for one in [*app.registered_commands, *app.registered_groups]:
        name = str(one.name or getattr(one.callback, "__name__", "")).replace("_", "-")
        if name in of:
            one.rich_help_panel, examples = of[name]
            one.epilog = "\n\n".join(["Examples:", *(f"agentrl {line}" for line in examples)])
