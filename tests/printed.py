"""What each command prints, held word for word: `python -m tests.printed [COMMAND ...]` writes tests/printed/ anew.

One file per command has its scenarios: good ones on the recorded run that `agentrl view --demo` shows, and the mistakes
of a first day. A change of wording is then a line in a diff that somebody reads, and the other tests need not repeat
the words: they assert an error's class and fields.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path

from agentrl.view.recorded_run import recorded_run

sys.path.insert(0, str(Path(__file__).resolve().parent))
from commands import agentrl

FOLDER = Path(__file__).resolve().with_suffix("")
_WIDTH = 100
_RUN_FILE = """\
model = "agentrl/tiny-coder"

[env]
id = "agentrl/Calculator-v0"

[train]
steps = 2
"""
# The command lines of each command. RUN is a finished run of 24 steps, EMPTY a folder without one.
SCENARIOS: dict[str, tuple[str, ...]] = {
    "demo": ("demo --steps 3",),
    "train": (
        "train",
        "train nowhere.toml",
        "train run.toml --set train.step=3",
        "train run.toml --set train.lr=fast",
        "train run.toml --set env.id=agentrl/Calculater-v0",
        "train run.toml --set env.kwargs.level=9",
        "train run.toml --out RUN",
        "train --resume EMPTY",
    ),
    "eval": (
        "eval RUN --n 0",
        "eval EMPTY",
        "eval agentrl/tiny-coder",
        "eval agentrl/tiny-coder --env agentrl/None-v0",
    ),
    "view": ("view nowhere", "view RUN --port 99999"),
    "status": ("status RUN", "status .", "status EMPTY", "status nowhere"),
    "health": ("health RUN", "health EMPTY"),
    "pause": ("pause RUN", "pause EMPTY"),
    "resume": ("resume RUN", "resume EMPTY"),
    "stop": ("stop RUN", "stop EMPTY"),
    "show": (
        "show agentrl/Calculator-v0",
        "show calculator",
        "show bubblewrap",
        "show grpo",
        "show Calculator",
        "show RUN",
    ),
    "play": ("play agentrl/None-v0", "play agentrl/Calculator-v0 --seed x"),
    "validate": ("validate agentrl/Calculator-v0 --n 2", "validate agentrl/None-v0", "validate RUN"),
    "new": ("new env 1env", "new env made", "new env made"),
    "export": ("export RUN --hf out", "export EMPTY --hf out", "export RUN"),
    "sft": ("sft run.toml", "sft nowhere.toml"),
    "demos": (
        "demos agentrl/Calculator-v0 --n 2 --out demos.jsonl",
        "demos agentrl/Calculator-v0 --n 2 --out demos.jsonl",
    ),
    "submit": ("submit run.toml",),
    "set": ("set RUN train.lr=1e-6", "set RUN train.lr=fast", "set RUN model=other", "set EMPTY train.lr=1e-6"),
    "scale": ("scale RUN --workers 0", "scale RUN --workers 2", "scale RUN"),
    "requeue": ("requeue RUN --failed", "requeue RUN", "requeue RUN --group 999999 --dry-run"),
    "logs": ("logs RUN", "logs RUN learner"),
    "tasks": ("tasks RUN --failed",),
    "compare": ("compare --plan 500 --samples 4", "compare RUN", "compare RUN nowhere"),
    "rewards": ("rewards RUN",),
    "metrics": ("metrics nowhere",),
    "audit": ("audit RUN",),
    "trace": ("trace RUN", "trace EMPTY"),
    "export-episodes": (
        "export-episodes RUN --out best.jsonl --format messages --best-of 8",
        "export-episodes RUN --out best.csv --format csv",
    ),
    "fork": ("fork RUN 1 --turn 99", "fork RUN 999999 --turn 1"),
    "rescore": ("rescore RUN --source judge",),
    "retrain": ("retrain RUN --step 12", "retrain RUN --step 99"),
    "store": ("store copy RUN", "store copy EMPTY --to out.sqlite"),
    "plan": ("plan run.toml", "plan run.toml --gpu h99"),
    "simulate": ("simulate --from EMPTY", "simulate run.toml --gpus 0"),
    "serve": ("serve agentrl/tiny-coder --port 99999",),
    "canary": ("canary localhost --model agentrl/tiny-coder",),
    "conformance": ("conformance --trainer nobody", "conformance --case none"),
    "record": (
        "record --engine localhost --model agentrl/tiny-coder --out out",
        "record --engine http://127.0.0.1:9 --model agentrl/tiny-coder --out RUN",
    ),
    "vllm-plugin": ("vllm-plugin run.toml",),
    "list": ("list sandboxes", "list nothing"),
    "keys": ("keys bufer",),
    "bench": ("bench nothing",),
}
_VARYING: Mapping[str, str] = {
    r"\b\d+ d \d\d h ago": "SOME TIME ago",
    # Other tests of the process register environments.
    r"(?<=known: )agentrl/.*(?=; if its package is new)": "SOME IDS",
    # How the program was started: by pytest, by one of its workers, or by this module.
    r"(?<=^! Usage: )\S.*?agentrl(?= )|(?<=^! Try ')\S.*?agentrl(?= )": "agentrl",
}


@contextlib.contextmanager
def workplace() -> Generator[Path]:
    """A folder with a recorded run, an empty folder and a run file; it is the working directory meanwhile."""
    with tempfile.TemporaryDirectory() as name, recorded_run() as run, contextlib.chdir(name):
        shutil.copytree(run, "RUN")
        Path("EMPTY").mkdir()
        Path("run.toml").write_text(_RUN_FILE)
        yield Path(name)


def printed(command: str, folder: Path) -> str:
    """What the scenarios of a command print, one after the other in `folder`."""
    variables = {"COLUMNS": str(_WIDTH), "TERM": "dumb", "NO_COLOR": "1", "HOME": str(folder)}
    texts: list[str] = []
    for line in SCENARIOS[command]:
        finished = agentrl(*line.split(), env=variables)
        streams = finished.out + "".join(f"! {text}\n" for text in finished.err.splitlines())
        texts.append(f"$ agentrl {line}\n{streams}(exit {finished.code})\n")
    text = "\n".join(texts).replace(f"{folder}{os.sep}", "").replace(str(folder), ".")
    for pattern, word in _VARYING.items():
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    return "\n".join(line.rstrip() for line in text.split("\n"))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or SCENARIOS:
        with workplace() as place:
            (FOLDER / f"{name}.txt").write_text(printed(name, place))
