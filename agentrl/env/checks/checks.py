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
    checked_env = subject.make()
    hint = "see gymnasium's API of Env"
    with warnings.catch_warnings(record=True) as recorded_warnings:
        warnings.simplefilter("always")
        try:
            inherits_render = type(checked_env.unwrapped).render is Env.render
            env_checker.check_env(checked_env.unwrapped, skip_render_check=inherits_render)
        except Exception as checker_error:
            problem = " ".join(str(checker_error).split()) or type(checker_error).__name__
            yield Flaw(problem, hint, "reset" if "reset" in problem else "step", checker_error)
        finally:
            checked_env.close()
    for recorded_warning in recorded_warnings:
        problem = re.sub(r"\x1b\[[\d;]*m", "", str(recorded_warning.message))
        if "alternative render modes" not in problem and issubclass(recorded_warning.category, UserWarning):
            yield Flaw(problem, hint, "reset" if "reset" in problem else "step")


def offers_valid_tools(subject: Subject) -> Iterator[Flaw]:
    """Tool schemas are valid, named and described."""
    checked_env = as_async(subject.make())
    tool_schemas = [function_schema(tool_schema) for tool_schema in checked_env.tool_schemas()]
    in_trio(subject, checked_env.aclose)
    tool_names = [str(tool_schema.get("name")) for tool_schema in tool_schemas]
    for tool_name, tool_schema in zip(tool_names, tool_schemas, strict=True):
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", tool_name):
            yield Flaw(f"tool name {tool_name!r}", "use at most 64 letters, digits, _ and -", tool_name)
        if not tool_schema.get("description"):
            yield Flaw(f"tool {tool_name!r} has no description", "say what it does: the model reads it", tool_name)
        try:
            jsonschema.Draft202012Validator.check_schema(tool_schema.get("parameters") or {})
        except jsonschema.SchemaError as schema_error:
            yield Flaw(
                f"tool {tool_name!r}: {schema_error.message}", "fix the JSON schema of its parameters", tool_name
            )
    if len(set(tool_names)) < len(tool_names):
        yield Flaw(f"tools share a name: {', '.join(tool_names)}", "rename one", "tool_schemas")


def replays_equally(subject: Subject) -> Iterator[Flaw]:
    """Equal seeds give equal starts, and equal actions equal answers, on fresh and on used instances."""
    original_play = in_trio(subject, lambda: life(subject, subject.seed))
    fresh_play = in_trio(subject, lambda: life(subject, subject.seed, actions=original_play.actions))
    reused_play = in_trio(subject, lambda: second_life(subject, original_play.actions), plays=2)
    promises_replay = subject.replayable
    for repeated_play, instance_kind in (
        (fresh_play, "a fresh instance"),
        (reused_play, "an instance that has played before"),
    ):
        if (repeated_play.start, repeated_play.info) != (original_play.start, original_play.info):
            difference = _difference(
                (original_play.start, original_play.info), (repeated_play.start, repeated_play.info)
            )
            yield Flaw(
                f"reset(seed={subject.seed}) gave another answer on {instance_kind}: {difference}",
                "call super().reset(seed=seed) first, draw only from self.np_random, clear all state",
                "reset",
            )
        elif promises_replay:
            yield from _first_difference(
                original_play,
                repeated_play,
                f"on {instance_kind}",
                "make step a function of seed and actions (no clock, no address, no set order), or replayable = False",
            )
    if not promises_replay:
        raise Skipped("replay of actions: replayable is False, so an episode that lost its worker starts anew")


def gives_plain_records(subject: Subject) -> Iterator[Flaw]:
    """Observations are messages, rewards finite numbers, flags truth values, infos JSON with typed keys."""
    message_space = subject.space
    for episode_seed in range(subject.seed, subject.seed + 3):
        recorded_play = in_trio(subject, lambda seed=episode_seed: life(subject, seed, ends=True))
        yield from _not_plain("reset", recorded_play.start, recorded_play.info, message_space)
        yield from _not_plain("aend", (), recorded_play.end, message_space)
        for observation, step_reward, terminated, truncated, step_info in recorded_play.steps:
            yield from _not_plain("step", observation, step_info, message_space)
            if type(step_reward) not in (float, int) or not math.isfinite(step_reward):
                yield Flaw(f"reward = {step_reward!r}", "return a finite Python float")
            for flag_name, flag_value in (("terminated", terminated), ("truncated", truncated)):
                if type(flag_value) is not bool:
                    yield Flaw(f"{flag_name} = {flag_value!r}", "return True or False")


