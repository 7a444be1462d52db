"""`Trainer(dataset=…, reward_funcs=[…])`: a run without an environment of one's own, and the file that it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from each_case import each_case
from torch import Tensor

from agentrl import config as configuration
from agentrl.algos.algorithm import Loss, Outputs
from agentrl.algos.grpo import GRPO
from agentrl.algos.grpo_variants import DAPO
from agentrl.config import RunConfig
from agentrl.env.dataset_env import ID, TOOLS_ID
from agentrl.errors import ConfigError, UsageError
from agentrl.records import StopReason
from agentrl.run.run_folder import RunDir
from agentrl.run.task_sources import name_shared_rows, with_held_out_sizes
from agentrl.run.trainer import Trainer
from agentrl.store import RunStore

ROWS = [{"prompt": f"say {word}", "word": word} for word in ("one", "two", "three")]
SMALL: dict[str, Any] = {
    "rollout": {"group_size": 2, "max_running": 4, "max_tokens_per_turn": 6},
    "engine": {"max_batch": 8, "kv_cache_mb": 64},
    "buffer": {"groups_per_step": 1, "skip_without_signal": False},
    "train": {"steps": 2},
}


def vowels(prompt: Any, completion: str, row: Any) -> float:
    return sum(letter in "aeiou" for letter in completion) / max(1, len(completion))


def says(prompt: Any, completion: str, row: Any) -> bool:
    return row["word"] in completion


BROKEN = "1 def group(name):\n2     return ['slow', name]\nFAIL group('big') == ['blue', 'big'], got ['slow', 'big']"


def replace_line(line: int, text: str) -> str:
    """Replace one line of the module.

    Args:
        line: number of the line, as shown
        text: the whole new line, with its indentation
    """
    return f"{line} {text}"


async def run_tests() -> str:
    """Run the visible tests on the module as it stands."""
    return "FAIL group('big') == ['blue', 'big'], got ['slow', 'big']"


def results(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(sum(message["role"] == "tool" for message in completion)) for completion in completions]


def undocumented(word: str) -> str:
    return word


class HubRows:
    """As `datasets.Dataset` is met: rows one by one, a length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __iter__(self) -> Any:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def trainer(out: Path, **changes: Any) -> Trainer:
    given: dict[str, Any] = {"dataset": ROWS, "reward_funcs": [vowels, says], "config": SMALL, **changes}
    return Trainer(model="agentrl/tiny-coder", out=out, **given)


def test_the_file_that_is_written_is_the_run(tmp_path: Path) -> None:
    odd = '{prompt} "\\ \t\x00\x7f\u2028 \N{GRINNING FACE}'
    config = {**SMALL, "env": {"kwargs": {"weights": [1.0, 0.5], "prompt": odd}}, "seed": 3}
    one = trainer(tmp_path / "run", dataset=HubRows(ROWS), eval_dataset=ROWS[:2], config=config)
    assert configuration.load(tmp_path / "run.toml") == one.config
    assert one.config.env.kwargs["rewards"] == [f"{__name__}:vowels", f"{__name__}:says"]
    assert [(held_out.n, held_out.first_seed) for held_out in one.config.eval.sets] == [(2, 0)]
    assert one.config.seed == 3 and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_data_set_and_reward_functions_train(tmp_path: Path) -> None:
    """With an algorithm of one's own, which the learner's process has to find."""
    config = {**SMALL, "algo": Halved()}
    summary = trainer(tmp_path / "run", eval_dataset=ROWS[:1], config=config).train()
    assert summary["steps"] == 2
    with RunStore.read(RunDir.open(tmp_path / "run").store_path) as store:
        assert any("halved" in row.values["algorithm"] for row in store.metrics.values("step"))
        episodes = [*store.reads.trajectories("train"), *store.reads.trajectories("eval:held_out:after")]
    assert len(episodes) >= 5
    for episode in episodes:
        assert episode.stop_reason is StopReason.DONE
        (turn,) = episode.turns
        row = next(row for row in ROWS if row["prompt"] in episode.start[-1]["content"])
        assert episode.outcome == pytest.approx(vowels(None, turn.text, row) + says(None, turn.text, row))


def test_tools_stand_in_the_run_file_with_the_environment_that_has_them(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "say four", "word": "four"}\n')
    one = trainer(tmp_path / "run", tools=[run_tests, "tools.py:other"], eval_dataset=held_out)
    assert configuration.load(tmp_path / "run.toml") == one.config
    own = f"{__name__}:run_tests"
    assert (one.config.env.id, one.config.env.kwargs["tools"]) == (TOOLS_ID, [own, "tools.py:other"])
    assert with_held_out_sizes(one.config).eval.sets[0].n == 1
    config = {**SMALL, "env": {"kwargs": {"limits": {"turns": 3}}}}
    alone = trainer(tmp_path / "alone", tools=run_tests, config=config).config.env.kwargs
    assert (alone["tools"], alone["limits"]) == ([own], {"turns": 3})
    in_section = trainer(tmp_path / "section", config={**SMALL, "env": {"kwargs": {"tools": ["tools.py:other"]}}})
    assert in_section.config.env.id == TOOLS_ID and trainer(tmp_path / "without").config.env.id == ID


