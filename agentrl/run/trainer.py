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
                correction = (
                    "give dataset and reward_funcs, or env; all of them go with agentrl/TRL-v0 and classes for TRL"
                )
                beside_text = " beside tools" if tools else ""
                raise UsageError(f"Trainer got {arguments}{beside_text}: {correction}")
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
        env_section = cast("dict[str, Any]", document.setdefault("env", {}))
        if env is not None:
            env_section["id"] = env if isinstance(env, str) else reference_of(env, Path(out))
        if reward is not None:
            env_section["reward"] = reward if isinstance(reward, str) else reference_of(reward, Path(out))
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
        run_folder = RunDir.create(self.out, self.config, overwrite=self._overwrite)
        try:
            return finish_training(run_folder, _shown(view, quiet), self._callbacks)
        except AgentRLError:
            # A run that never played an episode is removed, so that the corrected command can be given again as it was;
            # its logs stay, as they say why. One that has played anything is kept, whatever went wrong.
            if not began(run_folder):
                run_folder.discard()
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
        Raises ConfigError for a setting that may not change, UsageError for a folder of recordings."""
        check_no_loop("Trainer.resume")
        callbacks, run_folder = check_callbacks(callbacks), RunDir.open(Path(path))
        # The groups of recordings look like a run's, and their clients are nobody who could be played again.
        if run_folder.is_recording:
            hint = "agentrl record goes on with it, agentrl export-episodes makes demonstrations of it"
            raise UsageError(f"{path} holds recordings and no run: {hint}")
        if settings:
            resume_overrides.change(run_folder, list(settings))
        resume_overrides.reopen_stopped(run_folder)
        return finish_training(run_folder, _shown(view, quiet), callbacks)

    def stop(self, *, now: bool = False) -> bool:
        """Ask the run at `out` to end, and return at once; False if this process does not train it. Training ends after
        the step under way: the learner saves, the held-out sets are measured, and `train` returns its summary. With
        `now` the run ends as by Ctrl-C: `train` raises Interrupted. Either can be resumed. To be called from any
        thread, also that of a callback, and in any loop."""
        stop_request = _under_way.get(self.out.resolve())
        if stop_request is None:
            return False
        if now:
            stop_request.ask_to_interrupt("stopped by Trainer.stop")
        else:
            stop_request.ask_to_finish("stopped by Trainer.stop")
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
        with RunStore.read(run.store_path) as run_store:
            return PHASE.of(run_store.meta) is not None
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

    role_tables = [
        role_table.model_copy(update={"model": pinned(role_table.model)}) if role_table.model else role_table
        for role_table in config.roles
    ]
    return config.model_copy(update={"model": pinned(config.model), "roles": role_tables})


def _fitted(config: RunConfig) -> RunConfig:
    """The configuration with defaults for this machine, which are printed on stderr."""
    machine = machine_defaults.Machine.seen()
    parameters = machine_defaults.parameters_of(model_dir(config.model)) if machine.gpus or machine.bfloat16 else 0
    config, chosen_settings = machine_defaults.fitted(config, machine, parameters)
    if chosen_settings:
        chosen_text = ", ".join(
            f"{setting_key} = {setting_value!r}" for setting_key, setting_value in chosen_settings.items()
        )
        print(f"agentrl: chosen for this machine and model: {chosen_text}", file=sys.stderr)
    return config


def check_startable(config: RunConfig) -> None:
    """Fail early, in this process: model, environment and reward must exist before anything is started."""
    from agentrl.engine import server_start
    from agentrl.engine.sglang import server_launch
    from agentrl.engine.vllm.launch import check_gpus, check_sender

    # `find_spec` and no import: importing torch takes seconds and gigabytes, in a process that never computes.
    for package_name in _TRAINING:
        if importlib.util.find_spec(package_name) is None:
            raise UsageError(f"training needs {package_name}, which is not installed: {install_command('train')}")
    for warning_line in contradictions(config):
        print(f"agentrl: warning: {warning_line}", file=sys.stderr)
    if config.syncs_memory:
        check_sender(config.transport.backend, untested=config.engine.untested_vllm)
    _check_store(config)
    taken_gpus, uses_sglang = (
        [gpu_number for gpu_group in config.engine.gpus for gpu_number in gpu_group],
        config.engine.kind == "sglang",
    )
    if taken_gpus:
        (server_start.visible if uses_sglang else check_gpus)(taken_gpus)
    if uses_sglang and not config.engine.urls and not config.cluster.on_ray:
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
    weights_url = config.engine.weights_url
    if weights_url is not None:
        try:
            object_store.check(weights_url, deadline_s=config.engine.admin_deadline_s)
        except WeightSyncError as error:
            raise ConfigError("engine.weights_url", weights_url, str(error)) from None


def _check_ranks(config: RunConfig) -> None:
    """Refuse ranks that cannot divide the heads, or the experts, of the model among them."""
    parallel_plan, described = config.train.parallel, json.loads((model_dir(config.model) / "config.json").read_text())
    for rank_axis, axis_width, count_names in (
        ("tensor", parallel_plan.tensor, HEADS),
        ("expert", parallel_plan.expert, EXPERTS),
    ):
        check_divides(rank_axis, axis_width, described.get("text_config") or described, count_names)


def _check_memory(config: RunConfig) -> None:
    """Refuse a learner that its GPU cannot hold. Asks a process of its own, which loads torch."""
    # In a process of its own, as it loads torch, which a supervisor must not have: a process with CUDA cannot fork, and
    # holds memory for as long as it lives.
    command = [sys.executable, "-m", "agentrl.planning.plan"]
    try:
        config_text = configuration.to_json(config)
        plan_process = subprocess.run(
            command, input=config_text, capture_output=True, text=True, timeout=_PLAN_S, check=True
        )
    except subprocess.SubprocessError as error:
        print(f"agentrl: warning: whether memory holds the learner is not known ({error})", file=sys.stderr)
        return
    if plan_process.stdout:
        raise ConfigError("train.device", config.train.device, plan_process.stdout)


def _check_slots(config: RunConfig) -> None:
    """Find the models that the algorithms name, such as a teacher."""
    for algo_field, algorithm in config.algorithms.items():
        for slot_name, slot_model in algorithm.slots.frozen.items():
            if slot_model is not None:
                try:
                    slot_dir(config, slot_model)
                except ModelError as error:
                    raise ConfigError(f"{algo_field}.{slot_name}", slot_model, str(error)) from None


def _check_environments(config: RunConfig) -> None:
    """Make each environment of the run once, with the arguments that workers will give it."""
    held_out = [first_task for eval_set in config.eval.sets for first_task in evaluation.tasks_of(config, eval_set, 1)]
    checked_envs: list[tuple[str, Mapping[str, Any]]] = []
    untold_by_env: dict[str, str] = {}  # by environment, which may be there with several arguments
    for first_task in (*first_tasks(config), *held_out):
        # A list and no set, as arguments may hold lists; there are few.
        if (first_task.env, first_task.kwargs) not in checked_envs:
            checked_envs.append((first_task.env, first_task.kwargs))
            with boundary(EnvError, f"{first_task.env} raised", place=True):
                environment = make(first_task.env, **first_task.kwargs)
                environment.close()
            _warn_of_deadlines(config, first_task.env, environment)
            _check_images(config, environment)
            if (left_out := _check_dialect(config, environment.unwrapped)) is not None:
                untold_by_env[first_task.env] = left_out
    for env_id, left_out in untold_by_env.items():
        print(f"agentrl: {env_id}: {left_out}", file=sys.stderr)


def _check_images(config: RunConfig, env: Any) -> None:
    """Check that a model reads the images that an environment declares. Raises ConfigError."""
    if getattr(env.observation_space, "max_images", 0) and (refusal := renderer_of(config).no_images):
        raise ConfigError("model", config.model, f"{env.unwrapped} shows images: {refusal}")


def _check_dialect(config: RunConfig, env: Any) -> str | None:
    """Check that an environment's tools reach the model, in a dialect that the environment reads; return what the chat
    template leaves out. Raises ConfigError."""
    if not getattr(env, "schemas", None):
        return None
    renderer, env_dialect = renderer_of(config), getattr(env, "tool_format", None)
    if env_dialect is None and renderer.tool_format is None:
        choices_text = f"give one of {', '.join(FORMATS)}, or one of your own"
        unknown_dialect = f"the chat template of {config.model!r} writes tool calls in a dialect that is not known here"
        correction = f"{unknown_dialect}: {choices_text}"
        raise ConfigError("env.kwargs.tool_format", None, correction)
    if env_dialect is not None and not get_format(env_dialect).native:
        return None  # the environment describes the tools itself
    if env_dialect is not None and renderer.untold and env_dialect != renderer.tool_format:
        correction = f"{renderer.untold}: leave it out, or give {renderer.tool_format}"
        raise ConfigError("env.kwargs.tool_format", env_dialect, correction)
    return renderer.untold


def _warn_of_deadlines(config: RunConfig, id: str, env: Any) -> None:
    """Warn on stderr, with the settings to give, if an honest step may take longer than the run's deadlines allow."""
    needed_s = float(getattr(env.unwrapped, "needs_step_s", 0.0))
    cause_text = getattr(env.unwrapped, "needs_step_by", "")
    deadlines = {
        f"rollout.{setting_name}": getattr(config.rollout, setting_name)
        for setting_name in ("step_deadline_s", "episode_deadline_s")
    }
    short_deadlines = {
        setting_name: deadline_s for setting_name, deadline_s in deadlines.items() if deadline_s < needed_s
    }
    if short_deadlines:
        limits_text = " and ".join(
            f"{setting_name} = {deadline_s:g}" for setting_name, deadline_s in short_deadlines.items()
        )
        typed_settings = " ".join(f"--set {setting_name}={needed_s:g}" for setting_name in short_deadlines)
        duration_text = f"{needed_s:g} s ({cause_text})" if cause_text else f"{needed_s:g} s"
        warning_line = f"one step of {id} may honestly take {duration_text}; {limits_text}"
        ending_text = f"would end it as the policy's time limit: {typed_settings}"
        print(f"agentrl: warning: {warning_line} {ending_text}", file=sys.stderr)


