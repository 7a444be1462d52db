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
        kept = _kept(tasks, source, skip)
        self._tasks, self.task_count = kept, len(kept)
        self._by_id = {task.id: task for task in kept}
        positive_seconds("shell_s", shell_s)
        positive_seconds("setup_s", setup_s)
        if isinstance(setup, str):
            raise ConfigError("setup", setup, "give a list of commands")
        policy = None if network is None else _policy(network)
        commands = [["sh", "-c", command] for command in setup]
        self._setup = Setup(commands=commands, timeout_s=setup_s, network=policy)
        self._sandbox, self._ready = known_backend(sandbox or default_sandbox()), ready
        self._box = self.own_box = CurrentBox()
        self.needs_step_s = max(
            float(getattr(task.grade, "deadline_s", 0.0)) + sum(step.timeout_s for step in task.collect)
            for task in kept
        )
        self._box_limits = dict(box or {})
        check_limits(self._box_limits, "box")
        self._boxes: SharedBackend | None = None
        editing = [ReplaceText(self._box), WriteFile(self._box), ApplyPatch(self._box)]
        looking = [ListFiles(self._box), ReadFile(self._box), Search(self._box), Shell(self._box, timeout_s=shell_s)]
        super().__init__(tools=[*looking, *editing, Submit(self.finish), *tools], **settings)
        self._all_limits = self.limits  # a task may have a closer one

    def make_task(self, options: Mapping[str, Json]) -> Mapping[str, Json]:
        """`{"task": id}`. Raises ConfigError for an id that is not there."""
        named = options["task"] if "task" in options else self._tasks[self.task_seed() % len(self._tasks)].id
        if named not in self._by_id:
            raise ConfigError("task", named, "no task has this id")
        playing = self._playing = self._by_id[named]
        bounds = [each for each in (self._all_limits.tool_seconds, playing.tool_seconds) if each is not None]
        self.limits = dataclasses.replace(self._all_limits, tool_seconds=min(bounds, default=None))
        return {"task": named}

    async def setup(self, task: Mapping[str, Json]) -> None:
        boxes = shared(self._sandbox, ready=self._ready)
        await boxes.enter()
        self._boxes = boxes
        with self._named():
            self._box.box = await self._started(boxes)
            self._start = await submitted_files.start_listing(self._box)

    async def teardown(self) -> None:
        boxes, self._boxes = self._boxes, None
        if boxes is not None:
            try:
                await self._box.close()
            finally:
                await boxes.leave()

    async def _started(self, boxes: SharedBackend, *, grading: bool = False) -> Sandbox:
        """A box with the task's files as they are at first, for the agent or for grading."""
        task, other = self._playing, (self._playing.grading if grading else None) or Grading()
        image, tree = (task.image, task.tree) if other.tree is None else (other.image, other.tree)
        limits = dataclasses.replace(_LIMITS, **{**task.limits, **other.limits, **self._box_limits})
        env = {"PYTHONPATH": _PATH, **task.env, **other.env}
        spec = SandboxSpec(image=image, limits=limits, env=env, covered=tree.covered)
        box = await boxes.create(spec)
        try:
            await tree.lay(box)
            await set_up(box, self._setup)
        except BaseException:
            with trio.CancelScope(shield=True):
                await box.close()
            raise
        return box

    def prompt(self, task: Mapping[str, Json]) -> str:
        self.note(task=self._playing.id)
        return self._playing.instruction

    async def grade(self) -> Grade:
        """Grade the declared files as the task says, in a box that the agent has not seen."""
        for command in self._playing.collect:
            await self._box.exec(["sh", "-c", command.command], timeout_s=command.timeout_s)
        try:
            work = await submitted_files.work(self._box, self._start, self._playing.declared)
        except submitted_files.WorkRefused as error:
            return _refused(error)
        assert self._boxes is not None
        with self._named():
            box = await self._started(self._boxes, grading=True)
        try:
            if self._playing.hidden:
                with self._named():
                    await apply_patch(box, self._playing.hidden)
            try:
                await work.lay(box)
                grade = await self._playing.grade(box, self._boxes)
            except SandboxPathError as error:  # the work left no room for the grading, or a file where a folder is due
                return _refused(error)
        finally:
            with trio.CancelScope(shield=True):
                await box.close()
        if work.left_behind:
            names = [path[:200] for path in work.left_behind[:_NAMED]]
            return dataclasses.replace(grade, info={**grade.info, "left_behind": names})
        return grade

    @contextmanager
    def _named(self) -> Generator[None]:
        """Errors of a task's image, files and patches name the task."""
        task = f"task {self._playing.id}"
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{task}, {error.field}", error.value, error.hint) from error
        except (SandboxUnavailable, SandboxLost) as error:
            raise type(error)(f"{task}: {error}") from error
        except SandboxError as error:
            raise SandboxError(f"{task}: {error}") from error

    def oracles(self) -> list[Oracle]:
        submit = self.call("submit")
        oracles = [Oracle("no-op", 0.0, script(submit))]
        if self._playing.gold:
            oracles.insert(0, Oracle("gold", 1.0, script(self._acted(self._playing.gold), submit)))
        for name, acts in self._playing.cheats.items():
            oracles.append(Oracle(name, 0.0, script(self._acted(acts), submit), cheats=True))
        return oracles

    def cheats(self) -> list[Oracle]:
        """Cheap attacks that any task may be open to, for `agentrl validate --out`."""
        submit = self.call("submit")
        panel = task_checks.panel(self._playing)
        return [
            Oracle(name, 0.0, script(self._acted(acts), submit), cheats=name not in NO_WORK)
            for name, acts in panel.items()
        ]

    async def task_findings(self) -> list[Finding]:
        """Where the solution or the hidden tests of the task just reset can be read."""
        return await task_checks.leaks(self._box, self._playing)

    @property
    def grader_deadline_s(self) -> float | None:
        deadline_s = getattr(self._playing.grade, "deadline_s", None)
        return None if deadline_s is None else float(deadline_s)

    def task_texts(self) -> list[TaskText]:
        return [TaskText(task.id, task.instruction) for task in self._tasks]

    def _acted(self, acts: Sequence[Act]) -> str:
        arguments = {"shell": "command", "apply_patch": "patch"}
        return "".join(self.call(act.tool, **{arguments[act.tool]: act.argument}) for act in acts)


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
        ours = _HERE.parent / "repositories" if tasks is None else None
        defaults = jsonl.RowDefaults(
            patch_is=patch_is,
            test_command=test_command,
            tests_s=tests_s,
            image=image,
            in_image=in_image,
            repositories=Path(repositories) if repositories else ours,
            apart=tasks is None if apart is None else apart,
        )
        source = tasks or str(_HERE / "tasks.jsonl")
        if not source.startswith("hf:"):
            _existing(Path(source), Path.is_file, "give a file of rows, such as tasks.jsonl, or hf:NAME:SPLIT")
        self.needs_step_by = "" if defaults.apart else "tests_s"
        files = [Path(source), defaults.repositories]
        self.task_files = [path for path in files if path is not None and path.exists()]
        super().__init__(tasks=jsonl.load(source, defaults), source=source, **settings)


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
        defaults = harbor.HarborDefaults(
            images=images or {},
            image=image,
            use_base=(sandbox or default_sandbox()) not in _WALL_LESS,
            host_env=host_env,
            shared_verifier=shared_verifier,
        )
        folder = _existing(Path(tasks) if tasks else _HERE / "harbor_tasks", Path.is_dir, "give a folder of tasks")
        self.task_files = [folder]
        super().__init__(tasks=harbor.load(folder, defaults), source=str(folder), sandbox=sandbox, **settings)


