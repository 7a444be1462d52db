"""`SWE` and `Harbor`: one task an episode, with coding tools in a box, graded in another.

    start in the agent's box ─► tools ─► changed declared files ─► a fresh box ─► hidden tests ─► outcome

Nothing else of the agent's box is looked at. Which format a task came in is the loaders' matter. Knows nothing of
models or tokens.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import trio

from agentrl import notices
from agentrl.env import EpisodeLimits, Grade, ToolEnv
from agentrl.env.checks.oracles import Oracle, script
from agentrl.env.checks.tasks.task_checks import NO_WORK
from agentrl.env.checks.tasks.verdicts import Finding, TaskText
from agentrl.env.limits import positive_seconds
from agentrl.env.tools.by_name import Named, check_limits
from agentrl.errors import ConfigError, PolicyFault, SandboxError, SandboxLost, SandboxPathError, SandboxUnavailable
from agentrl.host.platform_checks import default_sandbox
from agentrl.protocols import Limits, NetworkPolicy, Sandbox, SandboxSpec
from agentrl.records import Json
from agentrl.sandbox import known_backend
from agentrl.sandbox.backend_pool import Setup, set_up
from agentrl.sandbox.current_box import CurrentBox
from agentrl.sandbox.shared_backend import SharedBackend, shared
from agentrl_environments.swe import harbor, jsonl, submitted_files, task_checks
from agentrl_environments.swe.task import Act, BadTask, CodingTask, Grading, TaskSet, text_of
from agentrl_environments.swe.trees import apply_patch
from agentrl_tools.editing import Submit
from agentrl_tools.files import ApplyPatch, ListFiles, ReadFile, ReplaceText, WriteFile
from agentrl_tools.search import Search
from agentrl_tools.shell import Shell

_HERE: Final = Path(__file__).parent
_LIMITS: Final = Limits(wall_s=60.0, cpu_s=600.0, memory_bytes=1 << 30, pids=128, output_bytes=4 << 20)
_PATH: Final = "/workspace:/workspace/src:/workspace/lib"  # in front of what an image installed from its own folder
_NAMED: Final = 20  # files that an info names
_WALL_LESS: Final = ("bubblewrap", "local-unsafe")  # backends for which the name of a docker image means nothing

log = logging.getLogger(__name__)


class CodingTasks(ToolEnv):
    """The seed of a reset chooses the task, or the option `task` names one by its id. A part of a set that makes no
    task is left out with a warning, and listed in `bad_tasks`. `skip` is a file of tasks to leave out, as `agentrl
    validate --drop FILE` writes it: JSON lines with the id as `task`, or plain ids.

    `setup` are shell commands that run in each new box before the agent, or the tests, come; `network`, fields of
    `agentrl.protocols.NetworkPolicy`, is what they may reach (`{ allow = ["pypi.org:443"] }`), by default nothing. The
    agent reaches nothing. `setup_s` is the most seconds of one of them.

    `sandbox`: id of a sandbox backend; `ready` boxes of it are made ahead. `box`: fields of `agentrl.protocols.Limits`
    for the boxes, above what a task says of them. `shell_s`: the most seconds of one command of the agent."""

    limits = EpisodeLimits(turns=60, tool_seconds=1800.0)
    blocking = False
    needs_step_by = "verifier.timeout_sec of its tasks"
    task_files: Sequence[Path] = ()

    def __init__(
        self,
        *,
        tasks: TaskSet,
        source: str = "",
        skip: str | None = None,
        setup: Sequence[str] = (),
        setup_s: float = 300.0,
        network: Mapping[str, Any] | None = None,
        sandbox: str | None = None,
        ready: int = 0,
        box: Mapping[str, Any] | None = None,
        shell_s: float = 60.0,
        tools: Sequence[Named] = (),
        **settings: Any,
    ) -> None:
        self.bad_tasks: Sequence[BadTask] = tuple(tasks.bad)
        playable_tasks = _kept(tasks, source, skip)
        self._tasks, self.task_count = playable_tasks, len(playable_tasks)
        self._by_id = {coding_task.id: coding_task for coding_task in playable_tasks}
        positive_seconds("shell_s", shell_s)
        positive_seconds("setup_s", setup_s)
        if isinstance(setup, str):
            raise ConfigError("setup", setup, "give a list of commands")
        network_policy = None if network is None else _policy(network)
        setup_commands = [["sh", "-c", setup_command] for setup_command in setup]
        self._setup = Setup(commands=setup_commands, timeout_s=setup_s, network=network_policy)
        self._sandbox, self._ready = known_backend(sandbox or default_sandbox()), ready
        self._box = self.own_box = CurrentBox()
        self.needs_step_s = max(
            float(getattr(coding_task.grade, "deadline_s", 0.0))
            + sum(collect_step.timeout_s for collect_step in coding_task.collect)
            for coding_task in playable_tasks
        )
        self._box_limits = dict(box or {})
        check_limits(self._box_limits, "box")
        self._boxes: SharedBackend | None = None
        editing_tools = [ReplaceText(self._box), WriteFile(self._box), ApplyPatch(self._box)]
        looking_tools = [
            ListFiles(self._box),
            ReadFile(self._box),
            Search(self._box),
            Shell(self._box, timeout_s=shell_s),
        ]
        super().__init__(tools=[*looking_tools, *editing_tools, Submit(self.finish), *tools], **settings)
        self._all_limits = self.limits  # a task may have a closer one

    def make_task(self, options: Mapping[str, Json]) -> Mapping[str, Json]:
        """`{"task": id}`. Raises ConfigError for an id that is not there."""
        task_id = options["task"] if "task" in options else self._tasks[self.task_seed() % len(self._tasks)].id
        if task_id not in self._by_id:
            raise ConfigError("task", task_id, "no task has this id")
        playing_task = self._playing = self._by_id[task_id]
        time_bounds = [
            time_bound
            for time_bound in (self._all_limits.tool_seconds, playing_task.tool_seconds)
            if time_bound is not None
        ]
        self.limits = dataclasses.replace(self._all_limits, tool_seconds=min(time_bounds, default=None))
        return {"task": task_id}

    async def setup(self, task: Mapping[str, Json]) -> None:
        shared_boxes = shared(self._sandbox, ready=self._ready)
        await shared_boxes.enter()
        self._boxes = shared_boxes
        with self._named():
            self._box.box = await self._started(shared_boxes)
            self._start = await submitted_files.start_listing(self._box)

    async def teardown(self) -> None:
        open_boxes, self._boxes = self._boxes, None
        if open_boxes is not None:
            try:
                await self._box.close()
            finally:
                await open_boxes.leave()

    async def _started(self, boxes: SharedBackend, *, grading: bool = False) -> Sandbox:
        """A box with the task's files as they are at first, for the agent or for grading."""
        coding_task, grading_setup = self._playing, (self._playing.grading if grading else None) or Grading()
        box_image, work_tree = (
            (coding_task.image, coding_task.tree)
            if grading_setup.tree is None
            else (grading_setup.image, grading_setup.tree)
        )
        box_limits = dataclasses.replace(_LIMITS, **{**coding_task.limits, **grading_setup.limits, **self._box_limits})
        box_env = {"PYTHONPATH": _PATH, **coding_task.env, **grading_setup.env}
        box_spec = SandboxSpec(image=box_image, limits=box_limits, env=box_env, covered=work_tree.covered)
        new_box = await boxes.create(box_spec)
        try:
            await work_tree.lay(new_box)
            await set_up(new_box, self._setup)
        except BaseException:
            with trio.CancelScope(shield=True):
                await new_box.close()
            raise
        return new_box

    def prompt(self, task: Mapping[str, Json]) -> str:
        self.note(task=self._playing.id)
        return self._playing.instruction

    async def grade(self) -> Grade:
        """Grade the declared files as the task says, in a box that the agent has not seen."""
        for collect_step in self._playing.collect:
            await self._box.exec(["sh", "-c", collect_step.command], timeout_s=collect_step.timeout_s)
        try:
            agent_work = await submitted_files.work(self._box, self._start, self._playing.declared)
        except submitted_files.WorkRefused as error:
            return _refused(error)
        assert self._boxes is not None
        with self._named():
            grading_box = await self._started(self._boxes, grading=True)
        try:
            if self._playing.hidden:
                with self._named():
                    await apply_patch(grading_box, self._playing.hidden)
            try:
                await agent_work.lay(grading_box)
                work_grade = await self._playing.grade(grading_box, self._boxes)
            except SandboxPathError as error:  # the work left no room for the grading, or a file where a folder is due
                return _refused(error)
        finally:
            with trio.CancelScope(shield=True):
                await grading_box.close()
        if agent_work.left_behind:
            left_names = [left_path[:200] for left_path in agent_work.left_behind[:_NAMED]]
            return dataclasses.replace(work_grade, info={**work_grade.info, "left_behind": left_names})
        return work_grade

    @contextmanager
    def _named(self) -> Generator[None]:
        """Errors of a task's image, files and patches name the task."""
        task_name = f"task {self._playing.id}"
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{task_name}, {error.field}", error.value, error.hint) from error
        except (SandboxUnavailable, SandboxLost) as error:
            raise type(error)(f"{task_name}: {error}") from error
        except SandboxError as error:
            raise SandboxError(f"{task_name}: {error}") from error

    def oracles(self) -> list[Oracle]:
        submit_call = self.call("submit")
        all_oracles = [Oracle("no-op", 0.0, script(submit_call))]
        if self._playing.gold:
            all_oracles.insert(0, Oracle("gold", 1.0, script(self._acted(self._playing.gold), submit_call)))
        for cheat_name, cheat_acts in self._playing.cheats.items():
            all_oracles.append(Oracle(cheat_name, 0.0, script(self._acted(cheat_acts), submit_call), cheats=True))
        return all_oracles

    def cheats(self) -> list[Oracle]:
        """Cheap attacks that any task may be open to, for `agentrl validate --out`."""
        submit_call = self.call("submit")
        attack_panel = task_checks.panel(self._playing)
        return [
            Oracle(attack_name, 0.0, script(self._acted(attack_acts), submit_call), cheats=attack_name not in NO_WORK)
            for attack_name, attack_acts in attack_panel.items()
        ]

    async def task_findings(self) -> list[Finding]:
        """Where the solution or the hidden tests of the task just reset can be read."""
        return await task_checks.leaks(self._box, self._playing)

    @property
    def grader_deadline_s(self) -> float | None:
        deadline_s = getattr(self._playing.grade, "deadline_s", None)
        return None if deadline_s is None else float(deadline_s)

    def task_texts(self) -> list[TaskText]:
        return [TaskText(coding_task.id, coding_task.instruction) for coding_task in self._tasks]

    def _acted(self, acts: Sequence[Act]) -> str:
        arguments = {"shell": "command", "apply_patch": "patch"}
        return "".join(self.call(next_act.tool, **{arguments[next_act.tool]: next_act.argument}) for next_act in acts)


