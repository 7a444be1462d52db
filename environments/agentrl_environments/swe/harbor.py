"""Harbor task folders as tasks: `task.toml`, `instruction.md`, `environment/`, `tests/test.sh`, `solution/solve.sh`.

Boxes have one folder that can be written, so Harbor's own folders move: the image's WORKDIR (`/app`) is the work
folder, `/tests`, `/logs` and `/solution` stand in `.harbor` below it, and texts that name them are changed alike.

The reward is what `test.sh` writes into the logs of the grading box, which is new; nothing below `.harbor` comes from
the agent's box but `/logs/artifacts`. `[agentrl] carry` in `task.toml` lists patterns of what is carried over; by
default all that the agent changed, save what decides how Python finds its modules and pytest its tests. `[agentrl]
reward_range` is what rewards are bounded to, `[0, 1]` where a task says nothing.

A verifier that runs a program of the agent's in its own box is no judge: the program can write the reward. So a task is
played if its format keeps the two apart: a separate verifier (`[verifier] environment_mode = "separate"`) that gets the
declared artifacts alone, or a list `carry`, neither of which names a program. `[[verifier.collect]]` runs programs in
the agent's box, for artifacts of what they did. Every other task has a *shared* verifier, and is refused by
default (`shared_verifier`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import posixpath
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final, Literal, cast

from agentrl import notices
from agentrl.env import Grade
from agentrl.errors import ConfigError, SandboxError, SandboxPathError, SandboxUnavailable
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.records import Json
from agentrl.sandbox.graded_time import own_time_out
from agentrl.sandbox.work_folder import WORKSPACE
from agentrl_environments.swe.dockerfile import recipe, workdir_of
from agentrl_environments.swe.reward_files import VerifierRewards, rewards_of, total
from agentrl_environments.swe.submitted_files import is_artifact, last_words, matching
from agentrl_environments.swe.task import Act, CodingTask, Collect, Grading, Secret, TaskSet, text_of
from agentrl_environments.swe.trees import WorkTree

_OWN: Final = ".harbor"
_REWARDS: Final = f"{_OWN}/logs/verifier"
_REWARD_BYTES: Final = 1 << 16
_VERIFIER_S: Final = 600.0
_NEEDED: Final = ("task.toml", "instruction.md", "tests/test.sh")
_COMPOSE: Final = (
    "docker-compose.yaml",
    "docker-compose.yml",
    "compose.yaml",
    "compose.yml",
    "singularity-compose.yaml",
)
_ARTIFACTS: Final = f"{_OWN}/logs/artifacts"
_TAIL: Final = 600  # characters of a verifier's output that an info has
_COLLECT_S: Final = 60.0
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")  # as ${NAME} or ${NAME:-default}
_PROGRAMS: Final = re.compile(
    r"(?i)\.(py[cz]?|(ba)?sh|[mc]?js|ts|rb|pl|php|lua|r|jl|c|h|cc|[ch]pp|go|rs|java|jar|class|cs|kt|scala|swift|so|exe|bin|out)"
)
_HONOURED: Final = re.compile(
    r"version|schema_version|source|task|metadata|artifacts|agentrl\.(carry|reward_range|reward_weights)|solution\.env|"
    r"agent\.timeout_sec|verifier\.(timeout_sec|env|environment_mode|collect)|"
    r"environment\.(env|docker_image|cpus|memory|memory_mb|workdir|build_timeout_sec)"
)
"""Keys of `task.toml` that are read, or that say nothing about how a task is played. Every other key is said at load.
Those of `verifier.environment` are those of `environment`."""
_HARMLESS: Final[Mapping[str, Sequence[Any]]] = {  # what a box here does anyway
    "environment.allow_internet": (False,),
    "environment.network_mode": ("no-network",),
    "environment.os": ("linux",),
    "environment.gpus": (0,),
    "environment.mcp_servers": ([],),
    "agent.network_mode": ("no-network",),
    "verifier.network_mode": ("no-network",),
    "steps": ([],),
}
_FORGERY: Final = f"""\
import os, time
if os.fork() == 0:
    os.setsid()
    for _ in range(400):
        for name, text in (("reward.txt", "1"), ("reward.json", '{{"reward": 1}}')):
            try:
                os.makedirs("{WORKSPACE}/{_REWARDS}", exist_ok=True)
                open("{WORKSPACE}/{_REWARDS}/" + name, "w").write(text)
            except OSError:
                pass
        time.sleep(0.005)
