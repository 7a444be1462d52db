"""Does a policy learn to summarise, and does that beat truncation? Episodes of four times their context, over seeds.

    agentrl bench compaction [--seeds 1 2 3] [--model FOLDER]

`agentrl/Reading-v0`: a book of 18 pages, and a question about one of the six facts that stand in it. The context holds
a quarter of the episode. `summary` has the policy write notes, which are trained; `truncation` goes on from the last
pages, and no policy can know more there than they say. Both start from one model (`_reading_model.py`), which forgets a
quarter of its facts at each notes, and are trained alike: the real learner, episodes and batcher in one process and in
turns, so that a run's steps do not depend on what else the machine does.

Success is the share of right answers, a guess is right in a tenth. A run that is in compaction.json with the same
settings is not made again. Writes compaction.json, the table of compaction.md and docs/images/compaction.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import _reading_model
import torch
import trio
import trio.testing
from _page import write_between

import agentrl
from agentrl import config
from agentrl.config import Rollout
from agentrl.config.sections import CompactionSettings
from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.embedded.batching import Batcher, BatchRequest, Emission
from agentrl.engine.embedded.model import EmbeddedModel, KVStore, read_weights
from agentrl.engine.generation import collect
from agentrl.engine.rendering.renderer import Renderer
from agentrl.learner.learner import Learner
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import Generation, Group, GroupState, Message, Task, Trajectory
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.episode import play
from agentrl.rollout.memory_store import MemoryStore
from agentrl_environments.reading import OPENING, book, question

HERE = Path(__file__).resolve().parent
PAGE, PLOT = HERE / "compaction.md", HERE.parent / "docs" / "images" / "compaction.svg"
BEGIN, END = "<!-- the table, by `agentrl bench compaction` -->", "<!-- the end of the table -->"
ENV, CONTEXT = "agentrl/Reading-v0", 92
KWARGS = {"pages": _reading_model.PAGES, "facts": _reading_model.FACTS, "words": _reading_model.PAGE_WORDS}
TURNS = {"max_tokens_per_turn": 24, "max_context": CONTEXT, "max_running": 128}
WAYS: dict[str, dict[str, Any]] = {
    "summary": {"at": 0.58, "how": "summary", "request": _reading_model.REQUEST},
    "truncation": {"at": 0.58, "how": "_reading_model:last_pages"},
}
GROUPS, GROUP_SIZE, STEPS, TASKS, WINDOW = 4, 8, 60, 128, 5
HELD_OUT = 1_000_000_000  # its tasks begin here, far from those of training
TRAIN = {"lr": 2e-3, "warmup_steps": 5}
SETTINGS = {"train": TRAIN, "turns": TURNS, "env": KWARGS, "groups": GROUPS, "group_size": GROUP_SIZE, "steps": STEPS}
Row = dict[str, Any]


class LocalEngine:
    """`protocols.Engine` over the embedded engine's batcher, in this process: each pass has all requests there are."""

    url = "local://engine"

    def __init__(self, model: Path, seed: int) -> None:
        architecture = read_architecture(model)
        places = 2 * TURNS["max_running"]
        embedded = EmbeddedModel(architecture, read_weights(model), length=CONTEXT)
        store = KVStore(architecture, places, CONTEXT)
        self.names = set(architecture.shapes())
        self.batcher = Batcher(embedded, store, max_batch=TURNS["max_running"], seed=seed)

    def load(self, learner: Learner) -> None:
        state = learner.model.module.state_dict()
        weights = {name: value.detach().clone() for name, value in state.items() if name in self.names}
        self.batcher.load(weights, learner.step_index)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        sender, emissions = trio.open_memory_channel[Emission](math.inf)
        asked = BatchRequest(
            id=request.request_id, tokens=[*request.token_ids], sampling=request.sampling, sink=sender.send_nowait
        )
        self.batcher.submit(asked)
        at = 0  # tokens so far: spans of an emission count from the first of all, those of a chunk from its own first
        async for found in emissions:
            spans = [replace(span, start=span.start - at, end=span.end - at) for span in found.spans]
            at += len(found.token_ids)
            yield Chunk(
                token_ids=tuple(found.token_ids),
                logprobs=tuple(found.logprobs),
                spans=tuple(spans),
                finish=found.finish,
            )
            if found.finish:
                return

    async def generate(self, request: GenerateRequest) -> Generation:
        return await collect(self.stream(request), request.on_chunk)

    async def drive(self) -> None:
        while True:
            await trio.testing.wait_all_tasks_blocked()  # every episode has asked for its next turn
            self.batcher.step()

    async def aclose(self) -> None:
        pass


def played(engine: LocalEngine, model: Path, way: str, tasks: range, size: int) -> list[Group]:
    """A group of each task, by the real loop of an episode."""
    store = MemoryStore()
    context = RolloutContext(
        engine=engine,
        renderer=Renderer(model),
        store=store,
        settings=Rollout(**TURNS, compaction=CompactionSettings(**WAYS[way])),
        make_env=lambda task: agentrl.make(ENV, **KWARGS),
        rewarder=None,
    )
    found: dict[int, list[Trajectory]] = {}

    async def one(task: Task, member: int) -> None:
        claim = store.claim(task, group_id=task.index, member=member, size=size)
        await play(claim, context)
        found.setdefault(task.index, []).append(store.take(claim.episode_id)[0])

    async def main() -> None:
        async with trio.open_nursery() as own:
            own.start_soon(engine.drive)
            async with trio.open_nursery() as episodes:
                for seed in tasks:
                    for member in range(size):
                        episodes.start_soon(one, Task(index=seed, env=ENV, seed=seed), member)
            own.cancel_scope.cancel()

    trio.run(main)
    return [
        Group(id=at, task=own[0].task, state=GroupState.TAKEN, size=size, trajectories=tuple(own))
        for at, own in sorted(found.items())
    ]