def _policy(network: Mapping[str, Any]) -> NetworkPolicy:
    try:
        return NetworkPolicy(**network)
    except TypeError as error:
        raise ConfigError("network", network, f'give {{ allow = ["host:port"] }}: {error}') from error


def _kept(tasks: TaskSet, source: str, skip: str | None) -> list[CodingTask]:
    """The tasks to play. Says what is left out, and why; raises ConfigError if nothing is left."""
    if tasks.bad:
        first = tasks.bad[0]
        if not tasks.tasks:
            raise ConfigError("tasks", source, f"none of its {len(tasks.bad)} tasks can be played: {first.reason}")
        notices.note(
            "coding tasks",
            f"{len(tasks.bad)} of {len(tasks.bad) + len(tasks.tasks)} tasks cannot be played and are left out: "
            f"{first.reason}{' …' if tasks.bad[1:] else ''}. agentrl validate lists all",
            place=source,
        )
    if not tasks.tasks:
        raise ConfigError("tasks", source, "there is no task in this place")
    if skip is None:
        return tasks.tasks
    left_out = _skipped(skip)
    kept = [task for task in tasks.tasks if task.id not in left_out]
    if not kept:
        raise ConfigError("skip", skip, f"it leaves out all {len(tasks.tasks)} tasks")
    counted = [left_out[task.id] for task in tasks.tasks if left_out.get(task.id, (0, 0))[1]]
    absent = f": logs of their gold patches lack {sum(a for a, _ in counted)} of {sum(n for _, n in counted)} test ids"
    dropped = f"{len(tasks.tasks) - len(kept)} of {len(tasks.tasks)} tasks are left out by {skip}"
    log.warning("%s: %s%s", source, dropped, absent if counted else "")  # no notice: the user asked for it
    return kept


def _skipped(skip: str) -> dict[str, tuple[int, int]]:
    """Read a file of tasks to leave out: by task, how many test ids a log of the gold patch lacks, of how many."""
    skipped: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(text_of(Path(skip)).splitlines(), 1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            skipped[line.strip()] = (0, 0)
            continue
        try:
            row = json.loads(line)
            skipped[str(row["task"])] = (int(row.get("absent", 0)), int(row.get("tests", 0)))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"skip, {skip}:{number}", line[:80], 'give an id, or {"task": id}') from error
    return skipped


def _existing(path: Path, exists: Callable[[Path], bool], hint: str) -> Path:
    if not exists(path):
        raise ConfigError("tasks", str(path), hint)
    return path