os._exit(0)
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HarborDefaults:
    """`images` by name of the task folder, each built from its Dockerfile; `image` stands for the base of tasks that
    need no building, which `use_base` would else take from the Dockerfile. `host_env` are the variables of this machine
    that a task's `env` may take. `shared_verifier`: tasks are played too whose agent could write the reward."""

    images: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    image: str | None = None
    use_base: bool = True
    host_env: Sequence[str] = ()
    shared_verifier: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Verifier:
    """Grades by the task's own `test.sh` in a fresh box. A run that leaves no number has earned 0.

    The outcome is the part `reward` of what it leaves; without one, the mean of the parts; with `weights`, the sum of
    weight times part. Each part is kept in the info, as `scores`. `shared` says that the agent's work may have run
    beside the verifier."""

    tests: Path
    workdir: str
    deadline_s: float
    lowest: float = 0.0
    highest: float = 1.0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    shared: bool = False

    async def __call__(self, box: Sandbox, boxes: SandboxBackend) -> Grade:
        """Raises SandboxError where the box cannot run the verifier: no work of the agent's is the cause of that."""
        test_script = (self.tests / "test.sh").read_bytes()
        shell_name = "bash" if b"bash" in test_script.partition(b"\n")[0] else "sh"
        if (await box.exec(["sh", "-c", 'command -v "$0" >/dev/null', shell_name])).exit_code != 0:
            raise SandboxUnavailable(f"the box of the verifier has no {shell_name}, and its test.sh needs it")
        # An image may have some; what is read below was written here.
        clear_result = await box.exec(["sh", "-c", _CLEAR])
        if clear_result.exit_code != 0:
            raise SandboxError(f"{_OWN} of the verifier's box cannot be emptied: {last_words(clear_result)}")
        for tests_path in sorted(self.tests.rglob("*")):
            if tests_path.is_file():
                moved_file = moved_bytes(tests_path.read_bytes(), self.workdir)
                await box.write(f"{_OWN}/tests/{tests_path.relative_to(self.tests).as_posix()}", moved_file)
        await box.write(f"{_REWARDS}/.keep", b"")
        exec_result = await box.exec([shell_name, f"{_OWN}/tests/test.sh"], env=self.env, timeout_s=self.deadline_s)
        is_late = own_time_out(exec_result)
        grade_info: dict[str, Json] = {
            "grader_exit": exec_result.exit_code,
            **({"shared": True} if self.shared else {}),
        }
        file_rewards = VerifierRewards() if is_late else await self._left(box)
        bounded_parts = {part_name: self._bounded(part_value) for part_name, part_value in file_rewards.parts.items()}
        total_reward = self._bounded(total(bounded_parts, self.weights))
        if bounded_parts.keys() - {"reward"}:
            grade_info["scores"] = dict[str, Json](bounded_parts)
        if is_late:
            grade_info["not_graded"] = f"the verifier was ended at its deadline of {self.deadline_s:g} s"
        elif not bounded_parts:
            output_words = (exec_result.stdout + b"\n" + exec_result.stderr).decode(errors="replace").strip()
            grade_info["test_output"] = f"exit code {exec_result.exit_code}\n{output_words}"[-_TAIL:]
        reward_faults = [*file_rewards.faults, *self._cut(file_rewards.parts)]
        if reward_faults:
            grade_info["reward_faults"] = list[Json](reward_faults)
            for reward_fault in reward_faults:
                notices.note("reward files", reward_fault, place=str(self.tests.parent), by_policy=True)
        return Grade(outcome=total_reward, success=total_reward >= 1.0, info=grade_info)

    async def _left(self, box: Sandbox) -> VerifierRewards:
        """Read the rewards that the verifier wrote into a box that the agent has not seen."""
        reward_files: list[bytes | None] = []
        for file_name in ("reward.json", "reward.txt"):
            try:
                reward_files.append(await box.read(f"{_REWARDS}/{file_name}", most_bytes=_REWARD_BYTES))
            except SandboxPathError:  # missing, a folder, too large
                reward_files.append(None)
        return rewards_of(*reward_files, weighted=self.weights)

    def _cut(self, parts: Mapping[str, float]) -> list[str]:
        """Name each part of the reward that its bounds change, a line each."""
        bounds = f"[{self.lowest:g}, {self.highest:g}]"
        return [
            f"{name} = {value:g} is outside of {bounds}: it counts as {self._bounded(value):g} ([agentrl] reward_range)"
            for name, value in parts.items()
            if self._bounded(value) != value
        ]

    def _bounded(self, value: float) -> float:
        return min(max(value, self.lowest), self.highest)