@pytest.mark.slow
def test_rows_reward_functions_and_tools_train(tmp_path: Path) -> None:
    """The tools have the names of those that the tiny coder knows, so it calls them. The function of TRL's sees what
    the policy read: all results but those of a last turn that the limit ends."""
    asked = [{"role": "system", "content": "Make the tests pass."}, {"role": "user", "content": BROKEN}]
    rows = [{"prompt": asked, "id": number} for number in range(3)]
    config = {
        **SMALL,
        "rollout": {**SMALL["rollout"], "max_tokens_per_turn": 64, "group_size": 4},
        "env": {"kwargs": {"limits": {"turns": 3}}},
    }
    one = trainer(tmp_path / "run", dataset=rows, reward_funcs=results, tools=[replace_line, run_tests], config=config)
    assert one.train()["steps"] == 2
    with RunStore.read(RunDir.open(tmp_path / "run").store_path) as store:
        episodes = list(store.reads.trajectories("train"))
    assert len(episodes) >= 8 and max(len(episode.turns) for episode in episodes) > 1
    for episode in episodes:
        assert episode.stop_reason in (StopReason.DONE, StopReason.TURN_LIMIT)
        read = [message for turn in episode.turns[:-1] for message in turn.step.observation]
        assert {message["role"] for message in read} <= {"tool"} and episode.outcome == len(read)


class Halved(GRPO):
    """A loss of one's own that inherits its kind: a document of kind and settings alone would be plain GRPO."""

    strength: float = 0.5

    def loss(self, tokens: Mapping[str, Tensor], outputs: Outputs, step: int) -> Loss:
        loss = super().loss(tokens, outputs, step)
        return replace(loss, total=loss.total * self.strength, gauges={**loss.gauges, "halved": loss.total.detach()})


def inner_algorithm() -> GRPO:
    class Inner(GRPO):
        """A class that no other process can import."""

    return Inner()


def test_an_algorithm_that_is_an_object_stands_in_the_run_file(tmp_path: Path) -> None:
    trainer(tmp_path / "run", config={"algo": DAPO(clip_high=0.3)})
    read = configuration.load(tmp_path / "run.toml").algo
    assert (type(read), read) == (DAPO, DAPO(clip_high=0.3))


@each_case("form", ["mapping", "RunConfig", "task", "role"])
def test_other_processes_read_the_class_of_an_algorithm_that_nobody_registered(form: str, tmp_path: Path) -> None:
    """Whatever way it comes in: a subclass that became plain GRPO would train something else without a word."""
    document: dict[str, Any] = {"model": "agentrl/tiny-coder", "env": {"id": "agentrl/Nim-v0"}}
    halved = Halved(strength=0.25)
    if form == "task":
        document["tasks"] = [{"seeds": 3, "algo": halved}]
    elif form == "role":
        document["roles"] = [{"name": "first", "algo": halved}]
    else:
        document["algo"] = halved
    config = configuration.parse(document) if form == "RunConfig" else document
    started = Trainer(config=config, out=tmp_path / "run").config
    for text in (configuration.to_json(started), configuration.to_json(started, defaults=False)):
        read = configuration.from_json(text)
        tables: dict[str, list[Any]] = {"task": read.tasks, "role": read.roles}
        algo = tables.get(form, [read])[0].algo
        assert type(algo) is Halved and algo.strength == 0.25, text


def test_an_algorithm_is_named_by_its_file_as_an_environment_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from typing import Literal\n"
        "from agentrl.algos.grpo import GRPO\n"
        "class Mine(GRPO):\n"
        '    kind: Literal["mine"] = "mine"\n'
        "    strength: float = 1.0\n"
        "def function(): ...\n"
    )
    document: dict[str, Any] = {"model": "agentrl/tiny-coder", "env": {"id": "agentrl/Nim-v0"}}
    read = configuration.parse(document | {"algo": {"kind": f"{file}:Mine", "strength": 0.3}})
    assert (type(read.algo).__name__, read.algo.kind) == ("Mine", f"{file}:Mine")
    assert configuration.from_json(configuration.to_json(read)) == read
    for kind, reason in (
        (f"{file}:function", "no subclass"),
        (f"{file}:Absent", "has no 'Absent'"),
        ("mine", "no alg"),
    ):
        with pytest.raises(ConfigError, match=reason) as refused:
            configuration.parse(document | {"algo": {"kind": kind}})
        assert refused.value.field == "algo.kind"


