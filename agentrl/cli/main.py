"""The command line: a thin shell over `agentrl.run`. Errors of ours become one line and their exit code.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.markup import escape
from rich.table import Table

from agentrl import registry
from agentrl.cli import tables
from agentrl.cli.canary import canary
from agentrl.cli.command_groups import OrderedCommands, arrange
from agentrl.cli.compare import compare
from agentrl.cli.completion import environment_ids, run_folders
from agentrl.cli.conformance import conformance
from agentrl.cli.demo import demo
from agentrl.cli.demos import demos
from agentrl.cli.episodes import add_commands, store
from agentrl.cli.health import health
from agentrl.cli.offline import export, retrain, sft, trace
from agentrl.cli.plan import plan, simulate
from agentrl.cli.record import record
from agentrl.cli.rewards import rescore, rewards
from agentrl.cli.run import logs, scale, stop, submit, tasks
from agentrl.cli.server_key import server_key
from agentrl.cli.status import status
from agentrl.cli.steer import pause, requeue, resume, set_
from agentrl.cli.strict import Strict
from agentrl.cli.validate import validate
from agentrl.cli.view import beside, metrics, view
from agentrl.errors import AgentRLError, UsageError
from agentrl.host import json_log
from agentrl.host.quick_imports import quick_imports

if TYPE_CHECKING:
    from agentrl.config import EngineSettings
    from agentrl.config.reference import Key
    from agentrl.run.evaluation.held_out import EvalResult

app = typer.Typer(
    cls=OrderedCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train language-model agents with reinforcement learning.",
)
_new = typer.Typer(no_args_is_help=True, help="Start a package of your own.")
app.add_typer(_new, name="new")
add_commands(app)
for command in (
    demo,
    status,
    health,
    view,
    metrics,
    logs,
    tasks,
    scale,
    pause,
    requeue,
    resume,
    stop,
    submit,
    rewards,
    rescore,
    compare,
    validate,
    simulate,
    plan,
    retrain,
    trace,
    demos,
    sft,
    export,
    canary,
    conformance,
    record,
):
    app.command()(command)
app.command("set")(set_)
app.add_typer(store, name="store")
_SETTINGS = Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value")]
_LOG_FORMAT = Annotated[
    Literal["text", "json"],
    typer.Option(envvar=json_log.VARIABLE, help="json: one object a line, in the logs of all processes too"),
]
_STATE = Annotated[Path, typer.Option(help="The folder of a training server's calls and weights")]


def _log_as(form: Literal["text", "json"], process: str) -> None:
    os.environ[json_log.VARIABLE] = form
    if json_log.is_on():
        json_log.divert(process)


def main() -> None:
    """Entry point of the `agentrl` command. It resolves references such as `my_env:MyEnv` in the working folder too."""
    sys.path.append(str(Path.cwd()))  # last: it shadows nothing that is installed
    try:
        app()
    except AgentRLError as error:
        _fail(str(error), error.exit_code, at_once=error.at_once)
    except BaseExceptionGroup as group:  # a Ctrl-C that came while tasks ran
        if group.split(KeyboardInterrupt)[1] is not None:
            raise
        raise SystemExit(130) from None


def _fail(line: str, code: int, *, at_once: bool = False) -> NoReturn:
    if error_file := os.environ.get("AGENTRL_ERROR_FILE"):  # for a parent that keeps us alive: this end is on purpose
        Path(error_file).write_text(line + "\n", encoding="utf-8")
    json_log.tell(f"agentrl: {line}", logging.ERROR)
    # Threads that hang (a library's, in C) would keep the interpreter from ending. The line above has said all there is
    # to say.
    if at_once:
        sys.stdout.flush()
        os._exit(code)
    raise SystemExit(code)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        from agentrl.host.installation import DISTRIBUTION

        print(f"agentrl {version(DISTRIBUTION)}")
        raise typer.Exit


_VERSION = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version")]


@app.callback()
def _of_all(version: _VERSION = False) -> None:
    """Train language-model agents with reinforcement learning."""


@app.command()
def train(
    file: Annotated[Path | None, typer.Argument(help="The run file (TOML)")] = None,
    settings: _SETTINGS = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/NAME")] = None,
    resume: Annotated[
        Path | None, typer.Option(autocompletion=run_folders, help="Continue the run in this directory")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the run that is there")] = False,
    alive: Annotated[bool, typer.Option("--keep-alive", help="Go on by itself after a crash or a hang")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Try the file: two steps of a tiny random model")] = False,
    small: Annotated[bool, typer.Option("--small", help="Learn on this CPU, with a model of 135 M parameters")] = False,
    page: Annotated[bool, typer.Option("--view", help="Serve a web page of the run, as agentrl view does")] = False,
    log_format: _LOG_FORMAT = "text",
    strict: Strict = False,
) -> None:
    """Train from a run file, or continue a run."""
    _log_as(log_format, "supervisor")
    from agentrl import config as configuration
    from agentrl.run.reporting import report
    from agentrl.run.reporting.live_view import LiveView
    from agentrl.run.trainer import Trainer

    if (file is None) == (resume is None):
        raise UsageError("give either a run file or --resume RUN_DIR")
    if resume is not None and (out or overwrite):
        raise UsageError("--resume continues the run in its own folder: leave out --out and --overwrite")
    model_size = "tiny" if tiny else "small" if small else None
    if tiny and small:
        raise UsageError("--tiny and --small each take another model: leave out one of them")
    if model_size and (resume is not None or alive):
        raise UsageError(f"--{model_size} is for a run file: give one, without --resume and --keep-alive")
    if alive:
        from agentrl.run.processes.keep_alive import keep_training

        # The words as they were typed go to the child, not the parsed values: so each option means there what it means
        # here, those that come later included.
        command_words = [command_word for command_word in sys.argv[1:] if command_word != "--keep-alive"]
        raise SystemExit(keep_training(command_words, file, settings, out, resume))
    if resume is not None:
        run_path = resume
        with beside(run_path, serves=page):
            run_summary = Trainer.resume(resume, LiveView(), settings=settings or [])
    else:
        assert file is not None
        run_config = configuration.load(file, settings)
        run_path = out or Path("runs") / (f"{run_config.name}-{model_size}" if model_size else run_config.name)
        if model_size:
            from agentrl.offline import tiny_run

            model_folder = run_path.with_name(f"{run_path.name}-model")
            typed_settings = settings or []
            run_config = (
                tiny_run.shrunk(run_config, model_folder, typed_settings)
                if tiny
                else tiny_run.on_cpu(run_config, typed_settings)
            )
        with beside(run_path, serves=page):
            run_summary = Trainer(config=run_config, out=run_path, overwrite=overwrite).train(LiveView())
    if json_log.is_on():
        with json_log.about(run=str(run_path), summary=run_summary):
            json_log.tell("the run is trained")
    else:
        report.show(tables.console(), run_path, run_summary)
    if run_summary["unmeasured"]:
        correction = f"fix it and run: agentrl eval {run_path}"
        _fail(f"the run is trained, and not measured: {run_summary['unmeasured']}; {correction}", 1)


@app.command("eval")
def evaluate(
    what: Annotated[
        str | None,
        typer.Argument(
            autocompletion=run_folders, help="A run directory or file, a model folder, a registered or hub id"
        ),
    ] = None,
    env: Annotated[
        str | None, typer.Option(autocompletion=environment_ids, help="Environment id; default: the run's own")
    ] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Tasks; default: those of the set, all rows or 256")] = None,
    settings: _SETTINGS = None,
    out: Annotated[Path | None, typer.Option(help="Keep the episodes in this run directory")] = None,
    show: Annotated[int, typer.Option(min=0, help="Print the first N episodes of each set, word for word")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    endpoint: Annotated[str | None, typer.Option(help="Ask this OpenAI-compatible server instead")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at that server")] = None,
    key_variable: Annotated[str | None, typer.Option(help="With the server's key; default: OPENAI_API_KEY")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Episodes at once there; default: 16")] = None,
    strict: Strict = False,
) -> None:
    """Measure a policy on held-out tasks: success, turns, tokens. With --endpoint URL --model NAME --env ID, measure a
    model on any server; episodes that --out holds already are not played again."""
    if show and as_json:
        raise UsageError("--show prints texts, --json one document: leave out one of them")
    if endpoint is not None:
        api_key = server_key(key_variable)
        eval_results = [
            _evaluate_endpoint(endpoint, what, model, env, n, settings or [], out, api_key, concurrency or 16, show)
        ]
    else:
        endpoint_options = {"--model": model, "--key-variable": key_variable, "--concurrency": concurrency}
        if misplaced_options := [
            option_name for option_name, option_value in endpoint_options.items() if option_value is not None
        ]:
            raise UsageError(
                f"{', '.join(misplaced_options)}: only with --endpoint URL; leave it out for a run or a model folder"
            )
        eval_results = _evaluate_model(what, env, n, settings or [], out, show)
    if as_json:
        print(json.dumps([asdict(eval_result) for eval_result in eval_results], indent=2))
    else:
        _show_evaluation(eval_results, out)
    # A measurement without one scored episode is not a success rate of 0, and a script that goes on by the exit code
    # must not take it for one.
    if not all(eval_result.n for eval_result in eval_results):
        raise SystemExit(1)


def _show_evaluation(results: list[EvalResult], out: Path | None) -> None:
    from agentrl.run.evaluation.held_out import format_pass
    from agentrl.run.reporting import failed_tasks

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    result_table = Table("set", "episodes", "success", "outcome", "turns", "tokens", "failed")
    for evaluation in results:
        interval = (
            f" [{evaluation.pass_at['1']['low']:.2f}, {evaluation.pass_at['1']['high']:.2f}]"
            if evaluation.pass_at
            else ""
        )
        mean_cells = (
            number(evaluation.success, 3) + interval,
            number(evaluation.outcome, 3),
            number(evaluation.turns, 2),
            number(evaluation.tokens, 1),
        )
        result_table.add_row(evaluation.name, str(evaluation.n), *mean_cells, str(evaluation.failed))
    tables.console().print(result_table)
    for evaluation in results:
        if pass_texts := [
            format_pass(sample_count, estimate)
            for sample_count, estimate in evaluation.pass_at.items()
            if sample_count != "1"
        ]:
            pass_texts += [
                format_pass(sample_count, estimate, sign="^") for sample_count, estimate in evaluation.pass_all.items()
            ]
            print(f"{evaluation.name}: {', '.join(pass_texts)}")
    if task_rows := [task_row for eval_result in results for task_row in eval_result.failed_tasks]:
        tables.console().print(failed_tasks.table(task_rows, most=failed_tasks.MOST_ROWS))
        log_hint = "--out FOLDER keeps the episodes and the logs" if out is None else f"agentrl logs {out} worker-0"
        print(f"with tracebacks: {log_hint}")


def _show_episode(title: str, text: str) -> None:
    tables.console().print(f"{title}: {text}", markup=False, highlight=False, soft_wrap=True)


def _evaluate_model(
    what: str | None, env: str | None, n: int | None, settings: list[str], out: Path | None, show: int
) -> list[EvalResult]:
    from agentrl.host.janitor import OwnedFolder
    from agentrl.run.evaluation.of_checkpoint import measured
    from agentrl.run.reporting.report import held_out_episodes
    from agentrl.run.run_folder import RunDir
    from agentrl.run.trainer import evaluate as measure
    from agentrl.store import RunStore

    if what is None:
        raise UsageError("name a run directory or a model; or give --endpoint URL --model NAME --env ID")
    run_config, adapters = measured(what, env, n, settings)
    with closing(OwnedFolder(prefer_memory=False)) as owned_folder:
        run_folder = RunDir(out or owned_folder.path / "run")
        eval_results = measure(run_config, adapters, out=run_folder.path)
        with RunStore.read(run_folder.store_path) as run_store:
            for held_out in run_config.eval.sets if show else ():
                for episode_title, episode_text in held_out_episodes(run_store, held_out.name, "now", show):
                    _show_episode(episode_title, episode_text)
        return eval_results


def _evaluate_endpoint(
    url: str,
    what: str | None,
    model: str | None,
    env: str | None,
    n: int | None,
    settings: list[str],
    out: Path | None,
    key: str | None,
    concurrency: int,
    show: int,
) -> EvalResult:
    from agentrl.config.sections import check_url
    from agentrl.host.janitor import OwnedFolder
    from agentrl.run.evaluation import of_endpoint as endpoint
    from agentrl.run.evaluation.evaluate import of_server
    from agentrl.run.reporting.report import quoted

    if what is not None or model is None or env is None:
        raise UsageError("--endpoint URL goes with --model NAME and --env ID, and with no run and no folder")
    check_url("--endpoint", url)
    with closing(OwnedFolder(prefer_memory=False)) as owned_folder:
        result_folder = out or owned_folder.path
        eval_result = of_server(url, model, env, n, settings, result_folder, key, concurrency)
        for episode_row, conversation in endpoint.conversations(result_folder, show):
            _show_episode(endpoint.line(episode_row), "\n\n" + "\n".join(quoted(conversation)))
        return eval_result


@app.command()
def audit(
    path: Annotated[Path, typer.Argument(autocompletion=run_folders, help="A run directory")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Check that a run kept the laws; exit code 1 if one is broken."""
    from agentrl.run.run_folder import RunDir
    from agentrl.store import RunStore
    from agentrl.store.audit import audit as check

    run_folder = RunDir.open(path)
    with RunStore.read(run_folder.store_path) as run_store:
        audit_report = check(run_store, run_folder.checkpoints)
    if as_json:
        print(audit_report.to_json())
    else:
        audit_table = Table("checked", "found")
        for check_name, check_result in json.loads(audit_report.to_json()).items():
            audit_table.add_row(check_name, tables.lines(check_result))
        tables.console().print(audit_table)
    if audit_report.violations:
        raise SystemExit(1)