_CLEAR: Final = f"""
cd {_OWN} 2>/dev/null || exit 0
find . -mindepth 1 -maxdepth 1 ! -name logs -exec rm -rf -- {{}} +
[ -d logs ] && find logs -mindepth 1 -maxdepth 1 ! -name artifacts -exec rm -rf -- {{}} + || rm -f logs
"""


def load(folder: Path, defaults: HarborDefaults) -> TaskSet:
    """The tasks of a folder of task folders, by name. A folder that makes no task is bad for itself alone. A notice
    has the keys of `task.toml` that are not honoured, each with its tasks. Raises ConfigError for images of no task."""
    task_folders = sorted({path.parent for name in _NEEDED[:2] for path in folder.glob(f"*/{name}")})
    task_images: Any = defaults.images
    if not isinstance(task_images, Mapping) or set(cast("Mapping[str, Any]", task_images)) - {
        path.name for path in task_folders
    }:
        raise ConfigError("images", task_images, f"give the image of a task by its folder in {folder}")
    task_set, ignored_keys = TaskSet(), dict[str, list[str]]()
    for path in task_folders:
        task_set.add(path.name, lambda path=path: task_of(path, defaults, ignored_keys))
    if ignored_keys:
        ignored_words = "; ".join(
            f"{ignored_key} ({task_names[0]}{f' and {len(task_names) - 1} more' if task_names[1:] else ''})"
            for ignored_key, task_names in ignored_keys.items()
        )
        notices.note("Harbor tasks", f"not honoured in task.toml: {ignored_words}", place=str(folder))
    return task_set