def _check_roles(config: RunConfig) -> None:
    """Check that all roles in the run file are roles of the environment (its `roles`), and that one of them learns."""
    bound_roles, frozen_policies = config.rollout.roles, config.rollout.frozen_roles()
    role_fields = {f"rollout.roles.{role_name}": role_name for role_name in bound_roles}
    role_fields |= {f"roles.{role_number}.name": role_table.name for role_number, role_table in enumerate(config.roles)}
    if not role_fields:
        return
    known_roles = tuple(
        dict.fromkeys(role_name for first_task in first_tasks(config) for role_name in _roles_of(first_task))
    )
    for role_field, role_name in role_fields.items():
        if not known_roles:
            role_field = "roles" if role_field.startswith("roles") else "rollout.roles"
            raise ConfigError(role_field, role_name, f"{config.env.id} names no roles: leave it out")
        if role_name not in known_roles:
            raise ConfigError(
                role_field,
                bound_roles.get(role_name, role_name),
                f"{config.env.id} has the roles {', '.join(known_roles)}",
            )
    for role_name, policy_name in frozen_policies.items():
        if policy_name in config.rollout.frozen_models():
            try:
                frozen_model_dir(config, policy_name)
            except ModelError as error:
                correction = f"give 'trained', 'frozen', the URL of an engine, or a model ({error})"
                raise ConfigError(f"rollout.roles.{role_name}", policy_name, correction) from None
    for role_number, role_table in enumerate(config.roles):
        if role_table.model is not None:
            try:
                slot_dir(config, role_table.model)
            except ModelError as error:
                raise ConfigError(f"roles.{role_number}.model", role_table.model, str(error)) from None
    if config.league_roles:
        league.rule(config.league)
    past_roles = {role_name for role_name, played_by in config.league_roles.items() if played_by == "league"}
    if set(known_roles) == {*frozen_policies, *past_roles}:
        raise ConfigError("rollout.roles", frozen_policies, "no role is left to learn: give one 'trained'")


