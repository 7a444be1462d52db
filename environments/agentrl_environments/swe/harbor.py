"""Harbor task folders as tasks: `task.toml`, `instruction.md`, `environment/`, `tests/test.sh`, `solution/solve.sh`.

Boxes have one folder that can be written, so Harbor's own folders move: the image's WORKDIR (`/app`) is the work
folder, `/tests`, `/logs` and `/solution` stand in `.harbor` below it, and texts that name them are changed alike.

The reward is what `test.sh` writes into the logs of the grading box, which is new; nothing below `.harbor` comes from
the agent's box. `[agentrl] carry` in `task.toml` lists patterns of what is carried over; by default all that the agent
changed, save what decides how Python finds its modules and pytest its tests. `[agentrl] reward_range` is what rewards
are bounded to, `[0, 1]` where a task says nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from agentrl.env import Grade
from agentrl.errors import ConfigError, SandboxPathError
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.sandbox.folder import WORKSPACE
from agentrl_environments.swe.carrying import is_artifact, matching
from agentrl_environments.swe.dockerfile import recipe, workdir_of
from agentrl_environments.swe.task import Act, Task, text_of
from agentrl_environments.swe.trees import Tree

_OWN: Final = ".harbor"
_REWARDS: Final = f"{_OWN}/logs/verifier"
_REWARD_BYTES: Final = 1 << 16
_VERIFIER_S: Final = 600.0
_NEEDED: Final = ("task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """`images` by name of the task folder, each built from its Dockerfile; `image` stands for the base of tasks that
    need no building, which `use_base` would else take from the Dockerfile."""

    images: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    image: str | None = None
    use_base: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Verifier:
    """Grades by the task's own `test.sh` in a fresh box. A run that leaves no number has earned 0."""

    tests: Path
    workdir: str
    deadline_s: float
    lowest: float = 0.0
    highest: float = 1.0

    async def __call__(self, box: Sandbox, boxes: SandboxBackend) -> Grade:
        await box.exec(["rm", "-rf", _OWN])  # an image may have one; what is read below was written here
        for path in sorted(self.tests.rglob("*")):
            if path.is_file():
                data = moved_bytes(path.read_bytes(), self.workdir)
                await box.write(f"{_OWN}/tests/{path.relative_to(self.tests).as_posix()}", data)
        await box.write(f"{_REWARDS}/.keep", b"")
        script = (self.tests / "test.sh").read_bytes()
        shell = "bash" if b"bash" in script.partition(b"\n")[0] else "sh"
        result = await box.exec([shell, f"{_OWN}/tests/test.sh"], timeout_s=self.deadline_s)
        reward = 0.0 if result.timed_out else await _reward(box)
        reward = min(max(reward, self.lowest), self.highest)
        return Grade(outcome=reward, success=reward >= 1.0)


def load(folder: Path, defaults: Defaults) -> list[Task]:
    """The tasks of a folder of task folders, by name. Raises ConfigError that names the file."""
    found = sorted({path.parent for name in _NEEDED[:2] for path in folder.glob(f"*/{name}")})
    images: Any = defaults.images
    if not isinstance(images, Mapping) or set(cast("Mapping[str, Any]", images)) - {path.name for path in found}:
        raise ConfigError("images", images, f"give the image of a task by its folder in {folder}")
    return [task_of(path, defaults) for path in found]


def task_of(folder: Path, defaults: Defaults) -> Task:
    """The task of a folder. Raises ConfigError that says what it lacks."""
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
    for name, table in settings.items():
        if name in ("environment", "agentrl", "verifier", "agent") and not isinstance(table, dict):
            raise ConfigError(f"{folder / 'task.toml'}, {name}", table, "give a table")
    workdir = workdir_of(folder / "environment" / "Dockerfile")
    image, tree = _environment(folder, settings, defaults)
    carry = _table(settings, "agentrl").get("carry")
    verifier_s = _positive(folder, "verifier.timeout_sec", _table(settings, "verifier").get("timeout_sec"))
    solution = folder / "solution" / "solve.sh"
    solve = moved(text_of(solution), workdir) if solution.is_file() else ""
    instruction = moved(text_of(folder / "instruction.md"), workdir).strip()
    return Task(
        id=folder.name,
        instruction=f"{instruction}\n\nThe work folder is {WORKSPACE}. Call submit when you are done.",
        tree=tree,
        declared=matching(carry, f"{folder / 'task.toml'}, agentrl.carry") if carry else is_artifact,
        grade=Verifier(folder / "tests", workdir, verifier_s or _VERIFIER_S, *_reward_range(folder, settings)),
        image=image,
        limits=_limits(folder, _table(settings, "environment")),
        tool_seconds=_positive(folder, "agent.timeout_sec", _table(settings, "agent").get("timeout_sec")),
        gold=(Act.shell(solve),) if solve else (),
        cheats={
            "delete the tests": (Act.shell(f"rm -rf tests {_OWN}"),),
            "leave a reward": (Act.shell(f"mkdir -p {_REWARDS} && echo 1 > {_REWARDS}/reward.txt"),),
        },
    )


