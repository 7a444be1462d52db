"""`SWE` and `Harbor`: one task an episode, with coding tools in a box, graded in another.

    start in the agent's box ─► tools ─► changed declared files ─► a fresh box ─► hidden tests ─► outcome

Nothing else of the agent's box is looked at. Which format a task came in is the loaders' matter. Knows nothing of
models or tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import trio

from agentrl.env import EpisodeLimits, Grade, ToolEnv
from agentrl.env.limits import positive_seconds
from agentrl.env.oracles import Oracle, script
from agentrl.env.plugged import Named, check_limits
from agentrl.errors import ConfigError, SandboxPathError
from agentrl.protocols import Limits, Sandbox, SandboxSpec
from agentrl.records import Json
from agentrl.sandbox.current import CurrentBox
from agentrl.sandbox.sharing import SharedBackend, shared
from agentrl_environments.swe import carrying, harbor, jsonl
from agentrl_environments.swe.task import Act, Task
from agentrl_environments.swe.trees import apply_patch
from agentrl_tools.editing import Submit
from agentrl_tools.files import ApplyPatch, ListFiles, ReadFile, ReplaceText, WriteFile
from agentrl_tools.search import Search
from agentrl_tools.shell import Shell

_HERE: Final = Path(__file__).parent
_LIMITS: Final = Limits(wall_s=60.0, cpu_s=600.0, memory_bytes=1 << 30, pids=128, output_bytes=4 << 20)
_PATH: Final = "/workspace:/workspace/src:/workspace/lib"  # in front of what an image installed from its own folder
_WALL_LESS: Final = ("bubblewrap", "local-unsafe")  # backends for which the name of a docker image means nothing


class CodingTasks(ToolEnv):
    """The seed of a reset chooses the task, or the option `task` names one by its id.

    `sandbox`: id of a sandbox backend; `ready` boxes of it are made ahead. `box`: fields of `agentrl.protocols.Limits`
    for the boxes, above what a task says of them. `shell_s`: the most seconds of one command of the agent."""

    limits = EpisodeLimits(turns=60, tool_seconds=1800.0)
    blocking = False
    needs_step_by = "verifier.timeout_sec of its tasks"

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        sandbox: str = "bubblewrap",
        ready: int = 0,
        box: Mapping[str, Any] | None = None,
        shell_s: float = 60.0,
        tools: Sequence[Named] = (),
        **settings: Any,
    ) -> None:
        if not tasks:
            raise ConfigError("tasks", [], "there is no task in this place")
        self._tasks = tasks
        self._by_id = {task.id: task for task in tasks}
        if len(self._by_id) < len(tasks):
            twice = [id for id, count in Counter(task.id for task in tasks).items() if count > 1]
            raise ConfigError("tasks", twice[:3], f"{len(twice)} ids come more than once: give each task its own")
        positive_seconds("shell_s", shell_s)
        self._sandbox, self._ready = sandbox, ready
        self._box = self.own_box = CurrentBox()
        self.needs_step_s = max(float(getattr(task.grade, "deadline_s", 0.0)) for task in tasks)
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
        self._box.box = await self._started(boxes)
        start = await carrying.listing(self._box)
        if start is None:
            raise ConfigError("box", self._playing.id, "the task's files cannot be listed: give larger limits")
        self._start = start

    async def teardown(self) -> None:
        boxes, self._boxes = self._boxes, None
        if boxes is not None:
            try:
                await self._box.close()
            finally:
                await boxes.leave()

    async def _started(self, boxes: SharedBackend) -> Sandbox:
        """A box with the task's files as they are at first."""
        limits = dataclasses.replace(_LIMITS, **{**self._playing.limits, **self._box_limits})
        spec = SandboxSpec(image=self._playing.image, limits=limits, env={"PYTHONPATH": _PATH})
        box = await boxes.create(spec)
        try:
            await self._playing.tree.lay(box)
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
        work = await carrying.work(self._box, self._start, self._playing.declared)
        if work is None:
            return Grade(outcome=0.0, success=False)
        assert self._boxes is not None
        box = await self._started(self._boxes)
        try:
            if self._playing.hidden:
                await apply_patch(box, self._playing.hidden)
            try:
                await work.lay(box)
                return await self._playing.grade(box, self._boxes)
            except (
                SandboxPathError
            ):  # the agent's work left no room for the grading, or a file where a folder should be
                return Grade(outcome=0.0, success=False)
        finally:
            with trio.CancelScope(shield=True):
                await box.close()

    def oracles(self) -> list[Oracle]:
        submit = self.call("submit")
        oracles = [Oracle("no-op", 0.0, script(submit))]
        if self._playing.gold:
            oracles.insert(0, Oracle("gold", 1.0, script(self._acted(self._playing.gold), submit)))
        for name, acts in self._playing.cheats.items():
            oracles.append(Oracle(name, 0.0, script(self._acted(acts), submit)))
        return oracles

    def _acted(self, acts: Sequence[Act]) -> str:
        arguments = {"shell": "command", "apply_patch": "patch"}
        return "".join(self.call(act.tool, **{arguments[act.tool]: act.argument}) for act in acts)


class SWE(CodingTasks):
    """Tasks in the format of SWE-bench or SWE-smith. `tasks` is a JSONL file, by default a small set of ours.

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
        defaults = jsonl.Defaults(
            patch_is=patch_is,
            test_command=test_command,
            tests_s=tests_s,
            image=image,
            in_image=in_image,
            repositories=Path(repositories) if repositories else ours,
            apart=tasks is None if apart is None else apart,
        )
        file = _existing(Path(tasks) if tasks else _HERE / "tasks.jsonl", Path.is_file, "give a JSONL file")
        self.needs_step_by = "" if defaults.apart else "tests_s"
        super().__init__(tasks=jsonl.load(file, defaults), **settings)


class Harbor(CodingTasks):
    """Harbor task folders. `tasks` is a folder of them, by default a small set of ours.

    `images` names the built image of a task by the task's folder; `image` is what tasks run on whose Dockerfile only
    copies files (on bubblewrap by default this machine's own programs, on docker the Dockerfile's base)."""

    def __init__(
        self,
        *,
        tasks: str | None = None,
        images: Mapping[str, str] | None = None,
        image: str | None = None,
        sandbox: str = "bubblewrap",
        **settings: Any,
    ) -> None:
        defaults = harbor.Defaults(images=images or {}, image=image, use_base=sandbox not in _WALL_LESS)
        folder = _existing(Path(tasks) if tasks else _HERE / "harbor_tasks", Path.is_dir, "give a folder of tasks")
        super().__init__(tasks=harbor.load(folder, defaults), sandbox=sandbox, **settings)


def _existing(path: Path, exists: Callable[[Path], bool], hint: str) -> Path:
    if not exists(path):
        raise ConfigError("tasks", str(path), hint)
    return path
