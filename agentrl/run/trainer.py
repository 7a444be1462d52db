"""Runs from Python: train, resume, evaluate. The command line is a thin shell over these.

from agentrl import Trainer
summary = Trainer(model="agentrl/tiny-coder", env="agentrl/CodeRepair-v0", config={"train": {"steps": 20}}).train()

Callbacks receive the events of a run, see `agentrl.run.callbacks.callback`.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import gymnasium

from agentrl import config as configuration
from agentrl import registry
from agentrl.config import RunConfig, league, machine_defaults
from agentrl.config.algorithms import by_reference
from agentrl.config.contradictions import contradictions
from agentrl.config.train import EXPERTS, HEADS, check_divides
from agentrl.engine.weight_sync import object_store
from agentrl.env.tools.parsers import FORMATS, get_format
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    EnvError,
    ModelError,
    StoreAway,
    UsageError,
    WeightSyncError,
    boundary,
)
from agentrl.host.installation import install_command
from agentrl.host.janitor import OwnedFolder
from agentrl.learner.checkpoints import digests
from agentrl.models.resolve import frozen_model_dir, model_dir, renderer_of, slot_dir
from agentrl.protocols import Rewarder
from agentrl.records import Task
from agentrl.registration import make
from agentrl.run import resume_overrides
from agentrl.run.callbacks.callback import Callback, check_callbacks
from agentrl.run.callbacks.delivery import telling
from agentrl.run.callbacks.tracker import hand_over, made
from agentrl.run.children.engine_process import check_arguments
from agentrl.run.dataset import TRL_ID, Rewards, Rows, Tools, document_of, reference_of, write_run_file
from agentrl.run.evaluation import held_out as evaluation
from agentrl.run.evaluation.of_checkpoint import Adapters, measured
from agentrl.run.preflight import check_limits, check_tasks
from agentrl.run.reporting import failed_tasks, report
from agentrl.run.reporting.live_view import LiveView, Warnings
from agentrl.run.reward_services import check_teachers
from agentrl.run.run_folder import RunDir
from agentrl.run.stop_request import StopRequest
from agentrl.run.supervisor import Interrupted, Supervisor, check_no_loop, run_to_end
from agentrl.run.take_orders import take_order
from agentrl.run.task_sources import first_tasks, name_shared_rows, task_source, with_held_out_sizes
from agentrl.store import RunStore
from agentrl.store.run_values import PHASE, TRAIN_STARTED_S

_PLAN_S = 120.0  # for a prediction of memory
_TRAINING = ("torch", "transformers", "safetensors", "peft", "matplotlib")  # the packages of the extra `train`


class View(AbstractContextManager["View"], Protocol):
    """Shows a run while it goes on; `LiveView` is one."""

    def tick(self, supervisor: Supervisor) -> None: ...


class Trainer:
    """Trains one model on one environment, or on a data set and reward functions.

    `env` is a registered id, a `module:Class` or `file.py:Class` reference, or an `Env` class. `reward` replaces the
    environment's outcome: a module-level `trajectory -> float`, or a reference to one or to a judge. `config` is a run
    file's path, its sections as a mapping, or a RunConfig.

    Without `env`: `dataset` is a file, rows as a list of mappings, or a data set of Hugging Face's; `reward_funcs` are
    functions `(prompt, completion, row) -> float`, or those of TRL, or references to such; `eval_dataset` is held out.
    `tools` are functions with type hints and a docstring that the policy may call before it answers.
    With `env`, a class written for TRL's environment_factory (or `agentrl/TRL-v0`), the rows are its tasks, and the
    functions get `environments` as in TRL.
    Rows and a run file are written beside `out`, for `agentrl train`. See `agentrl.env.dataset_env` for `env.kwargs`.

    What a notebook's cell defines is written there too (`OUT.NAME.py`), with the imports, constants and functions that
    it names, so that workers can import it; so is what a script defines that trains outside of
    `if __name__ == "__main__":`.

    `callbacks` receive steps, episodes, evaluations and new weights, see `agentrl.Callback`.

    Every method may be called in any thread, and beside a loop of asyncio (`train` and `evaluate` hold that loop up
    until they return: `await asyncio.to_thread(trainer.train)` does not). Inside of a loop of trio they raise
    UsageError, which says how to give them a thread.

    Raises ConfigError or UsageError for a bad setting, before anything starts."""

    def __init__(
        self,
        model: str | Path | None = None,
        env: str | type | None = None,
        *,
        config: RunConfig | Mapping[str, Any] | Path | str | None = None,
        reward: Rewarder | str | None = None,
        dataset: Rows | None = None,
        reward_funcs: Rewards = (),
        tools: Tools = (),
        eval_dataset: Rows | None = None,
        callbacks: Sequence[Callback] = (),
        out: Path | str = "runs/run",
        overwrite: bool = False,
    ) -> None:
        self._callbacks = check_callbacks(callbacks)
        document = by_reference(_document(config), partial(reference_of, out=Path(out)))
        if model is not None:
            document["model"] = str(model)
        if dataset is not None or reward_funcs or tools:
            trl_class = _trl_class(env, Path(out))
            if dataset is None or (not reward_funcs and trl_class is None) or (env is not None and trl_class is None):
                arguments = {"dataset": dataset is not None, "reward_funcs": bool(reward_funcs), "env": env is not None}
                hint = "give dataset and reward_funcs, or env; all of them go with agentrl/TRL-v0 and classes for TRL"
                beside = " beside tools" if tools else ""
                raise UsageError(f"Trainer got {arguments}{beside}: {hint}")
            if tools and trl_class is not None:
                raise UsageError("tools beside a class for TRL: make them methods of the class, or leave env out")
            document = document_of(
                Path(out),
                dataset,
                reward_funcs,
                eval_dataset=eval_dataset,
                user_sections=document,
                trl_class=trl_class,
                tools=tools,
            )
            env = None
            configuration.parse(document)  # a bad setting leaves no run file
            write_run_file(document, Path(out).with_name(f"{Path(out).name}.toml"))
        section = cast("dict[str, Any]", document.setdefault("env", {}))
        if env is not None:
            section["id"] = env if isinstance(env, str) else reference_of(env, Path(out))
        if reward is not None:
            section["reward"] = reward if isinstance(reward, str) else reference_of(reward, Path(out))
        self.config = configuration.parse(document)
        self.out, self._overwrite = Path(out), overwrite

    def train(self, view: View | None = None, *, quiet: bool = False) -> dict[str, Any]:
        """Run to the end, and print what the command line prints: a table in a terminal or a notebook, else a line per
        step. `quiet` leaves only warnings, through `logging`; a `view` takes its place. Returns the contents of
        `summary.json`. Settings that `config` leaves out are chosen for this machine first.

        Outside of the main thread Ctrl-C does not reach it: `stop` ends it, as does `agentrl stop`. Raises RunFailed if
        the run cannot go on, Interrupted if it was stopped, CallbackError if a callback raised."""
        # Refused at the door: the supervisor runs a loop of its own, and trio's error about a loop within a loop comes
        # from deep inside and names neither method nor remedy.
        check_no_loop("Trainer.train")
        self.config = with_held_out_sizes(_fitted(_pinned(self.config)))
        name_shared_rows(self.config)
        check_startable(self.config)
        run = RunDir.create(self.out, self.config, overwrite=self._overwrite)
        try:
            return finish_training(run, _shown(view, quiet), self._callbacks)
        except AgentRLError:
            # A run that never played an episode is removed, so that the corrected command can be given again as it was;
            # its logs stay, as they say why. One that has played anything is kept, whatever went wrong.
            if not began(run):
                run.discard()
            raise

    @staticmethod
    def resume(
        path: Path | str,
        view: View | None = None,
        *,
        settings: Sequence[str] = (),
        callbacks: Sequence[Callback] = (),
        quiet: bool = False,
    ) -> dict[str, Any]:
        """Go on with the run at `path` from its newest checkpoint, its journal and its buffer. `settings`
        (`section.key=value`) change how long it trains and which resources it uses; `view` and `quiet` as for `train`.
        `callbacks` go on after the last event that those of the same names received. A run that was stopped early
        trains on.
        Raises ConfigError for a setting that may not change."""
        check_no_loop("Trainer.resume")
        callbacks, run = check_callbacks(callbacks), RunDir.open(Path(path))
        if settings:
            resume_overrides.change(run, list(settings))
        resume_overrides.reopen_stopped(run)
        return finish_training(run, _shown(view, quiet), callbacks)

    def stop(self, *, now: bool = False) -> bool:
        """Ask the run at `out` to end, and return at once; False if this process does not train it. Training ends after
        the step under way: the learner saves, the held-out sets are measured, and `train` returns its summary. With
        `now` the run ends as by Ctrl-C: `train` raises Interrupted. Either can be resumed. To be called from any
        thread, also that of a callback, and in any loop."""
        request = _under_way.get(self.out.resolve())
        if request is None:
            return False
        if now:
            request.ask_to_interrupt("stopped by Trainer.stop")
        else:
            request.ask_to_finish("stopped by Trainer.stop")
        return True

    def evaluate(
        self,
        n: int | None = None,
        *,
        settings: Sequence[str] = (),
        out: Path | str | None = None,
        view: View | None = None,
    ) -> list[evaluation.EvalResult]:
        """Measure the newest checkpoint of the run at `out`, or the model before there is one, without training: `n`
        episodes of each held-out set (None: as many as the run file says), under `settings` (`section.key=value`).
        The run may be under way meanwhile. The episodes are kept in another run's folder if `out` names one.
        Raises as `agentrl.evaluate`."""
        check_no_loop("Trainer.evaluate")
        subject: Path | RunConfig = self.out if RunDir(self.out).store_path.exists() else self.config
        return measure(subject, None, n, settings, out=None if out is None else Path(out), view=view)


_under_way: dict[Path, StopRequest] = {}
"""The runs that this process trains, by their folders."""


def _trl_class(env: str | type | None, out: Path) -> str | None:
    """The reference of an environment class that was written for TRL, "" for the id of all of them; None for what is
    no such class."""
    if env == TRL_ID:
        return ""
    env_class: Any = registry.load_reference(env) if isinstance(env, str) and ":" in env else env
    if not inspect.isclass(env_class) or not callable(getattr(env_class, "reset", None)):
        return None
    if issubclass(env_class, gymnasium.Env) or hasattr(env_class, "areset"):
        return None
    return env if isinstance(env, str) else reference_of(cast("Any", env_class), out)


def _shown(view: View | None, quiet: bool) -> View:
    if view is not None:
        return view
    return Warnings() if quiet else LiveView()


def began(run: RunDir) -> bool:
    """Whether the run got as far as playing episodes: its engines were up. If its database is away, it may have."""
    try:
        with RunStore.read(run.store_path) as store:
            return PHASE.of(store.meta) is not None
    except StoreAway:
        return True


def _pinned(config: RunConfig) -> RunConfig:
    """With the checkpoint of a run that is named as the model: it stays the same should that run go on. Raises
    ModelError for a damaged checkpoint."""

    def pinned(model: str) -> str:
        digests.check(Path(model))
        # Resolved once: "the newest checkpoint of that run" would be another model for an engine that is started again
        # an hour later.
        return str(model_dir(model)) if (Path(model) / "checkpoints").is_dir() else model

    roles = [role.model_copy(update={"model": pinned(role.model)}) if role.model else role for role in config.roles]
    return config.model_copy(update={"model": pinned(config.model), "roles": roles})


def _fitted(config: RunConfig) -> RunConfig:
    """The configuration with defaults for this machine, which are printed on stderr."""
    machine = machine_defaults.Machine.seen()
    parameters = machine_defaults.parameters_of(model_dir(config.model)) if machine.gpus or machine.bfloat16 else 0
    config, chosen = machine_defaults.fitted(config, machine, parameters)
    if chosen:
        text = ", ".join(f"{key} = {value!r}" for key, value in chosen.items())
        print(f"agentrl: chosen for this machine and model: {text}", file=sys.stderr)
    return config


def check_startable(config: RunConfig) -> None:
    """Fail early, in this process: model, environment and reward must exist before anything is started."""
    from agentrl.engine import server_start
    from agentrl.engine.sglang import server_launch
    from agentrl.engine.vllm.launch import check_gpus, check_sender

    # `find_spec` and no import: importing torch takes seconds and gigabytes, in a process that never computes.
    for package in _TRAINING:
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"training needs {package}, which is not installed: {install_command('train')}")
    for line in contradictions(config):
        print(f"agentrl: warning: {line}", file=sys.stderr)
    if config.syncs_memory:
        check_sender(config.transport.backend, untested=config.engine.untested_vllm)
    _check_store(config)
    taken, sglang = [gpu for gpus in config.engine.gpus for gpu in gpus], config.engine.kind == "sglang"
    if taken:
        (server_start.visible if sglang else check_gpus)(taken)
    if sglang and not config.engine.urls and not config.cluster.on_ray:
        server_launch.find_build()
    # The cheap checks first, those that start processes or open sockets last: a typing mistake is reported in a second.
    take_order(config)
    renderer_of(config)
    check_arguments(config)
    registry.resolve("environments", config.env.id)
    task_source(config).task(0)
    _check_environments(config)
    _check_roles(config)
    _check_slots(config)
    check_teachers(config)
    _check_ranks(config)
    check_limits(config)
    if config.train.device != "cpu":
        _check_memory(config)
    check_tasks(config)


def _check_store(config: RunConfig) -> None:
    """Write, read and remove a small object where weights are to go."""
    url = config.engine.weights_url
    if url is not None:
        try:
            object_store.check(url, deadline_s=config.engine.admin_deadline_s)
        except WeightSyncError as error:
            raise ConfigError("engine.weights_url", url, str(error)) from None


def _check_ranks(config: RunConfig) -> None:
    """Refuse ranks that cannot divide the heads, or the experts, of the model among them."""
    plan, described = config.train.parallel, json.loads((model_dir(config.model) / "config.json").read_text())
    for key, width, counts in (("tensor", plan.tensor, HEADS), ("expert", plan.expert, EXPERTS)):
        check_divides(key, width, described.get("text_config") or described, counts)


def _check_memory(config: RunConfig) -> None:
    """Refuse a learner that its GPU cannot hold. Asks a process of its own, which loads torch."""
    # In a process of its own, as it loads torch, which a supervisor must not have: a process with CUDA cannot fork, and
    # holds memory for as long as it lives.
    command = [sys.executable, "-m", "agentrl.planning.plan"]
    try:
        request = configuration.to_json(config)
        done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=_PLAN_S, check=True)
    except subprocess.SubprocessError as error:
        print(f"agentrl: warning: whether memory holds the learner is not known ({error})", file=sys.stderr)
        return
    if done.stdout:
        raise ConfigError("train.device", config.train.device, done.stdout)


def _check_slots(config: RunConfig) -> None:
    """Find the models that the algorithms name, such as a teacher."""
    for field, algo in config.algorithms.items():
        for name, model in algo.slots.frozen.items():
            if model is not None:
                try:
                    slot_dir(config, model)
                except ModelError as error:
                    raise ConfigError(f"{field}.{name}", model, str(error)) from None


def _check_environments(config: RunConfig) -> None:
    """Make each environment of the run once, with the arguments that workers will give it."""
    held_out = [task for each in config.eval.sets for task in evaluation.tasks_of(config, each, 1)]
    checked: list[tuple[str, Mapping[str, Any]]] = []
    untold: dict[str, str] = {}  # by environment, which may be there with several arguments
    for task in (*first_tasks(config), *held_out):
        # A list and no set, as arguments may hold lists; there are few.
        if (task.env, task.kwargs) not in checked:
            checked.append((task.env, task.kwargs))
            with boundary(EnvError, f"{task.env} raised", place=True):
                env = make(task.env, **task.kwargs)
                env.close()
            _warn_of_deadlines(config, task.env, env)
            _check_images(config, env)
            if (left_out := _check_dialect(config, env.unwrapped)) is not None:
                untold[task.env] = left_out
    for id, left_out in untold.items():
        print(f"agentrl: {id}: {left_out}", file=sys.stderr)


def _check_images(config: RunConfig, env: Any) -> None:
    """Check that a model reads the images that an environment declares. Raises ConfigError."""
    if getattr(env.observation_space, "max_images", 0) and (why := renderer_of(config).no_images):
        raise ConfigError("model", config.model, f"{env.unwrapped} shows images: {why}")


def _check_dialect(config: RunConfig, env: Any) -> str | None:
    """Check that an environment's tools reach the model, in a dialect that the environment reads; return what the chat
    template leaves out. Raises ConfigError."""
    if not getattr(env, "schemas", None):
        return None
    renderer, dialect = renderer_of(config), getattr(env, "tool_format", None)
    if dialect is None and renderer.tool_format is None:
        choices = f"give one of {', '.join(FORMATS)}, or one of your own"
        hint = f"the chat template of {config.model!r} writes tool calls in a dialect that is not known here: {choices}"
        raise ConfigError("env.kwargs.tool_format", None, hint)
    if dialect is not None and not get_format(dialect).native:
        return None  # the environment describes the tools itself
    if dialect is not None and renderer.untold and dialect != renderer.tool_format:
        hint = f"{renderer.untold}: leave it out, or give {renderer.tool_format}"
        raise ConfigError("env.kwargs.tool_format", dialect, hint)
    return renderer.untold


def _warn_of_deadlines(config: RunConfig, id: str, env: Any) -> None:
    """Warn on stderr, with the settings to give, if an honest step may take longer than the run's deadlines allow."""
    needs_s, by = float(getattr(env.unwrapped, "needs_step_s", 0.0)), getattr(env.unwrapped, "needs_step_by", "")
    deadlines = {f"rollout.{name}": getattr(config.rollout, name) for name in ("step_deadline_s", "episode_deadline_s")}
    short = {name: value for name, value in deadlines.items() if value < needs_s}
    if short:
        limits = " and ".join(f"{name} = {value:g}" for name, value in short.items())
        typed = " ".join(f"--set {name}={needs_s:g}" for name in short)
        takes = f"{needs_s:g} s ({by})" if by else f"{needs_s:g} s"
        line = f"one step of {id} may honestly take {takes}; {limits} would end it as the policy's time limit: {typed}"
        print(f"agentrl: warning: {line}", file=sys.stderr)