@app.command()
def play(
    env: Annotated[str, typer.Argument(autocompletion=environment_ids, help="Environment id")],
    seed: Annotated[int, typer.Option(min=0)] = 0,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Constructor argument: key=value")] = None,
) -> None:
    """Play the policy's part yourself."""
    from agentrl.cli.play import play as play_episode
    from agentrl.config import apply_override

    env_kwargs: dict[str, Any] = {}
    for assignment in settings or []:
        apply_override(env_kwargs, assignment)
    play_episode(env, seed=seed, kwargs=env_kwargs, read=input, write=print)


@_new.callback()
def _of_new() -> None:
    """Keeps `env` a command of its own while it is the only one."""


@_new.command("env")
def new_env(
    name: Annotated[str, typer.Argument(help="Name of the package, such as my_env")],
    out: Annotated[Path | None, typer.Option(help="Its folder; default ./NAME")] = None,
) -> None:
    """Make a package with an environment, tools, tests and a run file."""
    from agentrl.scaffold import new_env as write

    package_folder = out or Path(name)
    environment_id, written_paths = write(name, package_folder)
    for written_path in written_paths:
        print(written_path)
    print(f"{environment_id} is ready: cd {package_folder} && pip install -e '.[dev]' && pytest")


@app.command("list")
def list_ids(
    kind: Annotated[
        registry.Kind | None,
        typer.Argument(help="Only of this kind"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """List everything installed that has an id: environments, tools, sandboxes, models, algorithms, trackers …"""
    from agentrl.cli.registered_ids import KINDS, entries

    listed_kinds = KINDS if kind is None else (kind,)
    if as_json:
        id_rows = [
            {"kind": listed_kind, "id": id_entry.id, "summary": id_entry.summary}
            for listed_kind in listed_kinds
            for id_entry in entries(listed_kind)
        ]
        print(json.dumps(id_rows, indent=2))
        return
    id_table = Table("kind", "id", "what it is")
    for listed_kind in listed_kinds:
        for id_entry in entries(listed_kind):
            id_table.add_row(listed_kind, escape(id_entry.id), escape(id_entry.summary))
    tables.console().print(id_table)


@app.command()
def keys(
    of: Annotated[str, typer.Argument(help="Only keys with this beginning, such as rollout")] = "",
    every: Annotated[bool, typer.Option("--all", help="Every key, in the order of the tables")] = False,
    page: Annotated[
        bool, typer.Option("--page", help="Every key as Markdown, as docs/reference/run-file.md has it")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Every key as JSON")] = False,
) -> None:
    """List the keys of a run file that matter first, by the question that they answer."""
    from agentrl.config import reference as run_file

    if page:
        print(run_file.page(), end="")
        return
    if not (of or every or as_json):
        for question, first_keys in run_file.first_keys().items():
            _print_keys(first_keys, title=question)
        tables.console().print("agentrl keys --all lists every key, agentrl keys rollout those of one table")
        return
    chosen_keys = [config_key for config_key in run_file.all_keys() if config_key.name.startswith(of)]
    if not chosen_keys:
        raise UsageError(f"no key begins with {of!r}: agentrl keys --all lists every key")
    if as_json:
        tables.print_json([asdict(config_key) for config_key in chosen_keys])
    else:
        _print_keys(chosen_keys)


def _print_keys(keys: Sequence[Key], title: str = "") -> None:
    key_table = Table("key", "value", "default", "meaning", title=title, title_justify="left")
    for config_key in keys:
        key_table.add_row(
            *map(escape, (config_key.name, config_key.kind.replace("`", ""), config_key.default, config_key.meaning))
        )
    tables.console().print(key_table)


@app.command()
def show(
    id: Annotated[str, typer.Argument(help="An id that agentrl list shows, or module:Class, or file.py:Class")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Show what an id stands for and which arguments it takes."""
    from agentrl.cli.registered_ids import find

    id_entry = find(id)
    if as_json:
        tables.print_json(asdict(id_entry))
        return
    console = tables.console()
    console.print(
        f"{id_entry.id}  ({id_entry.kind}, {id_entry.target})\n\n{id_entry.text}\n", markup=False, highlight=False
    )
    argument_table = Table("argument", "kind", "default")
    for argument in id_entry.arguments:
        argument_table.add_row(*map(escape, (argument.name, argument.kind, argument.default or "required")))
    if id_entry.open:
        argument_table.add_row("…", "", "and whatever it passes on")
    if argument_table.row_count:
        console.print(argument_table)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False) -> None:
    """List what this machine has, and how to get what is missing."""
    from agentrl.cli.doctor import examine

    findings = examine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    part_table = Table("part", "", "seen", "what to do")
    for finding in findings:
        status_mark = "[green]ok[/]" if finding.works else "[red]missing[/]" if finding.needed else "[yellow]-[/]"
        part_table.add_row(
            finding.part, status_mark, escape(finding.seen), escape("" if finding.works else finding.hint)
        )
    if not as_json:
        tables.console().print(part_table)
    if any(finding.needed and not finding.works for finding in findings):
        raise SystemExit(1)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A model folder or a registered model id")],
    kind: Annotated[Literal["embedded", "vllm"], typer.Option(help="Which engine")] = "embedded",
    port: Annotated[int, typer.Option(help="0 takes a free one", min=0, max=65535)] = 8000,
    host: str = "127.0.0.1",
    threads: Annotated[int | None, typer.Option(min=1, help="Of arithmetic; default: as many as cores idle")] = None,
    max_context: Annotated[int, typer.Option(min=2, help="Tokens of prompt and answer together")] = 2048,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests computed at once")] = 128,
    kv_cache_mb: Annotated[int, typer.Option(min=1)] = 512,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="dtype of its weights")] = "float32",
    gpus: Annotated[str, typer.Option(help="The GPUs to split its layers over, as 0,1 (vLLM)")] = "",
    lora_rank: Annotated[int, typer.Option(min=0, help="Take adapters up to this rank (vLLM; for --training 32)")] = 0,
    lora_targets: Annotated[str, typer.Option(help="On these layers alone, as q_proj,v_proj (vLLM on a CPU)")] = "",
    sync: Annotated[Literal["auto", "nccl", "ipc"], typer.Option(help="How it takes new weights (vLLM)")] = "auto",
    routed_experts: Annotated[bool, typer.Option(help="Tell which experts a mixture chooses (vLLM)")] = False,
    kept_sets: Annotated[bool, typer.Option(help="Tell the set that each token is drawn from (vLLM)")] = False,
    weights_from: Annotated[
        list[str] | None,
        typer.Option(help="A folder or URL that runs' weights may come from, beside /dev/shm, /tmp and this folder"),
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="The environment variable with its key; default: a new key, printed")
    ] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Let everybody who reaches the address use it")] = False,
    training: Annotated[bool, typer.Option("--training", help="Train too: a server for clients of Tinker")] = False,
    state: _STATE = Path("runs/training-server"),
    device: Annotated[str, typer.Option(help="Where a training server trains: cpu, cuda, cuda:1")] = "cpu",
    log_format: _LOG_FORMAT = "text",
) -> None:
    """Serve a model until Ctrl-C. Says how a run attaches, and how `agentrl eval --endpoint` asks it; with --training,
    how a client of Tinker trains adapters on it."""
    _log_as(log_format, "serve")
    from agentrl.config import EngineSettings
    from agentrl.engine.running_engine import Door
    from agentrl.models.resolve import model_dir
    from agentrl.run.serving.serve import key_of
    from agentrl.run.serving.serve import serve as serve_model

    if kind == "embedded":
        _refuse_options_of_vllm(gpus, lora_rank, sync, routed_experts)
    gpu_numbers = _gpu_numbers(gpus)
    engine_settings = EngineSettings(
        kind=kind,
        replicas=[gpu_numbers] if gpu_numbers else 1,
        threads=threads or "auto",
        max_batch=max_batch,
        kv_cache_mb=kv_cache_mb,
        dtype=dtype,
        sync=sync,
        routed_experts=routed_experts,
        weights_from=weights_from or [],
    )
    if training:
        _refuse_options_of_runs(lora_targets, sync, routed_experts, kept_sets, weights_from)
        _serve_training(
            engine_settings,
            lora_rank,
            model=model,
            state=state,
            host=host,
            port=port,
            key_variable=api_key_env,
            no_key=no_key,
            max_context=max_context,
            device=device,
        )
        return
    target_layers = tuple(layer_name for layer_name in lora_targets.split(",") if layer_name)
    serve_model(
        model_dir(model),
        engine_settings,
        door=Door(host=host, port=port, key=key_of(api_key_env, none=no_key)),
        name=model,
        key_variable=api_key_env,
        max_context=max_context,
        lora_rank=lora_rank,
        lora_targets=target_layers,
        kept_sets=kept_sets,
    )


def _gpu_numbers(gpus: str) -> list[int]:
    from agentrl.engine.vllm.launch import check_gpus

    if not re.fullmatch(r"(\d+(,\d+)*)?", gpus):
        raise UsageError(f"--gpus {gpus!r}: write their numbers as 0,1")
    gpu_numbers = [int(gpu_number) for gpu_number in gpus.split(",") if gpu_number]
    if gpu_numbers:
        check_gpus(gpu_numbers)
    return gpu_numbers


def _refuse_options_of_vllm(gpus: str, lora_rank: int, sync: str, routed_experts: bool) -> None:
    """For `--kind embedded`: raises UsageError for an option that would have no effect on this engine."""
    if gpus:
        raise UsageError(f"--gpus {gpus} is for --kind vllm; the embedded engine has none")
    if lora_rank:
        raise UsageError("--lora-rank is for --kind vllm; the embedded engine makes no room beforehand: leave it out")
    if sync != "auto":
        raise UsageError(f"--sync {sync} is for --kind vllm; the embedded engine takes files")
    if routed_experts:
        raise UsageError("--routed-experts is for --kind vllm; the embedded engine has no mixtures")


def _refuse_options_of_runs(
    lora_targets: str, sync: str, routed_experts: bool, kept_sets: bool, weights_from: list[str] | None
) -> None:
    run_options = {
        "--lora-targets": lora_targets,
        "--sync": sync != "auto",
        "--routed-experts": routed_experts,
        "--kept-sets": kept_sets,
        "--weights-from": weights_from,
    }
    if typed_options := [option_name for option_name, option_value in run_options.items() if option_value]:
        correction = "leave it out: the server trains the adapters that its engine gets"
        raise UsageError(f"{typed_options[0]} is for engines of runs, not for --training: {correction}")


def _serve_training(engine: EngineSettings, lora_rank: int, **settings: Any) -> None:
    with quick_imports():
        from agentrl.run.training_server.training_server import TrainingServerSettings, serve_training

    rank_settings = {"lora_rank": lora_rank} if lora_rank else {}
    serve_training(TrainingServerSettings(engine=engine, **rank_settings, **settings))


@app.command("vllm-plugin")
def vllm_plugin(
    folder: Annotated[Path | None, typer.Argument(help="Where to; default ~/.cache/agentrl/vllm-plugin")] = None,
) -> None:
    """Copy our vLLM plugin into a folder and print its path: PYTHONPATH=$(agentrl vllm-plugin) vllm serve …"""
    from agentrl.engine.vllm.launch import carry_plugin

    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = (folder or cache_folder / "agentrl" / "vllm-plugin").resolve()
    try:
        carry_plugin(folder)
    except OSError as error:
        raise UsageError(f"cannot write to {str(folder)!r} ({error.strerror}): name another folder") from error
    print(folder)


# `agentrl bench NAME --help` is the benchmark's own help.
@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(
    context: typer.Context, name: Annotated[str, typer.Argument(help="loop, engine, weights, sandbox …")]
) -> None:
    """Run a benchmark of this source checkout. It gets all further arguments, `--help` too."""
    benchmark_folder = Path(__file__).resolve().parents[2] / "benchmarks"
    benchmarks = {
        script_path.stem: script_path
        for script_path in benchmark_folder.glob("*.py")
        if not script_path.stem.startswith("_")
    }
    benchmark_names = (
        ", ".join(sorted(benchmarks)) or "none: benchmarks come with a source checkout, not with the package"
    )
    if name in ("-h", "--help"):
        print(f"Usage: agentrl bench NAME [ARGS]; agentrl bench NAME --help says which. Benchmarks: {benchmark_names}")
        return
    if name not in benchmarks:
        raise UsageError(f"no benchmark {name!r}; known: {benchmark_names}")
    sys.stdout.flush()
    os.execv(
        sys.executable, [sys.executable, str(benchmarks[name]), *context.args]
    )  # in our place: it cannot outlive us


arrange(app)
