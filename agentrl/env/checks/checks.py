"""The checks of `check_env`, one function each: a `Subject` in, flaws out; `Skipped` if there is nothing to check.

An exception of the environment's own code goes through as `Broke`; the checker makes a finding of it. For leaks it
counts what this process holds (child processes, descriptors, threads, temporary files; Linux only).
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import jsonschema
import trio
from gymnasium.utils import env_checker

from agentrl.env import spaces
from agentrl.env.checks.runner import Flaw, Played, Player, Skipped, Subject, in_trio, life, named, second_life, single
from agentrl.env.core import Env, as_async
from agentrl.env.sync_async import LoopThread
from agentrl.env.tool_env import ToolEnv
from agentrl.env.tools.tools import function_schema
from agentrl.host.platform_checks import has_proc, open_files_folder
from agentrl.records import Json, StopReason

INSTANCES: Final = 8
FUZZ_EXAMPLES: Final = 150
LEAK_PATIENCE_S: Final = 10.0  # for what ends by itself, on a busy machine too
_TIME: Final = re.compile(r"\d+(?::\d\d)+(?:\.\d+)?|\d+(?:\.\d+)? ?(?:[mun\u00b5]?s|(?:milli|micro)?sec(?:ond)?s?)\b")


def can_start(subject: Subject) -> Iterator[Flaw]:
    """It can be made and reset, and answers one action."""
    in_trio(subject, lambda: life(subject, subject.seed, steps=1))
    yield from ()


def follows_gymnasium(subject: Subject) -> Iterator[Flaw]:
    """gymnasium's own checker passes, without a warning."""
    env = subject.make()
    hint = "see gymnasium's API of Env"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            ours = type(env.unwrapped).render is Env.render
            env_checker.check_env(env.unwrapped, skip_render_check=ours)
        except Exception as error:
            problem = " ".join(str(error).split()) or type(error).__name__
            yield Flaw(problem, hint, "reset" if "reset" in problem else "step", error)
        finally:
            env.close()
    for warning in warned:
        problem = re.sub(r"\x1b\[[\d;]*m", "", str(warning.message))
        if "alternative render modes" not in problem and issubclass(warning.category, UserWarning):
            yield Flaw(problem, hint, "reset" if "reset" in problem else "step")


def offers_valid_tools(subject: Subject) -> Iterator[Flaw]:
    """Tool schemas are valid, named and described."""
    env = as_async(subject.make())
    schemas = [function_schema(schema) for schema in env.tool_schemas()]
    in_trio(subject, env.aclose)
    names = [str(schema.get("name")) for schema in schemas]
    for name, schema in zip(names, schemas, strict=True):
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            yield Flaw(f"tool name {name!r}", "use at most 64 letters, digits, _ and -", name)
        if not schema.get("description"):
            yield Flaw(f"tool {name!r} has no description", "say what it does: the model reads it", name)
        try:
            jsonschema.Draft202012Validator.check_schema(schema.get("parameters") or {})
        except jsonschema.SchemaError as error:
            yield Flaw(f"tool {name!r}: {error.message}", "fix the JSON schema of its parameters", name)
    if len(set(names)) < len(names):
        yield Flaw(f"tools share a name: {', '.join(names)}", "rename one", "tool_schemas")


def replays_equally(subject: Subject) -> Iterator[Flaw]:
    """Equal seeds give equal starts, and equal actions equal answers, on fresh and on used instances."""
    first = in_trio(subject, lambda: life(subject, subject.seed))
    fresh = in_trio(subject, lambda: life(subject, subject.seed, actions=first.actions))
    used = in_trio(subject, lambda: second_life(subject, first.actions), plays=2)
    promised = subject.replayable
    for other, which in ((fresh, "a fresh instance"), (used, "an instance that has played before")):
        if (other.start, other.info) != (first.start, first.info):
            difference = _difference((first.start, first.info), (other.start, other.info))
            yield Flaw(
                f"reset(seed={subject.seed}) gave another answer on {which}: {difference}",
                "call super().reset(seed=seed) first, draw only from self.np_random, clear all state",
                "reset",
            )
        elif promised:
            yield from _first_difference(
                first,
                other,
                f"on {which}",
                "make step a function of seed and actions (no clock, no address, no set order), or replayable = False",
            )
    if not promised:
        raise Skipped("replay of actions: replayable is False, so an episode that lost its worker starts anew")