def _check_roles(config: RunConfig) -> None:
    """Check that all roles in the run file are roles of the environment (its `roles`), and that one of them learns."""
    bound, policies = config.rollout.roles, config.rollout.frozen_roles()
    role_fields = {f"rollout.roles.{role}": role for role in bound}
    role_fields |= {f"roles.{number}.name": table.name for number, table in enumerate(config.roles)}
    if not role_fields:
        return
    roles = tuple(dict.fromkeys(role for task in first_tasks(config) for role in _roles_of(task)))
    for field, role in role_fields.items():
        if not roles:
            field = "roles" if field.startswith("roles") else "rollout.roles"
            raise ConfigError(field, role, f"{config.env.id} names no roles: leave it out")
        if role not in roles:
            raise ConfigError(field, bound.get(role, role), f"{config.env.id} has the roles {', '.join(roles)}")
    for role, policy in policies.items():
        if policy in config.rollout.frozen_models():
            try:
                frozen_model_dir(config, policy)
            except ModelError as error:
                hint = f"give 'trained', 'frozen', the URL of an engine, or a model ({error})"
                raise ConfigError(f"rollout.roles.{role}", policy, hint) from None
    for number, table in enumerate(config.roles):
        if table.model is not None:
            try:
                slot_dir(config, table.model)
            except ModelError as error:
                raise ConfigError(f"roles.{number}.model", table.model, str(error)) from None
    if config.league_roles:
        league.rule(config.league)
    past = {role for role, plays in config.league_roles.items() if plays == "league"}
    if set(roles) == {*policies, *past}:
        raise ConfigError("rollout.roles", policies, "no role is left to learn: give one 'trained'")