def moved(text: str, workdir: str) -> str:
    """A text with Harbor's folders where a box has them."""
    places = {"/tests": f"{WORKSPACE}/{_OWN}/tests", "/logs": f"{WORKSPACE}/{_OWN}/logs"}
    places |= {"/solution": f"{WORKSPACE}/{_OWN}/solution", workdir: WORKSPACE}
    names = "|".join(re.escape(name) for name in sorted(places, key=len, reverse=True))
    return re.sub(rf"(?<![\w.}})*/-])({names})(?![\w-]|\.\w)", lambda found: places[found[1]], text)


def moved_bytes(data: bytes, workdir: str) -> bytes:
    """The same for a file, which may be no text."""
    try:
        return moved(data.decode("utf-8"), workdir).encode()
    except UnicodeDecodeError:
        return data


def _environment(folder: Path, settings: Mapping[str, Any], defaults: Defaults) -> tuple[str | None, Tree]:
    """The image of a task's boxes, and what is in the work folder."""
    file = folder / "environment" / "Dockerfile"
    built = defaults.images.get(folder.name) or _table(settings, "environment").get("docker_image")
    if built:
        if not isinstance(built, str):
            raise ConfigError(f"{folder / 'task.toml'}, environment.docker_image", built, "give the name of an image")
        return built, Tree(in_image=workdir_of(file))
    plan = recipe(file)
    return defaults.image or (plan.base if defaults.use_base else None), Tree(files=plan.files)


def _table(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", settings.get(name, {}))


def _limits(folder: Path, environment: Mapping[str, Any]) -> dict[str, Any]:
    """What a task says of its boxes, as fields of `Limits`. `memory` is the older name of `memory_mb`."""
    limits: dict[str, Any] = {}
    if cpus := _positive(folder, "environment.cpus", environment.get("cpus")):
        limits["cpus"] = cpus
    given = environment.get("memory")
    older = re.fullmatch(r"(\d+) ?([MG])(i?B)?", str(given))
    if given is not None and not older:
        raise ConfigError(f"{folder / 'task.toml'}, environment.memory", given, "give it as 512M or 2G")
    memory_mb = environment.get("memory_mb", int(older[1]) * (1024 if older[2] == "G" else 1) if older else None)
    if mb := _positive(folder, "environment.memory_mb", memory_mb):
        limits["memory_bytes"] = int(mb * (1 << 20))
    return limits


def _positive(folder: Path, name: str, value: Any) -> float | None:
    """A number of `task.toml`, None where it has none. Raises ConfigError for another value."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{folder / 'task.toml'}, {name}", value, "give a number above 0")
    return float(value)


def _reward_range(folder: Path, settings: Mapping[str, Any]) -> tuple[float, float]:
    """Raises ConfigError for what is no range."""
    given = _table(settings, "agentrl").get("reward_range", [0.0, 1.0])
    numbers = [each for each in given if isinstance(each, int | float)] if isinstance(given, list) else []
    if len(numbers) != 2 or not -math.inf < numbers[0] < numbers[1] < math.inf:
        raise ConfigError(f"{folder / 'task.toml'}, agentrl.reward_range", given, "give two numbers, such as [0, 1]")
    return float(numbers[0]), float(numbers[1])


async def _reward(box: Sandbox) -> float:
    """`reward.txt`, or `reward` of `reward.json`, of a box that the agent has not seen. The sources that were graded
    ran beside what wrote it: whatever is no number has earned 0."""
    unreadable = (SandboxPathError, ValueError, KeyError, TypeError, OverflowError, RecursionError)
    with suppress(*unreadable):
        return _finite(float(await box.read(f"{_REWARDS}/reward.txt", most_bytes=_REWARD_BYTES)))
    with suppress(*unreadable):
        text = await box.read(f"{_REWARDS}/reward.json", most_bytes=_REWARD_BYTES)
        return _finite(float(json.loads(text)["reward"]))
    return 0.0


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
