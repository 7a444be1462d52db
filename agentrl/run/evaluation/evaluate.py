"""`agentrl.evaluate`: one call for a model, a run or a server. Owns the choice; `of_checkpoint` and `of_endpoint` do
the work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import httpx

from agentrl import notices
from agentrl.config.sections import check_url
from agentrl.engine.scoring_client import ScoringClient
from agentrl.errors import EngineUnavailable, UsageError
from agentrl.host.janitor import OwnedFolder
from agentrl.run import trainer
from agentrl.run.dataset import reference_of
from agentrl.run.evaluation import of_endpoint
from agentrl.run.evaluation.held_out import EvalResult
from agentrl.run.supervisor import check_no_loop
from agentrl.run.task_sources import held_out_rows

_TASKS = 256  # of an environment whose tasks have no end
_MODELS_S = 10.0  # how long a server may take to name its models


def evaluate(
    model: str | Path,
    env: str | type | None = None,
    n: int | None = None,
    *,
    name: str | None = None,
    api_key: str | None = None,
    concurrency: int = 16,
    settings: Sequence[str] = (),
    out: Path | str | None = None,
) -> list[EvalResult]:
    """Play `n` held-out tasks of each set (None: as many as it has, all rows of a file, or 256) and return the means,
    one result a set. No training.

    `model` is a run's folder (its newest checkpoint is measured, by default on the run's environment) or its file (the
    model that it begins with), a model's folder or id, or the http(s) URL of a server with an OpenAI-compatible API.
    Only there `name` counts, by which the server knows the model (None: its only one), `api_key`, and `concurrency`,
    the episodes at once.
    `env` is an id, a reference or a class; `settings` are those of a run file, as `section.key=value`. The episodes are
    kept in the folder `out`, which `agentrl.load_run` reads; of a server in `out`/results.jsonl, and what is there is
    not played again.

    Raises UsageError for what cannot be measured, RunFailed if no episode of a server could be played."""
    check_no_loop("agentrl.evaluate")
    out_folder = None if out is None else Path(out)
    if env is not None and not isinstance(env, str):
        env = reference_of(env, out_folder or Path("runs/evaluation"))
    if not str(model).startswith(("http://", "https://")):
        if name is not None or api_key is not None:
            raise UsageError(f"agentrl.evaluate: name and api_key are for a server's URL, and {model} is none")
        return trainer.measure(model, env, n, settings, out=out_folder)
    if env is None:
        raise UsageError(f"agentrl.evaluate: {model} is a server: name the environment, env=…")
    server_url = str(model)
    check_url("model", server_url)
    return [
        of_server(
            server_url, name or only_model(server_url, api_key), env, n, settings, out_folder, api_key, concurrency
        ),
    ]


def of_server(
    url: str,
    name: str,
    env: str,
    n: int | None,
    settings: Sequence[str],
    out: Path | None,
    api_key: str | None,
    concurrency: int,
) -> EvalResult:
    """Measure the model `name` of a server; a line for each episode goes to stderr."""
    run_config = of_endpoint.configured(name, env, settings)
    scoring_client = ScoringClient(url, model=name, api_key=api_key, concurrency=concurrency)
    row_count = held_out_rows(run_config)
    if row_count is not None and n is not None and n > row_count:
        notices.note("held-out rows", f"n = {n} asks {row_count} rows more than once each: leave n out")
    endpoint = of_endpoint.Endpoint(
        client=scoring_client, concurrency=concurrency, options=of_endpoint.sampling(run_config)
    )
    with closing(OwnedFolder(prefer_memory=False)) as owned_folder:
        return of_endpoint.evaluate(
            run_config,
            endpoint,
            n or row_count or _TASKS,
            out or owned_folder.path,
            on_result=lambda row: print(of_endpoint.line(row), file=sys.stderr),
        )


def only_model(url: str, api_key: str | None = None) -> str:
    """The one model of a server. Raises UsageError if it has several, EngineUnavailable if it does not answer."""
    models_url = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        response = httpx.get(models_url, headers=headers, timeout=_MODELS_S)
        response.raise_for_status()
        model_names = [str(model_entry["id"]) for model_entry in response.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise EngineUnavailable(f"{models_url} does not say which models there are ({error}): give name=…") from error
    # Never the first of several: servers list adapters and aliases beside the model, in any order, and the wrong one
    # would be measured without a word.
    if len(model_names) != 1:
        raise UsageError(f"{url} has the models {', '.join(model_names) or 'none'}: give one of them, name=…")
    return model_names[0]