def gives_plain_records(subject: Subject) -> Iterator[Flaw]:
    """Observations are messages, rewards finite numbers, flags truth values, infos JSON with typed keys."""
    space = subject.space
    for seed in range(subject.seed, subject.seed + 3):
        played = in_trio(subject, lambda seed=seed: life(subject, seed, ends=True))
        yield from _not_plain("reset", played.start, played.info, space)
        yield from _not_plain("aend", (), played.end, space)
        for observation, reward, terminated, truncated, info in played.steps:
            yield from _not_plain("step", observation, info, space)
            if type(reward) not in (float, int) or not math.isfinite(reward):
                yield Flaw(f"reward = {reward!r}", "return a finite Python float")
            for name, flag in (("terminated", terminated), ("truncated", truncated)):
                if type(flag) is not bool:
                    yield Flaw(f"{name} = {flag!r}", "return True or False")


def grades_each_end(subject: Subject) -> Iterator[Flaw]:
    """An episode of a `ToolEnv` ends with an outcome, unless the class says that `graded` is False."""
    env = subject.make().unwrapped
    env.close()
    if not isinstance(env, ToolEnv) or not env.graded:
        return
    played = in_trio(subject, lambda: life(subject, subject.seed, ends=True))
    if "outcome" not in played.end and not any("outcome" in step[4] for step in played.steps):
        reason = "is not written" if type(env).grade is ToolEnv.grade else "returned None"
        hint = (
            "return a number, a truth value or a Grade; graded = False says that step rewards or the run's rewarder do"
        )
        yield Flaw(f"an episode ended without an outcome: grade {reason}", hint, "end")


def closes_again(subject: Subject) -> Iterator[Flaw]:
    """close and aclose work before reset, after it, and a second time."""

    def blocking() -> None:
        for resets in (False, True):
            env = subject.make()
            if resets:
                env.reset(seed=subject.seed)
            env.close()
            env.close()

    async def awaiting() -> None:
        for resets in (False, True):
            env = as_async(subject.make())
            if resets:
                await env.areset(seed=subject.seed)
            await env.aclose()
            await env.aclose()

    for method, body in (("close", blocking), ("aclose", lambda: in_trio(subject, awaiting))):
        try:
            body()
        except Exception as error:
            problem = f"{method} raised {type(error).__name__}: {error}"
            yield Flaw(problem, "make closing harmless before reset and a second time", method, error)


def survives_cancellation(subject: Subject) -> Iterator[Flaw]:
    """A step that is cancelled anywhere ends at once, and closing works after it."""

    async def cancelled_after(checkpoints: int) -> None:
        env = as_async(subject.make())
        player = Player(subject, env, subject.seed)
        try:
            await player.start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(player.step)
                for _ in range(checkpoints):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await named("aclose", env.aclose())

    # A step is cancelled at its checkpoints, and which of them is in the middle of something only the environment
    # knows.
    for checkpoints in (0, 1, 2, 4, 8):
        in_trio(subject, lambda n=checkpoints: cancelled_after(n))
    yield from ()