def grades_each_end(subject: Subject) -> Iterator[Flaw]:
    """An episode of a `ToolEnv` ends with an outcome, unless the class says that `graded` is False."""
    checked_env = subject.make().unwrapped
    checked_env.close()
    if not isinstance(checked_env, ToolEnv) or not checked_env.graded:
        return
    recorded_play = in_trio(subject, lambda: life(subject, subject.seed, ends=True))
    if "outcome" not in recorded_play.end and not any(
        "outcome" in played_step[4] for played_step in recorded_play.steps
    ):
        grade_problem = "is not written" if type(checked_env).grade is ToolEnv.grade else "returned None"
        hint = (
            "return a number, a truth value or a Grade; graded = False says that step rewards or the run's rewarder do"
        )
        yield Flaw(f"an episode ended without an outcome: grade {grade_problem}", hint, "end")


def closes_again(subject: Subject) -> Iterator[Flaw]:
    """close and aclose work before reset, after it, and a second time."""

    def blocking() -> None:
        for resets_first in (False, True):
            checked_env = subject.make()
            if resets_first:
                checked_env.reset(seed=subject.seed)
            checked_env.close()
            checked_env.close()

    async def awaiting() -> None:
        for resets_first in (False, True):
            checked_env = as_async(subject.make())
            if resets_first:
                await checked_env.areset(seed=subject.seed)
            await checked_env.aclose()
            await checked_env.aclose()

    for method_name, close_twice in (("close", blocking), ("aclose", lambda: in_trio(subject, awaiting))):
        try:
            close_twice()
        except Exception as close_error:
            problem = f"{method_name} raised {type(close_error).__name__}: {close_error}"
            yield Flaw(problem, "make closing harmless before reset and a second time", method_name, close_error)


def survives_cancellation(subject: Subject) -> Iterator[Flaw]:
    """A step that is cancelled anywhere ends at once, and closing works after it."""

    async def cancelled_after(checkpoints: int) -> None:
        checked_env = as_async(subject.make())
        player = Player(subject, checked_env, subject.seed)
        try:
            await player.start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(player.step)
                for _ in range(checkpoints):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await named("aclose", checked_env.aclose())

    # A step is cancelled at its checkpoints, and which of them is in the middle of something only the environment
    # knows.
    for checkpoints in (0, 1, 2, 4, 8):
        in_trio(subject, lambda n=checkpoints: cancelled_after(n))
    yield from ()


def runs_eight_at_once(subject: Subject) -> Iterator[Flaw]:
    """Eight instances in one process do not see each other."""
    episode_seeds = range(subject.seed, subject.seed + INSTANCES)
    plays_alone = {
        episode_seed: in_trio(subject, lambda seed=episode_seed: life(subject, seed)) for episode_seed in episode_seeds
    }
    plays_together: dict[int, Played] = {}

    async def all_of_them() -> None:
        async def one(seed: int) -> None:
            plays_together[seed] = await life(subject, seed, actions=plays_alone[seed].actions, yields=True)

        async with trio.open_nursery() as nursery:
            for episode_seed in episode_seeds:
                nursery.start_soon(one, episode_seed)

    in_trio(subject, all_of_them, plays=INSTANCES)
    if subject.replayable:
        hint = "keep state on the instance, not on the class, the module or a fixed path"
        for episode_seed in episode_seeds:
            yield from _first_difference(
                plays_alone[episode_seed],
                plays_together[episode_seed],
                f"of seed {episode_seed} beside seven others",
                hint,
            )