def _refused(error: PolicyFault) -> Grade:
    """Work that cannot be graded earns nothing. `not_graded` says why."""
    return Grade(outcome=0.0, success=False, info={"not_graded": str(error)[:500]})


class SWE(CodingTasks):
    """Tasks in the format of SWE-bench or SWE-smith. `tasks` is a file of rows (JSON lines, Parquet) or a data set
    (`hf:NAME:SPLIT`), by default a small set of ours.

    `repositories` is a folder with the repositories; without it each image has its own in `in_image`. `patch_is`: `fix`
    (SWE-bench) or `bug` (SWE-smith). `image` and `test_command` are for rows that name none; `tests_s` is the deadline
    of a test run. `apart` runs the tests in a box without the sources, so that these cannot forge a verdict; it is for
    `unittest` tests that hand over plain data, such as ours, for which it is the default."""

    def __init__(
        self,
        *,
        tasks: str | None = None,
        repositories: str | None = None,
        patch_is: jsonl.PatchIs = "fix",
        image: str | None = None,
        in_image: str = "/testbed",
        test_command: str = jsonl.TEST_COMMAND,
        tests_s: float = 600.0,
        apart: bool | None = None,
        **settings: Any,
    ) -> None:
        positive_seconds("tests_s", tests_s)
        own_repositories = _HERE.parent / "repositories" if tasks is None else None
        row_defaults = jsonl.RowDefaults(
            patch_is=patch_is,
            test_command=test_command,
            tests_s=tests_s,
            image=image,
            in_image=in_image,
            repositories=Path(repositories) if repositories else own_repositories,
            apart=tasks is None if apart is None else apart,
        )
        rows_source = tasks or str(_HERE / "tasks.jsonl")
        if not rows_source.startswith("hf:"):
            _existing(Path(rows_source), Path.is_file, "give a file of rows, such as tasks.jsonl, or hf:NAME:SPLIT")
        self.needs_step_by = "" if row_defaults.apart else "tests_s"
        source_paths = [Path(rows_source), row_defaults.repositories]
        self.task_files = [
            source_path for source_path in source_paths if source_path is not None and source_path.exists()
        ]
        super().__init__(tasks=jsonl.load(rows_source, row_defaults), source=rows_source, **settings)