def runs_eight_at_once(subject: Subject) -> Iterator[Flaw]:
    """Eight instances in one process do not see each other."""
    seeds = range(subject.seed, subject.seed + INSTANCES)
    alone = {seed: in_trio(subject, lambda seed=seed: life(subject, seed)) for seed in seeds}
    together: dict[int, Played] = {}

    async def all_of_them() -> None:
        async def one(seed: int) -> None:
            together[seed] = await life(subject, seed, actions=alone[seed].actions, yields=True)

        async with trio.open_nursery() as nursery:
            for seed in seeds:
                nursery.start_soon(one, seed)

    in_trio(subject, all_of_them, plays=INSTANCES)
    if subject.replayable:
        hint = "keep state on the instance, not on the class, the module or a fixed path"
        for seed in seeds:
            yield from _first_difference(alone[seed], together[seed], f"of seed {seed} beside seven others", hint)


def answers_any_text(subject: Subject) -> Iterator[Flaw]:
    """No action raises, whatever a model writes; hypothesis searches for one that does, and shrinks it."""
    try:
        import hypothesis
        from hypothesis import strategies as st
    except ImportError:
        raise Skipped("any text as an action: hypothesis is not installed") from None
    env = as_async(subject.make())
    names = [str(function_schema(schema).get("name")) for schema in env.tool_schemas()] or ["tool"]
    pieces = [
        "<tool_call>",
        "</tool_call>",
        '{"name": "',
        '", "arguments": {',
        "}}",
        '"',
        "\n",
        "{",
        "[",
        "null",
        *names,
    ]
    texts = st.text() | st.lists(st.sampled_from(pieces) | st.text(max_size=5), max_size=12).map("".join)
    space = subject.space
    loop, until = LoopThread(), time.monotonic() + subject.deadline_s / 2
    over = True
    last = ""

    async def answer(action: str) -> None:
        nonlocal over, last
        if over:
            await env.areset(seed=subject.seed)
        over, last = True, action
        with trio.fail_after(subject.deadline_s / 2):
            observation, _, terminated, truncated, _ = await env.astep(action)
        if (reason := space.why_not(observation)) is not None:
            raise TypeError(f"observation is outside of the space: {reason}")
        over = terminated or truncated

    @hypothesis.settings(
        max_examples=FUZZ_EXAMPLES, deadline=None, database=None, derandomize=True, report_multiple_bugs=False
    )
    @hypothesis.given(texts)
    def probe(action: str) -> None:
        if time.monotonic() < until:
            loop.run(answer, action)

    try:
        probe()
    except Exception as group:
        error = single(group)  # what hypothesis cannot make happen again comes in a group
        hint = "answer it with an observation (in a ToolEnv raise ToolError or ParseError): model output is hostile"
        yield Flaw(f"the action {last[:200]!r} raised {type(error).__name__}: {error}", hint, "step", error)
    finally:
        loop.run(env.aclose)
        loop.stop()


# Why a leak is a difference between two counts, and why some lives come before the first count.
#
# A run plays an environment many times in one process. A descriptor that each episode leaves open ends that process at
# the bound of its descriptors, with an error in whichever episode comes then. To look for `close` in the source says
# little: what stays may be a thread of a library or a file of a tool. So the environment is played, and what this
# process holds is listed before and after.
#
# One count after one life would report too much. The first life imports modules, opens caches, starts a pool of
# threads; all this stays, on purpose, and does not grow. So the lives before the first count do not count. The same
# seeds are then played again: what is there in addition comes back with each episode.
#
# Names are counted and not only collected: a second pipe has the same name as the first. What ends by itself has
# `LEAK_PATIENCE_S` to do so, and idle threads of trio are not the environment's.
#
# A process whose parent has ended is no child of this process any more. Its environment still names the private folder
# for temporary files, which every process of the checked environment inherits: the check looks for it.
#
# The prices: what an environment opens once in a hundred episodes is not seen. Neither is a daemon that was started
# with variables of its own alone. On a system without /proc the check is skipped, and the report says so. Law 4 rests
# on it: what an environment leaves behind has no owner but the worker. `tests/env/test_checker.py` has an environment
# for each kind (`LeavesAProcess`, `LeavesADaemon`, `LeavesADescriptor`, `LeavesAThread`, `LeavesAFile`).
def leaves_nothing(subject: Subject) -> Iterator[Flaw]:
    """After closing no process, descriptor, thread or temporary file of the environment is left."""
    if not can_measure():
        raise Skipped("leaks: this system has no /proc")

    async def lives() -> None:
        for seed in range(3):
            await life(subject, subject.seed + seed)

    def blocking_life() -> None:
        env = subject.make()
        env.reset(seed=subject.seed)
        env.close()

    in_trio(subject, lives, plays=3)  # what the first time caches and imports is no leak
    blocking_life()
    before = measure(subject.tmp)
    in_trio(subject, lives, plays=3)
    blocking_life()
    for leftover in left_since(before, subject.tmp, patience_s=LEAK_PATIENCE_S):
        hint = "close in aclose/close (in a ToolEnv: teardown) what reset and step open"
        yield Flaw(f"left behind by four closed episodes: {leftover}", hint, "aclose")