def answers_any_text(subject: Subject) -> Iterator[Flaw]:
    """No action raises, whatever a model writes; hypothesis searches for one that does, and shrinks it."""
    try:
        import hypothesis
        from hypothesis import strategies as st
    except ImportError:
        raise Skipped("any text as an action: hypothesis is not installed") from None
    checked_env = as_async(subject.make())
    tool_names = [str(function_schema(schema).get("name")) for schema in checked_env.tool_schemas()] or ["tool"]
    text_pieces = [
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
        *tool_names,
    ]
    text_strategy = st.text() | st.lists(st.sampled_from(text_pieces) | st.text(max_size=5), max_size=12).map("".join)
    message_space = subject.space
    loop_thread, probing_end = LoopThread(), time.monotonic() + subject.deadline_s / 2
    is_episode_over = True
    last_action = ""

    async def answer(action: str) -> None:
        nonlocal is_episode_over, last_action
        if is_episode_over:
            await checked_env.areset(seed=subject.seed)
        is_episode_over, last_action = True, action
        with trio.fail_after(subject.deadline_s / 2):
            observation, _, terminated, truncated, _ = await checked_env.astep(action)
        if (mismatch_reason := message_space.why_not(observation)) is not None:
            raise TypeError(f"observation is outside of the space: {mismatch_reason}")
        is_episode_over = terminated or truncated

    @hypothesis.settings(
        max_examples=FUZZ_EXAMPLES, deadline=None, database=None, derandomize=True, report_multiple_bugs=False
    )
    @hypothesis.given(text_strategy)
    def probe(action: str) -> None:
        if time.monotonic() < probing_end:
            loop_thread.run(answer, action)

    try:
        probe()
    except Exception as raised_error:
        single_error = single(raised_error)  # what hypothesis cannot make happen again comes in a group
        hint = "answer it with an observation (in a ToolEnv raise ToolError or ParseError): model output is hostile"
        yield Flaw(
            f"the action {last_action[:200]!r} raised {type(single_error).__name__}: {single_error}",
            hint,
            "step",
            single_error,
        )
    finally:
        loop_thread.run(checked_env.aclose)
        loop_thread.stop()


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
        for seed_offset in range(3):
            await life(subject, subject.seed + seed_offset)

    def blocking_life() -> None:
        checked_env = subject.make()
        checked_env.reset(seed=subject.seed)
        checked_env.close()

    in_trio(subject, lives, plays=3)  # what the first time caches and imports is no leak
    blocking_life()
    held_before = measure(subject.tmp)
    in_trio(subject, lives, plays=3)
    blocking_life()
    for leftover in left_since(held_before, subject.tmp, patience_s=LEAK_PATIENCE_S):
        hint = "close in aclose/close (in a ToolEnv: teardown) what reset and step open"
        yield Flaw(f"left behind by four closed episodes: {leftover}", hint, "aclose")