class Harbor(CodingTasks):
    """Harbor task folders. `tasks` is a folder of them, by default a small set of ours.

    `images` names the built image of a task by the task's folder; `image` is what tasks run on whose Dockerfile only
    copies files (on bubblewrap by default this machine's own programs, on docker the Dockerfile's base).

    `host_env` lists the variables of this machine that the `env` tables of tasks may take. With `shared_verifier` tasks
    are played too whose verifier runs beside the agent's work (most public ones): there a program of the agent's can
    write its own reward, so a policy that is trained on them may learn to. Their infos have `shared`."""

    def __init__(
        self,
        *,
        tasks: str | None = None,
        images: Mapping[str, str] | None = None,
        image: str | None = None,
        sandbox: str | None = None,
        host_env: Sequence[str] = (),
        shared_verifier: bool = False,
        **settings: Any,
    ) -> None:
        if isinstance(host_env, str):
            raise ConfigError("host_env", host_env, "give a list of names")
        harbor_defaults = harbor.HarborDefaults(
            images=images or {},
            image=image,
            use_base=(sandbox or default_sandbox()) not in _WALL_LESS,
            host_env=host_env,
            shared_verifier=shared_verifier,
        )
        tasks_folder = _existing(
            Path(tasks) if tasks else _HERE / "harbor_tasks", Path.is_dir, "give a folder of tasks"
        )
        self.task_files = [tasks_folder]
        super().__init__(
            tasks=harbor.load(tasks_folder, harbor_defaults), source=str(tasks_folder), sandbox=sandbox, **settings
        )