def restores_snapshots(subject: Subject) -> Iterator[Flaw]:
    """A restored instance goes on exactly as the one that was saved."""
    probe = subject.make()
    probe.close()
    if not (isinstance(probe, Env) and probe.has_snapshots):
        raise Skipped("snapshots: snapshot and restore are not written")

    async def round_trip() -> tuple[Played, Played]:
        saved, other = cast(Env, subject.make()), cast(Env, subject.make())
        try:
            before = Player(subject, saved, subject.seed)
            await before.start()
            over = await before.step()
            await named("restore", other.restore(await named("snapshot", saved.snapshot())))
            rest, restored = Player(subject, saved, 1), Player(subject, other, 1)
            while not over and len(rest.played.steps) < subject.steps:
                over = await rest.step()
                await restored.step(rest.played.actions[-1])
            return rest.played, restored.played
        finally:
            await saved.aclose()
            await other.aclose()

    went_on, restored = in_trio(subject, round_trip, plays=2)
    yield from _first_difference(
        went_on, restored, "after the restore", "put the whole state into the snapshot", "snapshot"
    )


CHECKS: Final[tuple[Callable[[Subject], Iterator[Flaw]], ...]] = (
    can_start,
    follows_gymnasium,
    offers_valid_tools,
    replays_equally,
    gives_plain_records,
    grades_each_end,
    closes_again,
    survives_cancellation,
    runs_eight_at_once,
    answers_any_text,
    leaves_nothing,
    restores_snapshots,
)
"""In the order in which they run; the first one decides whether the others make sense."""


def _not_plain(method: str, observation: object, info: Mapping[str, Json], space: spaces.Messages) -> Iterator[Flaw]:
    if (reason := space.why_not(observation)) is not None:
        yield Flaw(f"observation: {reason}", "return a tuple of {'role': …, 'content': …}", method)
    try:
        carried = json.loads(json.dumps(info, allow_nan=False))
    except (TypeError, ValueError) as error:
        yield Flaw(f"info is not JSON-safe: {error}", "put plain values into info", method)
        return
    if carried != info:
        yield Flaw(
            f"info changes on its way through JSON: {info!r}", "use lists, not tuples, and texts as keys", method
        )
    for key, hint in _wrong_keys(info, space):
        yield Flaw(f"info[{key!r}] = {info[key]!r}", hint, method)