def _roles_of(task: Task) -> tuple[str, ...]:
    """The roles that take turns in a task's environment; none if one policy is all there is."""
    environment = make(task.env, **task.kwargs)
    environment.close()
    return tuple(getattr(environment, "roles", ()))


def finish_training(run: RunDir, view: View, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Train a run to its end, then write its summary, plot and transcripts."""
    restarts: dict[str, int] = {}
    stop_request, trackers = StopRequest(), made(run.config().trackers)

    async def body(supervisor: Supervisor) -> None:
        async with telling([*callbacks, *trackers], run, supervisor.config, stop_request):
            try:
                await supervisor.train()
            finally:
                # Taken while the supervisor is there, also when the run fails: the summary is written after its end.
                restarts.update(supervisor.children.restarts)

    # The view outside of the run: what the supervisor says while it ends still has to be shown.
    with view, _stoppable(run, stop_request):
        run_to_end(run, body, on_tick=view.tick, stop=stop_request)
    with RunStore.read(run.store_path) as run_store:
        run_config = run.config()
        run_summary = report.summarise(run, run_config, run_store, restarts=restarts)
        plot_path = report.plot(run, run_config, run_store)
        report.transcripts(run, run_config, run_store)
        hand_over(trackers, run_summary, plot_path, run_store.versions.current_version().step)
        return run_summary


@contextmanager
def _stoppable(run: RunDir, stop: StopRequest) -> Generator[None]:
    """Let `Trainer.stop` find the run. Another call in this process may have the same folder, and waits for its lock in
    vain: the run that is under way stays the one to stop."""
    run_path = run.path.resolve()
    is_first = _under_way.setdefault(run_path, stop) is stop
    try:
        yield
    finally:
        if is_first:
            del _under_way[run_path]


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
    run_config, adapters = measured(what, env, n, settings)
    with closing(OwnedFolder(prefer_memory=False)) as owned_folder:
        return evaluate(run_config, adapters, out=out or owned_folder.path / "run", view=view)


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
        correction = "no learner is there to send weights from its memory: leave it out, or give engine.sync = 'full'"
        raise ConfigError("engine.urls", config.engine.urls, correction)
    check_startable(config)
    # An evaluation replaces the folder's content, and a run that trained may be weeks of work behind one wrong --out.
    if _has_trained(RunDir(out)):
        raise UsageError(f"{out} holds a run that trained: give another --out")
    run_folder = RunDir.create(out, config, overwrite=True)
    if adapters is not None:
        adapters.copy_into(run_folder)

    async def body(supervisor: Supervisor) -> None:
        await supervisor.measure()

    shown_view = view or Warnings()
    try:
        with shown_view:
            run_to_end(run_folder, body, on_tick=shown_view.tick)
    except Interrupted:
        raise Interrupted("the evaluation was stopped: give the same command again, it starts anew") from None
    with RunStore.read(run_folder.store_path) as run_store:
        eval_results: list[evaluation.EvalResult] = []
        for held_out in config.eval.sets:
            purpose = evaluation.label(held_out.name, "now")
            eval_result = evaluation.result(run_store, held_out.name, purpose)
            if eval_result is not None:
                failed_rows = failed_tasks.as_rows(run_store.metrics.failed_tasks(purpose), config)
                eval_results.append(replace(eval_result, failed_tasks=failed_rows))
        return eval_results


def _has_trained(run: RunDir) -> bool:
    if not run.store_path.exists():
        return False
    with RunStore.read(run.store_path) as run_store:
        has_begun = TRAIN_STARTED_S.of(run_store.meta) is not None
    return has_begun or (run.checkpoints.is_dir() and any(run.checkpoints.iterdir()))


def _document(config: RunConfig | Mapping[str, Any] | Path | str | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, str | Path):
        config = configuration.load(Path(config))
    if isinstance(config, RunConfig):
        document = config.model_dump(mode="json", exclude_unset=True)
        algo_section = {"algo": config.algo} if "algo" in config.model_fields_set else {}
        return (
            document
            | algo_section
            | {
                section_name: list(getattr(config, section_name))
                for section_name in ("tasks", "roles")
                if section_name in document
            }
        )
    # A copy: the sections are filled in below, and a caller in a notebook gives the same mapping to the next Trainer.
    return copy.deepcopy(dict(config))
