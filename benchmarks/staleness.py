"""What staleness costs learning, and what each correction gives back: exact lags, the real learner, seconds a run.

    agentrl bench staleness [--seeds 1 2 3] [--lags 0 1 4 8 16] [--only NAME ...]

The learner is the real one over a model of a few thousand parameters; the engine is a copy of the model that samples
with weights that are exactly `lag` optimizer steps old, which no real run could hold to. An episode has four turns: it
is shown a letter, and should answer with its partner; it may also stop. The outcome is the share of letters
answered rightly, all turns share it. The learning rate is high, so that a policy of some steps ago is another one.

Success is the share of right answers of 256 episodes that the last weights play. A run that is in staleness.json with
the same settings is not made again. Writes staleness.json, the table of staleness.md and docs/images/staleness.svg.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from _page import write_between
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl import config
from agentrl.learner.learner import Learner
from agentrl.records import Group, GroupState, Step, StopReason, Task, Trajectory, Turn, VersionSpan

HERE = Path(__file__).resolve().parent
PAGE, PLOT = HERE / "staleness.md", HERE.parent / "docs" / "images" / "staleness.svg"
BEGIN, END = "<!-- the tables, by `agentrl bench staleness` -->", "<!-- the end of the tables -->"
LETTERS, TURNS, STOP = 6, 4, 0  # tokens: to stop, the answers, the letters
VOCABULARY = 1 + 2 * LETTERS
GROUPS, GROUP_SIZE, STEPS, TASKS = 4, 8, 120, 256
COMMON = (f"train.steps={STEPS}", "train.lr=4e-3", "train.warmup_steps=0")
LAGS = (0, 1, 4, 8, 16)
UNCLIPPED = ("algo.clip_from=proximal",)  # so that rows differ in the correction alone
PPO = ("algo.kind=ppo", *UNCLIPPED, "algo.centre=false", "algo.trace_cap=2")
CORRECTIONS = {
    "grpo, as shipped": (),
    "ppo, as shipped": ("algo.kind=ppo",),
    "grpo, none": (*UNCLIPPED, "algo.importance=none"),
    "grpo, token": (*UNCLIPPED, "algo.importance=token"),
    "grpo, token, masked": (
        *UNCLIPPED,
        "algo.importance=token",
        "algo.importance_mode=mask",
        "algo.importance_bounds=[0.5, 2.0]",
    ),
    "grpo, sequence": (*UNCLIPPED, "algo.importance=sequence"),
    "grpo, geometric": (*UNCLIPPED, "algo.importance=geometric"),
    "ppo, none": (*PPO, "algo.importance=none"),
    "ppo, token": (*PPO, "algo.importance=token"),
    "ppo, prefix": (*PPO, "algo.importance=prefix"),
}
MEASURES = {"after": "at the end", "mean": "mean of all steps"}
Row = dict[str, Any]


def new_model(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    architecture = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(architecture).save_pretrained(folder)
    return folder


class Player:
    """An engine whose weights are those that it was last given."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(folder)
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def play(self, groups: int, size: int, *, first: int, version: int) -> list[Group]:
        """Groups of episodes of one task each, numbered from `first`."""
        tasks = [[self.rng.randrange(LETTERS) for _ in range(TURNS)] for _ in range(groups) for _ in range(size)]
        tasks = [tasks[at - at % size] for at in range(len(tasks))]  # siblings are shown the same letters
        contexts: list[list[int]] = [[] for _ in tasks]
        turns: list[list[Turn]] = [[] for _ in tasks]
        for index in range(TURNS):
            for context, letters in zip(contexts, tasks, strict=True):
                context.append(1 + LETTERS + letters[index])
            logprobs_BV = torch.log_softmax(self.model(torch.tensor(contexts)).logits[:, -1], -1)
            chosen_B = torch.multinomial(logprobs_BV.exp(), 1, generator=self.generator)
            said_B = logprobs_BV.gather(1, chosen_B)[:, 0].tolist()
            for at, token in enumerate(chosen_B[:, 0].tolist()):
                contexts[at].append(token)
                if not turns[at] or turns[at][-1].token_ids[0] != STOP:
                    turns[at].append(turn(index, contexts[at][-2], token, said_B[at], version))
        ends = [episode(first * size + at, size, turns[at], tasks[at]) for at in range(len(tasks))]
        return [group(first + at, ends[at * size : (at + 1) * size]) for at in range(groups)]


def turn(index: int, shown: int, token: int, logprob: float, version: int) -> Turn:
    return Turn(
        index=index,
        parent=index - 1 if index else None,
        prompt_ids=(shown,),
        token_ids=(token,),
        logprobs=(logprob,),
        spans=(VersionSpan(version, 0, 1),),
        finish="stop",
        text="",
        step=Step(observation=(), terminated=token == STOP or index == TURNS - 1),
    )