def _wrong_keys(info: Mapping[str, Json], space: spaces.Messages) -> Iterator[tuple[str, str]]:
    for name in ("outcome", "unsettled"):
        if not _is_number(info.get(name, 0.0)):
            yield name, "give a float"
    for name in ("success", "masked"):
        if not isinstance(info.get(name, False), bool):
            yield name, "give True or False"
    for name in ("rewards", "outcomes"):
        by_role = info.get(name, {})
        if not isinstance(by_role, dict) or not all(map(_is_number, cast("dict[str, Json]", by_role).values())):
            yield name, "give a float for each role"
    if not isinstance(info.get("role", ""), str):
        yield "role", "give a text"
    reasons = [reason.value for reason in StopReason]
    if info.get("stop_reason", "done") not in reasons:
        yield "stop_reason", f"give one of {', '.join(reasons)}"
    history = info.get("history", [])
    if not isinstance(history, list) or tuple(cast("list[Any]", history)) not in space:
        yield "history", "give a list of messages"


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _first_difference(one: Played, two: Played, which: str, hint: str, method: str = "step") -> Iterator[Flaw]:
    if one.start != two.start:
        yield Flaw(f"the start {which} differs: {_difference(one.start, two.start)}", hint, "reset")
        return
    for index, (left, right) in enumerate(zip(one.steps, two.steps, strict=False)):
        if left == right:
            continue
        problem = f"turn {index} {which} was answered differently: {_difference(left, right)}"
        if (times := _times_alone(repr(left), repr(right))) is not None:
            problem = f"turn {index} {which} differs only in a time that was printed: {times}"
            hint = "take times out of what the model reads, or replayable = False"
        yield Flaw(problem, hint, method, action=one.actions[index])
        return


def _times_alone(one: str, two: str) -> str | None:
    """The first two times in which two recordings part, if they part in nothing else."""
    if _TIME.sub("", one) != _TIME.sub("", two):
        return None
    pairs = zip(_TIME.findall(one), _TIME.findall(two), strict=False)
    return next((f"{left!r} against {right!r}" for left, right in pairs if left != right), None)


def _difference(one: object, two: object) -> str:
    """Where two recordings part, in one line."""
    left, right = repr(one), repr(two)
    first_different = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    start = max(0, first_different - 20)
    return f"{left[start : first_different + 40]!r} against {right[start : first_different + 40]!r}"


@dataclass(frozen=True, slots=True)
class Held:
    """Names of what is held; equal names are counted."""

    processes: Counter[str]
    descriptors: Counter[str]
    threads: Counter[str]
    files: Counter[str]


def can_measure() -> bool:
    return has_proc()


def measure(folder: Path) -> Held:
    """List the resources that this process holds now; `folder` is where its temporary files go."""
    return Held(Counter(_processes(folder)), Counter(_descriptors()), Counter(_threads()), Counter(_files(folder)))


def left_since(before: Held, folder: Path, *, patience_s: float) -> list[str]:
    """Names that are held now and were not before, save those that go by themselves within `patience_s`."""
    until = time.monotonic() + patience_s
    while True:
        now = measure(folder)
        leftovers = [
            f"{kind} {name}"
            for kind, earlier, later in (
                ("process", before.processes, now.processes),
                ("descriptor", before.descriptors, now.descriptors),
                ("thread", before.threads, now.threads),
                ("file", before.files, now.files),
            )
            for name in (later - earlier).elements()
        ]
        if not leftovers or time.monotonic() > until:
            return leftovers
        time.sleep(0.02)


def _processes(folder: Path) -> Iterable[str]:
    """Children of this process, and those further down that inherited the name of its folder for temporary files."""
    own, mark = str(os.getpid()), os.fsencode(folder)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or entry.name == own:
            continue
        try:
            name, _, rest = (entry / "stat").read_text().rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        if rest.split()[1] == own or mark in _variables(entry):
            yield f"{entry.name} ({name.partition('(')[2]})"


def _variables(process: Path) -> bytes:
    """The variables that a process was started with; none of another user's."""
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def _descriptors() -> Iterable[str]:
    for entry in open_files_folder().iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        yield target.partition(":")[0] if ":[" in target else target


def _threads() -> Iterable[str]:
    """trio keeps idle worker threads for some seconds: those are its own."""
    return (thread.name for thread in threading.enumerate() if not thread.name.lower().startswith("trio"))


def _files(folder: Path) -> Iterable[str]:
    return (str(path) for path in folder.rglob("*"))