def _policy(network: Mapping[str, Any]) -> NetworkPolicy:
    try:
        return NetworkPolicy(**network)
    except TypeError as error:
        raise ConfigError("network", network, f'give {{ allow = ["host:port"] }}: {error}') from error


def _kept(tasks: TaskSet, source: str, skip: str | None) -> list[CodingTask]:
    """The tasks to play. Says what is left out, and why; raises ConfigError if nothing is left."""
    if tasks.bad:
        first_bad = tasks.bad[0]
        if not tasks.tasks:
            raise ConfigError("tasks", source, f"none of its {len(tasks.bad)} tasks can be played: {first_bad.reason}")
        notices.note(
            "coding tasks",
            f"{len(tasks.bad)} of {len(tasks.bad) + len(tasks.tasks)} tasks cannot be played and are left out: "
            f"{first_bad.reason}{' …' if tasks.bad[1:] else ''}. agentrl validate lists all",
            place=source,
        )
    if not tasks.tasks:
        raise ConfigError("tasks", source, "there is no task in this place")
    if skip is None:
        return tasks.tasks
    left_out_ids = _skipped(skip)
    kept_tasks = [coding_task for coding_task in tasks.tasks if coding_task.id not in left_out_ids]
    if not kept_tasks:
        raise ConfigError("skip", skip, f"it leaves out all {len(tasks.tasks)} tasks")
    counted_ids = [
        left_out_ids[coding_task.id] for coding_task in tasks.tasks if left_out_ids.get(coding_task.id, (0, 0))[1]
    ]
    lacking_count = sum(lacking for lacking, _ in counted_ids)
    listed_count = sum(listed for _, listed in counted_ids)
    absent_words = f": logs of their gold patches lack {lacking_count} of {listed_count} test ids"
    dropped_words = f"{len(tasks.tasks) - len(kept_tasks)} of {len(tasks.tasks)} tasks are left out by {skip}"
    # No notice: the user asked for it.
    log.warning("%s: %s%s", source, dropped_words, absent_words if counted_ids else "")
    return kept_tasks


def _skipped(skip: str) -> dict[str, tuple[int, int]]:
    """Read a file of tasks to leave out: by task, how many test ids a log of the gold patch lacks, of how many."""
    skipped_tasks: dict[str, tuple[int, int]] = {}
    for line_number, skip_line in enumerate(text_of(Path(skip)).splitlines(), 1):
        if not skip_line.strip():
            continue
        if not skip_line.lstrip().startswith("{"):
            skipped_tasks[skip_line.strip()] = (0, 0)
            continue
        try:
            skip_row = json.loads(skip_line)
            skipped_tasks[str(skip_row["task"])] = (int(skip_row.get("absent", 0)), int(skip_row.get("tests", 0)))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"skip, {skip}:{line_number}", skip_line[:80], 'give an id, or {"task": id}') from error
    return skipped_tasks


def _existing(path: Path, exists: Callable[[Path], bool], hint: str) -> Path:
    if not exists(path):
        raise ConfigError("tasks", str(path), hint)
    return path