def episode(id: int, size: int, turns: Sequence[Turn], letters: Sequence[int]) -> Trajectory:
    right = sum(one.token_ids[0] == 1 + letter for one, letter in zip(turns, letters, strict=False))
    return Trajectory(
        episode_id=id,
        group_id=id // size,
        member=id % size,
        task=Task(index=id // size, env="letters", seed=id // size),
        start=(),
        turns=tuple(turns),
        stop_reason=StopReason.DONE,
        outcome=right / TURNS,
        success=right == TURNS,
    )


def group(id: int, members: Sequence[Trajectory]) -> Group:
    return Group(id=id, task=members[0].task, state=GroupState.TAKEN, size=len(members), trajectories=tuple(members))


def learn(lag: int, settings: Sequence[str], seed: int) -> list[float]:
    """The outcome of the episodes that each step's weights play, the last of them those of the end."""
    with tempfile.TemporaryDirectory(prefix="agentrl-staleness-") as scratch:
        folder = new_model(Path(scratch), seed)
        document: dict[str, Any] = {"model": str(folder), "env": {"id": "letters"}}
        for setting in (*COMMON, *settings, f"seed={seed}", f"buffer.max_lag={lag}"):
            config.apply_override(document, setting)
        learner, player = Learner(config.parse(document).learner, folder), Player(folder, seed)
    kept = deque([weights(learner)], maxlen=lag + 1)
    played: list[float] = []
    for step in range(STEPS):
        player.model.load_state_dict(kept[0])  # of `lag` steps ago, or of the beginning
        groups = player.play(GROUPS, GROUP_SIZE, first=step * GROUPS, version=max(0, step - lag))
        played.append(outcome(groups))
        learner.step(groups, step_of=lambda version: version)
        kept.append(weights(learner))
    player.model.load_state_dict(kept[-1])
    return [*played, outcome(player.play(TASKS, 1, first=0, version=STEPS))]


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in learner.model.module.state_dict().items()}


def outcome(groups: Sequence[Group]) -> float:
    return statistics.fmean(member.outcome or 0.0 for one in groups for member in one.trajectories)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown: a row a correction, the median over its seeds at each lag: at the end, and of the whole run."""
    for key, heading in MEASURES.items():
        yield f"| success {heading} | " + " | ".join(f"lag {lag}" for lag in LAGS) + " |"
        yield "|---" * (len(LAGS) + 1) + "|"
        for name in CORRECTIONS:
            yield f"| {name} | " + " | ".join(cell(found(rows, name, lag), key) for lag in LAGS) + " |"
        yield ""
    seeds = {len(found(rows, name, lag)) for name in CORRECTIONS for lag in LAGS}
    yield f"Seeds: {min(seeds)}." if len(seeds) == 1 else f"Seeds: {min(seeds)} to {max(seeds)}; the rest was not run."


def cell(rows: Sequence[Row], key: str) -> str:
    """Median and range."""
    if not rows:
        return "not run"
    low, middle, high = spread([row[key] for row in rows])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Least, median, most."""
    return min(values), statistics.median(values), max(values)


def found(rows: Sequence[Row], name: str, lag: int) -> list[Row]:
    """The rows of a correction at a lag, with the settings of now."""
    return [row for row in rows if row["settings"] == [*COMMON, *CORRECTIONS[name]] and row["lag"] == lag]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Success over the lag, a line a correction: medians, and the range of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "agentrl"  # the same file for the same rows
    kinds = list(dict.fromkeys(name.split(", ")[0] for name in CORRECTIONS))
    figure, grid = pyplot.subplots(
        2, len(kinds), figsize=(9, 5.5), sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for (key, heading), (at, kind) in itertools.product(MEASURES.items(), enumerate(kinds)):
        axes = grid[list(MEASURES).index(key), at]
        for name in [name for name in CORRECTIONS if name.startswith(f"{kind}, ")]:
            values = {lag: [row[key] for row in found(rows, name, lag)] for lag in LAGS}
            drawn = {LAGS.index(lag): spread(of) for lag, of in values.items() if of}
            (line,) = axes.plot(list(drawn), [middle for _, middle, _ in drawn.values()], marker="o", markersize=3)
            line.set_label(name.removeprefix(f"{kind}, "))
            lows, _, highs = zip(*drawn.values(), strict=True) if drawn else ((), (), ())
            axes.fill_between(list(drawn), lows, highs, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set_xticks(range(len(LAGS)), [str(lag) for lag in LAGS])
        axes.set_title(f"{kind}: success {heading}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False)
    figure.supxlabel("age of every token, optimizer steps", fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def publish(rows: Sequence[Row], page: Path = PAGE, picture: Path = PLOT) -> None:
    """Write the tables into the page, between its marks, and the plot."""
    write_between(page, BEGIN, END, table(rows))
    plot(rows, picture)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="agentrl bench staleness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--lags", type=int, nargs="+", choices=LAGS, default=list(LAGS))
    parser.add_argument("--only", nargs="+", choices=list(CORRECTIONS), default=list(CORRECTIONS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=HERE / "staleness.json")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    rows: list[Row] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    for seed, name, lag in itertools.product(arguments.seeds, arguments.only, arguments.lags):
        if seed in {row["seed"] for row in found(rows, name, lag)}:
            continue
        played = learn(lag, CORRECTIONS[name], seed)
        row = {"lag": lag, "seed": seed, "after": round(played[-1], 3), "mean": round(statistics.fmean(played), 3)}
        rows.append({"settings": [*COMMON, *CORRECTIONS[name]], **row})
        lines = ",\n".join(json.dumps(row) for row in rows)
        arguments.out.write_text(f"[\n{lines}\n]\n")
        print(name, row, flush=True)
    publish(rows)


if __name__ == "__main__":
    main()