def _roles_of(task: Task) -> tuple[str, ...]:
    """The roles that take turns in a task's environment; none if one policy is all there is."""
    env = make(task.env, **task.kwargs)
    env.close()
    return tuple(getattr(env, "roles", ()))


def finish_training(run: RunDir, view: View, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Train a run to its end, then write its summary, plot and transcripts."""
    restarts: dict[str, int] = {}
    stop, trackers = StopRequest(), made(run.config().trackers)

    async def body(supervisor: Supervisor) -> None:
        async with telling([*callbacks, *trackers], run, supervisor.config, stop):
            try:
                await supervisor.train()
            finally:
                # Taken while the supervisor is there, also when the run fails: the summary is written after its end.
                restarts.update(supervisor.children.restarts)

    # The view outside of the run: what the supervisor says while it ends still has to be shown.
    with view, _stoppable(run, stop):
        run_to_end(run, body, on_tick=view.tick, stop=stop)
    with RunStore.read(run.store_path) as store:
        config = run.config()
        summary = report.summarise(run, config, store, restarts=restarts)
        plot = report.plot(run, config, store)
        report.transcripts(run, config, store)
        hand_over(trackers, summary, plot, store.versions.current_version().step)
        return summary


@contextmanager
def _stoppable(run: RunDir, stop: StopRequest) -> Generator[None]:
    """Let `Trainer.stop` find the run. Another call in this process may have the same folder, and waits for its lock in
    vain: the run that is under way stays the one to stop."""
    path = run.path.resolve()
    first = _under_way.setdefault(path, stop) is stop
    try:
        yield
    finally:
        if first:
            del _under_way[path]


def measure(
    what: str | Path | RunConfig,
    env: str | None,
    n: int | None,
    settings: Sequence[str] = (),
    *,
    out: Path | None = None,
    view: View | None = None,
) -> list[evaluation.EvalResult]:
    """Measure a run's newest checkpoint or a model, see `of_checkpoint.measured`; without `out`, in a folder that is
    removed."""
    config, adapters = measured(what, env, n, settings)
    with closing(OwnedFolder(prefer_memory=False)) as owner:
        return evaluate(config, adapters, out=out or owner.path / "run", view=view)


def evaluate(
    config: RunConfig,
    adapters: Adapters | None = None,
    *,
    out: Path,
    view: View | None = None,
) -> list[evaluation.EvalResult]:
    """Measure `config.model`, with `adapters` over it, on `config.eval.sets` without training; its own run directory
    `out` holds the episodes, in the place of those of an earlier evaluation. `agentrl.run.evaluation.of_checkpoint`
    gives both for a run that was trained. Raises UsageError if `out` holds a run that trained."""
    check_no_loop("evaluate")
    if config.syncs_memory and config.engine.urls:
        hint = "no learner is there to send weights from its memory: leave it out, or give engine.sync = 'full'"
        raise ConfigError("engine.urls", config.engine.urls, hint)
    check_startable(config)
    # An evaluation replaces the folder's content, and a run that trained may be weeks of work behind one wrong --out.
    if _has_trained(RunDir(out)):
        raise UsageError(f"{out} holds a run that trained: give another --out")
    run = RunDir.create(out, config, overwrite=True)
    if adapters is not None:
        adapters.copy_into(run)

    async def body(supervisor: Supervisor) -> None:
        await supervisor.measure()

    shown = view or Warnings()
    try:
        with shown:
            run_to_end(run, body, on_tick=shown.tick)
    except Interrupted:
        raise Interrupted("the evaluation was stopped: give the same command again, it starts anew") from None
    with RunStore.read(run.store_path) as store:
        results: list[evaluation.EvalResult] = []
        for held_out in config.eval.sets:
            purpose = evaluation.label(held_out.name, "now")
            result = evaluation.result(store, held_out.name, purpose)
            if result is not None:
                failed = failed_tasks.as_rows(store.metrics.failed_tasks(purpose), config)
                results.append(replace(result, failed_tasks=failed))
        return results


def _has_trained(run: RunDir) -> bool:
    if not run.store_path.exists():
        return False
    with RunStore.read(run.store_path) as store:
        begun = TRAIN_STARTED_S.of(store.meta) is not None
    return begun or (run.checkpoints.is_dir() and any(run.checkpoints.iterdir()))


def _document(config: RunConfig | Mapping[str, Any] | Path | str | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, str | Path):
        config = configuration.load(Path(config))
    if isinstance(config, RunConfig):
        document = config.model_dump(mode="json", exclude_unset=True)
        algo = {"algo": config.algo} if "algo" in config.model_fields_set else {}
        return document | algo | {key: list(getattr(config, key)) for key in ("tasks", "roles") if key in document}
    # A copy: the sections are filled in below, and a caller in a notebook gives the same mapping to the next Trainer.
    return copy.deepcopy(dict(config))