def success(groups: Sequence[Group]) -> float:
    return round(statistics.fmean(bool(one.success) for group in groups for one in group.trajectories), 4)


def learn(model: Path, way: str, seed: int) -> Row:
    """Train from `model`; the success of each step's episodes, and of held-out tasks before and after."""
    run = config.parse(
        {"model": str(model), "env": {"id": ENV}, "seed": seed, "buffer": {"max_lag": 0}, "train": TRAIN}
    )
    learner, engine = Learner(run.learner, model), LocalEngine(model, seed)
    held_out = range(HELD_OUT, HELD_OUT + TASKS)
    before = success(played(engine, model, way, held_out, 1))
    rates: list[float] = []
    for step in range(STEPS):
        first = seed * 1_000_000 + step * GROUPS
        groups = played(engine, model, way, range(first, first + GROUPS), GROUP_SIZE)
        rates.append(success(groups))
        learner.step(groups, step_of=lambda version: version)
        engine.load(learner)
        print(f"{way}, seed {seed}, step {step + 1}: {rates[-1]:.2f}", flush=True)
    after = success(played(engine, model, way, held_out, 1))
    return {"way": way, "seed": seed, "before": before, "after": after, "success": rates, "settings": said(way)}


def said(way: str) -> str:
    """The settings of a run: rows of others are not compared."""
    return json.dumps(SETTINGS | {"compaction": WAYS[way]}, sort_keys=True)


def length(model: Path) -> int:
    """How many tokens an episode has that is kept whole."""
    digits = [0] * _reading_model.FACTS
    told = [*book(digits, _reading_model.PAGES, _reading_model.PAGE_WORDS, 0), question(0)]
    messages = [Message(role="user", content=OPENING)]
    for text in told:
        messages += [Message(role="assistant", content="next"), Message(role="user", content=text)]
    return len(Renderer(model).start(tuple(messages)))


def found(rows: Sequence[Row], way: str) -> list[Row]:
    return sorted((row for row in rows if row["settings"] == said(way)), key=lambda row: row["seed"])


def smoothed(rates: Sequence[float]) -> list[float]:
    """The mean of the last `WINDOW` rates at each step; fewer at the start."""
    return [statistics.fmean(rates[max(0, at + 1 - WINDOW) : at + 1]) for at in range(len(rates))]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown: a row a seed."""
    yield "| seed | " + " | ".join(f"{way}: before | after" for way in WAYS) + " | margin after |"
    yield "|---" * (2 * len(WAYS) + 2) + "|"
    by_seed = {way: {row["seed"]: row for row in found(rows, way)} for way in WAYS}
    for seed in sorted(set.intersection(*(set(own) for own in by_seed.values()))):
        own = [by_seed[way][seed] for way in WAYS]
        cells = [f"{row[when]:.3f}" for row in own for when in ("before", "after")]
        yield f"| {seed} | {' | '.join(cells)} | {own[0]['after'] - own[1]['after']:+.3f} |"


def plot(rows: Sequence[Row], path: Path) -> None:
    """The success of each step's episodes: a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "agentrl"  # the same file for the same rows
    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    for way, color in zip(WAYS, ("#1f4e79", "#c0792a"), strict=True):
        for number, row in enumerate(found(rows, way)):
            rates, label = smoothed(row["success"]), None if number else way
            axes.plot(range(1, len(rates) + 1), rates, color=color, linewidth=1.2, label=label)
    axes.legend()
    axes.set_ylim(0, 1)
    axes.set_xlabel("optimizer step", fontsize=9)
    axes.set_ylabel(f"training success, mean of {WINDOW} steps", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def publish_page(rows: Sequence[Row], page: Path = PAGE, picture: Path = PLOT) -> None:
    """Write the table into the page, between its marks, and the plot."""
    write_between(page, BEGIN, END, table(rows))
    plot(rows, picture)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="agentrl bench compaction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--model", type=Path, help="of `_reading_model.py`, default: made first, in minutes")
    parser.add_argument("--out", type=Path, default=HERE / "compaction.json")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    todo = [(seed, way) for seed in arguments.seeds for way in WAYS]
    todo = [(seed, way) for seed, way in todo if seed not in {row["seed"] for row in found(rows, way)}]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="agentrl-compaction-") as scratch:
        model = arguments.model or Path(scratch)
        if todo and arguments.model is None:
            _reading_model.make(model)
        if todo:
            print(f"{length(model)} tokens, of which the context holds {CONTEXT}", flush=True)
        for seed, way in todo:
            rows.append(learn(model, way, seed))
            lines = ",\n".join(json.dumps(row) for row in rows)
            arguments.out.write_text(f"[\n{lines}\n]\n")
            print({key: value for key, value in rows[-1].items() if key not in ("success", "settings")}, flush=True)
    publish_page(rows)


if __name__ == "__main__":
    main()