@each_case(
    ("changes", "error", "match"),
    [
        ({"reward_funcs": []}, UsageError, "give dataset and reward_funcs, or env"),
        ({"dataset": None}, UsageError, "give dataset and reward_funcs, or env"),
        ({"env": "agentrl/Nim-v0"}, UsageError, "give dataset and reward_funcs, or env"),
        ({"reward_funcs": [lambda prompt, completion, row: 1.0]}, UsageError, "must be a function at module level"),
        ({"tools": [run_tests], "reward_funcs": []}, UsageError, "beside tools: give dataset and reward_funcs, or env"),
        ({"tools": [run_tests], "env": "agentrl/TRL-v0"}, UsageError, "make them methods of the class"),
        ({"tools": [undocumented]}, UsageError, "tool 'undocumented' needs a docstring"),
        ({"tools": [lambda word: word]}, UsageError, "needs a docstring"),
        ({"dataset": []}, UsageError, "has no rows"),
        ({"dataset": [{"prompt": {1, 2}}]}, UsageError, "row 0 of the data set is nothing that JSON can carry"),
        ({"config": {"train": {"step": 1}}}, ConfigError, "did you mean 'steps'"),
        (
            {"config": {"algo": type("Inner", (GRPO,), {"__qualname__": "f.<locals>.Inner"})()}},
            UsageError,
            "module level",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_and_leaves_no_run_file(
    changes: Any, error: type[Exception], match: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=match):
        trainer(tmp_path / "run", **changes)
    assert not (tmp_path / "run.toml").exists()


def test_a_held_out_file_is_measured_row_by_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not 256 episodes of three rows; and rows that are trained too are named by what they ask."""
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    train.write_text("".join(json.dumps({"id": at, "prompt": f"say {at}"}) + "\n" for at in range(300)))
    held_out.write_text("".join(json.dumps({"id": -at, "prompt": f"say {at}"}) + "\n" for at in (298, 299, 300)))

    def config_of(**one: Any) -> RunConfig:
        rows = {"rows": str(held_out), **one.pop("kwargs", {})}
        return configuration.parse(
            {
                "model": "agentrl/tiny-coder",
                "env": {"id": ID, "kwargs": {"rewards": ["score.py:one"]}},
                "tasks": [{"rows": str(train)}],
                "eval": {"sets": [{"name": "held_out", "kwargs": rows, **one}]},
            }
        )

    def size(**one: Any) -> int:
        return with_held_out_sizes(config_of(**one)).eval.sets[0].n

    assert (size(), size(n=2)) == (3, 2)
    assert size(kwargs={"rows": str(train)}) == 300
    assert caplog.messages == []
    assert size(n=5) == 5
    name_shared_rows(config_of())
    assert caplog.messages == [
        f"held-out rows: eval.sets.0.n = 5 asks 3 rows more than once each: leave n out ({held_out})",
        f"held-out rows: 2 of 3 rows of eval.sets.0 are training rows too: success on them is memory ({held_out})",
    ]


@pytest.mark.medium
def test_a_held_out_file_of_another_kind_is_compared_and_an_empty_one_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Parquet pads messages with nulls: the same questions are found all the same."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    asked: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": f"say {at}"}]} for at in range(3)]
    train, held_out, empty = (tmp_path / name for name in ("train.jsonl", "held_out.parquet", "empty.jsonl"))
    train.write_text("".join(json.dumps(row) + "\n" for row in asked))
    padded = [*asked, {"prompt": [{"role": "user", "content": "say 9", "name": "me"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(padded[::-1]), held_out)
    empty.write_text("\n")

    def config_of(rows: Path) -> RunConfig:
        env = {"id": ID, "kwargs": {"rewards": ["score.py:one"]}}
        sets = [{"name": "held_out", "kwargs": {"rows": str(rows)}}]
        document = {"model": "agentrl/tiny-coder", "env": env, "tasks": [{"rows": str(train)}], "eval": {"sets": sets}}
        return configuration.parse(document)

    assert with_held_out_sizes(config_of(held_out)).eval.sets[0].n == 4
    name_shared_rows(config_of(held_out))
    assert ["3 of 4 rows" in message for message in caplog.messages] == [True]
    with pytest.raises(UsageError, match=r"empty\.jsonl has no rows"):
        with_held_out_sizes(config_of(empty))


def test_the_trainer_is_found_without_loading_torch() -> None:
    code = "import sys, agentrl; agentrl.Trainer; print(sorted(sys.modules.keys() & {'torch', 'transformers'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