def task_of(folder: Path, defaults: HarborDefaults, ignored: dict[str, list[str]] | None = None) -> CodingTask:
    """The task of a folder. Raises ConfigError that says what it lacks. The task is added to `ignored`, by each key of
    its `task.toml` that is not honoured."""
    for name in _NEEDED:
        if not (folder / name).is_file():
            raise ConfigError(str(folder), name, "a Harbor task needs this file")
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                str(path), str(path.readlink()), "a link out of the task's folder: what it leads to goes into boxes"
            )
    try:
        settings = tomllib.loads(text_of(folder / "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(folder / "task.toml"), "", f"no TOML: {error}") from error
    toml = f"{folder / 'task.toml'}"
    for name, table in settings.items():
        if name in ("environment", "agentrl", "verifier", "agent", "solution") and not isinstance(table, dict):
            raise ConfigError(f"{toml}, {name}", table, "give a table")
    _must_be_one_box(folder)
    environment, verifier = _table(settings, "environment"), _table(settings, "verifier")
    if settings.get("steps"):
        raise ConfigError(f"{toml}, steps", len(settings["steps"]), "a task of several steps cannot be played")
    if environment.get("os", "linux") != "linux":
        raise ConfigError(f"{toml}, environment.os", environment["os"], "boxes run Linux")
    workdir = _workdir(folder, environment)
    box_image, work_tree = _environment(folder, settings, defaults)
    declared, is_apart = _declared(settings, workdir, toml)
    variables = {
        name: _variables(_table(settings, name).get("env", {}), f"{toml}, {name}.env", workdir, defaults.host_env)
        for name in ("environment", "verifier", "solution")
    }
    verifier_s = _positive(folder, "verifier.timeout_sec", verifier.get("timeout_sec"))
    solution_script = folder / "solution" / "solve.sh"
    solve_command = moved(text_of(solution_script), workdir) if solution_script.is_file() else ""
    if solve_command:
        exports = (f"export {name}={shlex.quote(value)}\n" for name, value in variables["solution"].items())
        is_of_bash = "bash" in solve_command.partition("\n")[0]
        solve_command = "".join(exports) + solve_command
        if is_of_bash:  # the tool runs commands in sh, where `set -o pipefail` and arrays fail
            solve_command = f'exec "$(command -v bash || echo sh)" -c {shlex.quote(solve_command)}'
    instruction = moved(text_of(folder / "instruction.md"), workdir).strip()
    cheat_acts: dict[str, Sequence[Act]] = {
        "delete the tests": (Act.shell(f"rm -rf tests {_OWN}"),),
        "leave a reward": (Act.shell(f"mkdir -p {_REWARDS} && echo 1 > {_REWARDS}/reward.txt"),),
    }
    if is_apart:
        cheat_acts["forge the reward"] = (Act.shell(_forging(solve_command)),)
    coding_task = CodingTask(
        id=folder.name,
        instruction=f"{instruction}\n\nThe work folder is {WORKSPACE}. Call submit when you are done.",
        tree=work_tree,
        declared=declared,
        grade=Verifier(
            folder / "tests",
            workdir,
            verifier_s or _VERIFIER_S,
            *_reward_range(folder, settings),
            env=variables["verifier"],
            weights=_weights(_table(settings, "agentrl").get("reward_weights"), toml),
            shared=not is_apart,
        ),
        grading=_grading(folder, verifier, defaults, toml),
        collect=_collects(verifier.get("collect", []), workdir, toml),
        image=box_image,
        env=variables["environment"],
        limits=_limits(folder, environment),
        tool_seconds=_positive(folder, "agent.timeout_sec", _table(settings, "agent").get("timeout_sec")),
        secrets=_secrets(folder, workdir),
        gold=(Act.shell(solve_command),) if solve_command else (),
        cheats=cheat_acts,
    )
    if not is_apart and not defaults.shared_verifier:
        raise ConfigError(
            f"{toml}, verifier",
            verifier.get("environment_mode", "shared"),
            "its verifier runs beside the agent's work, which can write the reward: have it separate, with artifacts "
            "that are no programs, or give shared_verifier=true to play such tasks all the same",
        )
    if ignored is not None:
        for ignored_key in _not_honoured(settings):
            ignored.setdefault(ignored_key, []).append(folder.name)
    return coding_task


def _secrets(folder: Path, workdir: str) -> list[Secret]:
    def in_prompt(text: str) -> str:
        return moved(text, workdir)

    secret_kinds: tuple[Literal["solution", "tests"], ...] = ("solution", "tests")
    return [
        Secret(kind=secret_kind, file=secret_path, in_prompt=in_prompt)
        for secret_kind in secret_kinds
        for secret_path in sorted((folder / secret_kind).rglob("*"))
        if secret_path.is_file()
    ]


def _must_be_one_box(folder: Path) -> None:
    """Raises ConfigError for a task that needs services beside its box."""
    for folder_name in ("environment", "tests"):
        for compose_name in _COMPOSE:
            if (folder / folder_name / compose_name).is_file():
                hint = "a task has one box, main: services beside it cannot be started, so this task is not played"
                raise ConfigError(str(folder), f"{folder_name}/{compose_name}", hint)


def moved(text: str, workdir: str) -> str:
    """A text with Harbor's folders where a box has them."""
    box_places = {"/tests": f"{WORKSPACE}/{_OWN}/tests", "/logs": f"{WORKSPACE}/{_OWN}/logs"}
    box_places |= {"/solution": f"{WORKSPACE}/{_OWN}/solution", workdir: WORKSPACE}
    place_regex = "|".join(re.escape(place_name) for place_name in sorted(box_places, key=len, reverse=True))
    return re.sub(rf"(?<![\w.}})*/-])({place_regex})(?![\w-]|\.\w)", lambda match: box_places[match[1]], text)


def moved_bytes(data: bytes, workdir: str) -> bytes:
    """Rename the work folder in a file as `moved` does in a text; a file that is no text stays as it is."""
    try:
        return moved(data.decode("utf-8"), workdir).encode()
    except UnicodeDecodeError:
        return data


def _environment(folder: Path, settings: Mapping[str, Any], defaults: HarborDefaults) -> tuple[str | None, WorkTree]:
    """The image of a task's boxes, and what is in the work folder."""
    dockerfile = folder / "environment" / "Dockerfile"
    workdir = _workdir(folder, _table(settings, "environment"))
    built_image = defaults.images.get(folder.name) or _table(settings, "environment").get("docker_image")
    if built_image:
        if not isinstance(built_image, str):
            raise ConfigError(
                f"{folder / 'task.toml'}, environment.docker_image", built_image, "give the name of an image"
            )
        return built_image, WorkTree(in_image=workdir)
    if not dockerfile.is_file():
        raise ConfigError(str(folder), "environment/Dockerfile", "a Harbor task needs this file, or a docker_image")
    box_recipe = recipe(dockerfile)
    return defaults.image or (box_recipe.base if defaults.use_base else None), WorkTree(files=box_recipe.files)


def _table(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", settings.get(name, {}))


def _limits(folder: Path, environment: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds of a task's boxes, as fields of `Limits`. `memory` is the older name of `memory_mb`."""
    box_limits: dict[str, Any] = {}
    if cpu_count := _positive(folder, "environment.cpus", environment.get("cpus")):
        box_limits["cpus"] = cpu_count
    older_memory = environment.get("memory")
    memory_match = re.fullmatch(r"(\d+) ?([MG])(i?B)?", str(older_memory))
    if older_memory is not None and not memory_match:
        raise ConfigError(f"{folder / 'task.toml'}, environment.memory", older_memory, "give it as 512M or 2G")
    memory_mb = environment.get(
        "memory_mb", int(memory_match[1]) * (1024 if memory_match[2] == "G" else 1) if memory_match else None
    )
    if megabytes := _positive(folder, "environment.memory_mb", memory_mb):
        box_limits["memory_bytes"] = int(megabytes * (1 << 20))
    return box_limits


def _positive(folder: Path, name: str, value: Any) -> float | None:
    """A number of `task.toml`, None where it has none. Raises ConfigError for another value."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{folder / 'task.toml'}, {name}", value, "give a number above 0")
    return float(value)


def _reward_range(folder: Path, settings: Mapping[str, Any]) -> tuple[float, float]:
    """Raises ConfigError for what is no range."""
    range_bounds = _table(settings, "agentrl").get("reward_range", [0.0, 1.0])
    range_numbers = (
        [range_bound for range_bound in range_bounds if isinstance(range_bound, int | float)]
        if isinstance(range_bounds, list)
        else []
    )
    if len(range_numbers) != 2 or not -math.inf < range_numbers[0] < range_numbers[1] < math.inf:
        raise ConfigError(
            f"{folder / 'task.toml'}, agentrl.reward_range", range_bounds, "give two numbers, such as [0, 1]"
        )
    return float(range_numbers[0]), float(range_numbers[1])


def _workdir(folder: Path, environment: Mapping[str, Any]) -> str:
    """The folder that is the work folder here. Raises ConfigError for one that is no absolute path."""
    workdir = environment.get("workdir")
    dockerfile = folder / "environment" / "Dockerfile"
    if workdir is None:
        return workdir_of(dockerfile) if dockerfile.is_file() else "/app"
    if not isinstance(workdir, str) or not workdir.startswith("/") or posixpath.normpath(workdir) == "/":
        raise ConfigError(f"{folder / 'task.toml'}, environment.workdir", workdir, "give the path of a folder, as /app")
    return posixpath.normpath(workdir)


def _declared(settings: Mapping[str, Any], workdir: str, toml: str) -> tuple[Callable[[str, Set[str]], bool], bool]:
    """A test of which files are carried to grading, and whether the task declares that no program is among them."""
    carry_patterns = _table(settings, "agentrl").get("carry")
    if carry_patterns:
        return matching(carry_patterns, f"{toml}, agentrl.carry"), not any(map(_is_program, carry_patterns))
    verifier_table = _table(settings, "verifier")
    verifier_mode = verifier_table.get("environment_mode", "separate" if "environment" in verifier_table else "shared")
    if verifier_mode not in ("shared", "separate"):
        raise ConfigError(f"{toml}, verifier.environment_mode", verifier_mode, "choose shared or separate")
    if verifier_mode == "shared":
        return is_artifact, False
    artifacts = settings.get("artifacts", [])
    artifact_entries = cast("list[Any]", artifacts) if isinstance(artifacts, list) else [artifacts]
    source_paths = [
        artifact.get("source") if isinstance(artifact, dict) else artifact
        for artifact in cast("list[Any]", artifact_entries)
    ]
    if not all(isinstance(source_path, str) for source_path in source_paths):
        raise ConfigError(f"{toml}, artifacts", artifacts, "give a list of paths, or of tables with source")
    path_patterns = [f"{_ARTIFACTS}/*"]
    for source_path in cast("list[str]", source_paths):
        relative_path = posixpath.relpath(posixpath.normpath(moved(source_path, workdir)), WORKSPACE)
        if relative_path.startswith(".."):
            raise ConfigError(
                f"{toml}, artifacts", source_path, f"boxes can write to {workdir} and /logs/artifacts alone"
            )
        literal_path = re.sub(r"([*?\[])", r"[\1]", relative_path)
        path_patterns += ["*"] if relative_path == "." else [literal_path, f"{literal_path}/*"]
    is_matching = matching(path_patterns, f"{toml}, artifacts")

    def declared(path: str, start: Set[str]) -> bool:
        return is_matching(path, start) and (path.startswith(f"{_ARTIFACTS}/") or is_artifact(path, start))

    return declared, not any(_is_program(source_path) for source_path in cast("list[str]", source_paths))


def _is_program(path: str) -> bool:
    return _PROGRAMS.fullmatch(posixpath.splitext(path)[1]) is not None


def _grading(folder: Path, verifier: Mapping[str, Any], defaults: HarborDefaults, toml: str) -> Grading | None:
    """The box of a verifier that has an image of its own; None where it has the task's."""
    environment_value = verifier.get("environment", {})
    if not isinstance(environment_value, dict):
        raise ConfigError(f"{toml}, verifier.environment", environment_value, "give a table")
    environment_table = cast("dict[str, Any]", environment_value)
    built_image, dockerfile = environment_table.get("docker_image"), folder / "tests" / "Dockerfile"
    box_limits = _limits(folder, environment_table)
    box_env = _variables(
        environment_table.get("env", {}), f"{toml}, verifier.environment.env", "/app", defaults.host_env
    )
    if built_image is None and not dockerfile.is_file():
        return Grading(limits=box_limits, env=box_env) if environment_table else None
    if built_image is None:
        box_recipe = recipe(dockerfile)
        box_image = defaults.image or (box_recipe.base if defaults.use_base else None)
        return Grading(image=box_image, tree=WorkTree(files=box_recipe.files), limits=box_limits, env=box_env)
    if not isinstance(built_image, str):
        raise ConfigError(f"{toml}, verifier.environment.docker_image", built_image, "give the name of an image")
    work_tree = WorkTree(in_image=environment_table["workdir"]) if "workdir" in environment_table else WorkTree()
    return Grading(image=built_image, tree=work_tree, limits=box_limits, env=box_env)


def _collects(hooks: Any, workdir: str, toml: str) -> tuple[Collect, ...]:
    collect_steps: list[Collect] = []
    for hook_value in cast("list[Any]", hooks) if isinstance(hooks, list) else [hooks]:
        hook_table = cast("dict[str, Any]", hook_value) if isinstance(hook_value, dict) else {}
        hook_command, timeout_s = hook_table.get("command"), hook_table.get("timeout_sec", _COLLECT_S)
        if not isinstance(hook_command, str) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ConfigError(f"{toml}, verifier.collect", hook_value, "give a command, and a timeout_sec above 0")
        if hook_table.get("service", "main") != "main":
            raise ConfigError(f"{toml}, verifier.collect.service", hook_table["service"], "a task has one box: main")
        collect_steps.append(Collect(moved(hook_command, workdir), float(timeout_s)))
    return tuple(collect_steps)


def _variables(table: Any, where: str, workdir: str, host_env: Sequence[str]) -> dict[str, str]:
    """Variables of a task. A task is somebody else's, and its boxes run what a model wrote: a variable of this machine
    goes in only if the user named it. Raises ConfigError."""
    if not isinstance(table, dict):
        raise ConfigError(where, table, "give a table of variables")
    box_variables: dict[str, str] = {}
    for variable_name, variable_value in cast("dict[str, Any]", table).items():
        if (
            not re.fullmatch(r"[A-Za-z_]\w*", variable_name)
            or not isinstance(variable_value, str)
            or "\0" in variable_value
        ):
            raise ConfigError(f"{where}.{variable_name}", variable_value, "a variable is a name and a text")

        def of_host(match: re.Match[str], where: str = f"{where}.{variable_name}") -> str:
            variable, default_value = match[1], match[2]
            if variable in host_env and variable in os.environ:
                return os.environ[variable]
            if default_value is not None:
                return default_value
            allow_words = f"is a variable of this machine: allow it by host_env=[{variable!r}]"
            raise ConfigError(
                where, match[0], f"{variable} {'is not set here' if variable in host_env else allow_words}"
            )

        box_variables[variable_name] = moved(_VARIABLE.sub(of_host, variable_value), workdir)
    return box_variables


def _weights(table: Any, toml: str) -> dict[str, float]:
    part_weights = cast("dict[str, Any]", table) if isinstance(table, dict) else {}
    are_numbers = all(
        isinstance(part_weight, int | float) and math.isfinite(part_weight) for part_weight in part_weights.values()
    )
    if table is not None and not (part_weights and are_numbers):
        raise ConfigError(f"{toml}, agentrl.reward_weights", table, "give numbers by part, as { correct = 0.8 }")
    return {part_name: float(part_weight) for part_name, part_weight in part_weights.items()}


def _not_honoured(settings: Mapping[str, Any]) -> list[str]:
    """The dotted keys of a `task.toml` that ask for something that is not done here."""
    values_by_key: dict[str, Any] = {}
    for top_key, setting in settings.items():
        if top_key not in ("environment", "agentrl", "verifier", "agent", "solution"):
            values_by_key[top_key] = setting
            continue
        for inner_key, inner_value in cast("Mapping[str, Any]", setting).items():
            if (top_key, inner_key) == ("verifier", "environment"):
                values_by_key |= {
                    f"verifier.environment.{setting_key}": nested_value
                    for setting_key, nested_value in inner_value.items()
                }
            else:
                values_by_key[f"{top_key}.{inner_key}"] = inner_value
    return [setting_key for setting_key, setting in values_by_key.items() if not _is_honoured(setting_key, setting)]


def _is_honoured(key: str, value: Any) -> bool:
    if key.startswith("verifier.environment."):
        key = key.removeprefix("verifier.")
    harmless_values = _HARMLESS.get(key)
    return _HONOURED.fullmatch(key) is not None if harmless_values is None else value in harmless_values


def _forging(solve: str) -> str:
    """Commands that turn each program of a solution into one that writes the reward, and remove the rest of it."""
    of_python, of_shell = shlex.quote(_FORGERY), shlex.quote(f"python3 -c {shlex.quote(_FORGERY)}\n")
    return f"""touch /tmp/before; sleep 0.01; ( {solve}
) >/dev/null 2>&1
find . -newer /tmp/before -type f ! -path './{_OWN}/*' > /tmp/changed
while IFS= read -r file; do case "$file" in
*.py) printf %s {of_python} > "$file" ;; *.sh) printf %s {of_shell} > "$file" ;; *) rm -f "$file" ;;
esac; done < /tmp/changed"""