def restores_snapshots(subject: Subject) -> Iterator[Flaw]:
    """A restored instance goes on exactly as the one that was saved."""
    probe_env = subject.make()
    probe_env.close()
    if not (isinstance(probe_env, Env) and probe_env.has_snapshots):
        raise Skipped("snapshots: snapshot and restore are not written")

    async def round_trip() -> tuple[Played, Played]:
        saved_env, restored_env = cast(Env, subject.make()), cast(Env, subject.make())
        try:
            first_player = Player(subject, saved_env, subject.seed)
            await first_player.start()
            is_episode_over = await first_player.step()
            await named("restore", restored_env.restore(await named("snapshot", saved_env.snapshot())))
            continuing_player, restored_player = Player(subject, saved_env, 1), Player(subject, restored_env, 1)
            while not is_episode_over and len(continuing_player.played.steps) < subject.steps:
                is_episode_over = await continuing_player.step()
                await restored_player.step(continuing_player.played.actions[-1])
            return continuing_player.played, restored_player.played
        finally:
            await saved_env.aclose()
            await restored_env.aclose()

    continued_play, restored_play = in_trio(subject, round_trip, plays=2)
    yield from _first_difference(
        continued_play, restored_play, "after the restore", "put the whole state into the snapshot", "snapshot"
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
    if (mismatch_reason := space.why_not(observation)) is not None:
        yield Flaw(f"observation: {mismatch_reason}", "return a tuple of {'role': …, 'content': …}", method)
    try:
        carried_info = json.loads(json.dumps(info, allow_nan=False))
    except (TypeError, ValueError) as json_error:
        yield Flaw(f"info is not JSON-safe: {json_error}", "put plain values into info", method)
        return
    if carried_info != info:
        yield Flaw(
            f"info changes on its way through JSON: {info!r}", "use lists, not tuples, and texts as keys", method
        )
    for info_key, hint in _wrong_keys(info, space):
        yield Flaw(f"info[{info_key!r}] = {info[info_key]!r}", hint, method)


def _wrong_keys(info: Mapping[str, Json], space: spaces.Messages) -> Iterator[tuple[str, str]]:
    for info_key in ("outcome", "unsettled"):
        if not _is_number(info.get(info_key, 0.0)):
            yield info_key, "give a float"
    for info_key in ("success", "masked"):
        if not isinstance(info.get(info_key, False), bool):
            yield info_key, "give True or False"
    for info_key in ("rewards", "outcomes"):
        values_by_role = info.get(info_key, {})
        if not isinstance(values_by_role, dict) or not all(
            map(_is_number, cast("dict[str, Json]", values_by_role).values())
        ):
            yield info_key, "give a float for each role"
    if not isinstance(info.get("role", ""), str):
        yield "role", "give a text"
    stop_reasons = [stop_reason.value for stop_reason in StopReason]
    if info.get("stop_reason", "done") not in stop_reasons:
        yield "stop_reason", f"give one of {', '.join(stop_reasons)}"
    history = info.get("history", [])
    if not isinstance(history, list) or tuple(cast("list[Any]", history)) not in space:
        yield "history", "give a list of messages"


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _first_difference(one: Played, two: Played, which: str, hint: str, method: str = "step") -> Iterator[Flaw]:
    if one.start != two.start:
        yield Flaw(f"the start {which} differs: {_difference(one.start, two.start)}", hint, "reset")
        return
    for turn_index, (first_step, second_step) in enumerate(zip(one.steps, two.steps, strict=False)):
        if first_step == second_step:
            continue
        problem = f"turn {turn_index} {which} was answered differently: {_difference(first_step, second_step)}"
        if (printed_times := _times_alone(repr(first_step), repr(second_step))) is not None:
            problem = f"turn {turn_index} {which} differs only in a time that was printed: {printed_times}"
            hint = "take times out of what the model reads, or replayable = False"
        yield Flaw(problem, hint, method, action=one.actions[turn_index])
        return


def _times_alone(one: str, two: str) -> str | None:
    """The first two times in which two recordings part, if they part in nothing else."""
    if _TIME.sub("", one) != _TIME.sub("", two):
        return None
    time_pairs = zip(_TIME.findall(one), _TIME.findall(two), strict=False)
    return next(
        (
            f"{first_time!r} against {second_time!r}"
            for first_time, second_time in time_pairs
            if first_time != second_time
        ),
        None,
    )


def _difference(one: object, two: object) -> str:
    """Where two recordings part, in one line."""
    first_text, second_text = repr(one), repr(two)
    first_different = next(
        (
            position
            for position, (first_character, second_character) in enumerate(zip(first_text, second_text, strict=False))
            if first_character != second_character
        ),
        min(len(first_text), len(second_text)),
    )
    excerpt = slice(max(0, first_different - 20), first_different + 40)
    return f"{first_text[excerpt]!r} against {second_text[excerpt]!r}"


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
    patience_end = time.monotonic() + patience_s
    while True:
        held_now = measure(folder)
        leftovers = [
            f"{resource_kind} {resource_name}"
            for resource_kind, names_before, names_now in (
                ("process", before.processes, held_now.processes),
                ("descriptor", before.descriptors, held_now.descriptors),
                ("thread", before.threads, held_now.threads),
                ("file", before.files, held_now.files),
            )
            for resource_name in (names_now - names_before).elements()
        ]
        if not leftovers or time.monotonic() > patience_end:
            return leftovers
        time.sleep(0.02)


def _processes(folder: Path) -> Iterable[str]:
    """Children of this process, and those further down that inherited the name of its folder for temporary files."""
    own_id, folder_mark = str(os.getpid()), os.fsencode(folder)
    for process_folder in Path("/proc").iterdir():
        if not process_folder.name.isdigit() or process_folder.name == own_id:
            continue
        try:
            command_part, _, status_part = (process_folder / "stat").read_text().rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        if status_part.split()[1] == own_id or folder_mark in _variables(process_folder):
            yield f"{process_folder.name} ({command_part.partition('(')[2]})"


def _variables(process: Path) -> bytes:
    """The variables that a process was started with; none of another user's."""
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def _descriptors() -> Iterable[str]:
    for descriptor_link in open_files_folder().iterdir():
        try:
            link_target = str(descriptor_link.readlink())
        except OSError:
            continue
        yield link_target.partition(":")[0] if ":[" in link_target else link_target


def _threads() -> Iterable[str]:
    """trio keeps idle worker threads for some seconds: those are its own."""
    return (
        live_thread.name for live_thread in threading.enumerate() if not live_thread.name.lower().startswith("trio")
    )


def _files(folder: Path) -> Iterable[str]:
    return (str(temporary_path) for temporary_path in folder.rglob("*"))
