"""The package bfcl-eval's own runner on recorded answers, in a process of its own.

    python -m tests.parts.bfcl_oracle < answers.json > scores.json

`answers.json` has by category a list of rounds, each a list of `{"id": …, "result": …}` as a run of the package
records them. The answers go the package's whole way: its handler of OpenAI's models with function calls decodes them,
`evaluate_task` scores them and writes a file of scores, from which the failed tasks are read. Nothing of agentrl is
imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def stand_in(name: str, **variables: Any) -> None:
    """A module in the place of one that the package imports and does not use here."""
    module = ModuleType(name)
    vars(module).update(variables)
    sys.modules[name] = module


def imported(folder: str, models: dict[str, Any]) -> Any:
    """The package's runner, with a table of these models."""
    os.environ["BFCL_PROJECT_ROOT"], os.environ["OPENAI_API_KEY"] = folder, "none"
    stand_in("bfcl_eval.constants.model_config", MODEL_CONFIG_MAPPING=models)
    stand_in("tree_sitter", Language=lambda *_: None, Parser=lambda: SimpleNamespace(set_language=lambda _: None))
    stand_in("tree_sitter_java", language=lambda: None)
    stand_in("tree_sitter_javascript", language=lambda: None)
    stand_in("overrides", final=lambda method: method)
    # The client of a server that is not asked, and a library for tables that are not written; slow to import.
    stand_in("openai", OpenAI=lambda **_: None, RateLimitError=ConnectionError)
    stand_in("pandas")
    from bfcl_eval.eval_checker import eval_runner
    from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler

    eval_runner.OpenAICompletionsHandler = OpenAICompletionsHandler
    return eval_runner


def main() -> None:
    rounds_by_category: dict[str, list[list[dict[str, Any]]]] = json.load(sys.stdin)
    models: dict[str, Any] = {}
    failed: dict[str, list[list[str]]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        runner = imported(folder, models)
        for category, rounds in rounds_by_category.items():
            failed[category] = []
            for number, answers in enumerate(rounds):
                # The executor keeps the objects of a model's episode for as long as its process lives, by the model's
                # name and the task's id: each round is another model.
                name = f"model{number}"
                models[name] = SimpleNamespace(
                    model_name=name, model_handler=runner.OpenAICompletionsHandler, is_fc_model=True,
                    underscore_to_dot=True, input_price=None, output_price=None,
                )  # fmt: skip
                scores = Path(folder) / "scores"
                runner.evaluate_task(
                    category, None, scores, answers, name, runner.get_handler(name), {}, allow_missing=True
                )
                (file,) = (scores / name).rglob(f"*_{category}_score.json")
                _, *lines = file.read_text(encoding="utf-8").splitlines()
                failed[category].append([json.loads(line)["id"] for line in lines])
    json.dump(failed, sys.stdout)


if __name__ == "__main__":
    main()
