"""Episodes in the formats of others, read back by their own readers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store.play import START, answer, play, serve, task, turn
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.config import parse
from agentrl.errors import UsageError
from agentrl.records import StopReason
from agentrl.run.run_folder import RunDir
from agentrl.store import Ending, RunStore

SURROGATE = "no text \ud800"
TOOLS = ({"role": "tool", "content": "42"}, {"role": "user", "content": "go on"})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Episode 1: two turns, the first answered by a tool and a user, outcome 1. Episode 2: outcome 0. Episode 3 has
    failed, and is in no export."""
    run = RunDir.create(tmp_path / "run", parse({"name": "mine", "model": "m", "env": {"id": "test/Env-v0"}}))
    with RunStore.open(run.store_path) as store:
        serve(store, 0)
        store.groups.add_groups([task(0)], size=3, purpose="train")
        first, second, third = store.leases.claim("w", 3, lease_s=1e6)
        store.journal.begin(first.episode_id, first.fence, START)
        store.journal.journal_turn(first.episode_id, first.fence, replace(turn(0, 1), text=SURROGATE))
        store.journal.journal_step(first.episode_id, first.fence, 0, replace(answer(0), observation=TOOLS, reward=0.5))
        store.journal.journal_turn(first.episode_id, first.fence, turn(1, 1))
        store.journal.journal_step(first.episode_id, first.fence, 1, answer(1, last=True))
        store.journal.finish(
            first.episode_id, first.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
        )
        play(store, second, outcome=0.0)
        play(store, third, stop=StopReason.ENV_FAILED, outcome=None)
    return run


def exported(run: RunDir, out: Path, *words: str) -> Path:
    done = CliRunner().invoke(app, ["export-episodes", str(run.path), "--out", str(out), *words])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "2 episodes in" in done.output or "--min-outcome" in words
    return out


def test_atif_has_each_turn_with_its_tokens_and_what_answered_it(run: RunDir, tmp_path: Path) -> None:
    out = exported(run, tmp_path / "atif", "--format", "atif")
    assert sorted(file.name for file in out.iterdir()) == ["episode-1.json", "episode-2.json"]
    found = json.loads((out / "episode-1.json").read_text())
    assert found["schema_version"] == "ATIF-v1.7" and found["trajectory_id"] == "mine-1"
    said = [(step["step_id"], step["source"], step["message"]) for step in found["steps"]]
    last = [message["content"] for message in answer(1, last=True).observation]
    assert said[:4] == [
        (1, "user", "mend it"),
        (2, "agent", "no text ?"),
        (3, "user", "go on"),
        (4, "agent", turn(1, 1).text),
    ]
    told = [result["content"] for result in found["steps"][3].get("observation", {"results": []})["results"]]
    assert told + [message for *_, message in said[4:]] == last
    assert found["steps"][1]["observation"] == {"results": [{"content": "42"}]}
    assert found["steps"][1]["metrics"]["completion_token_ids"] == list(turn(0, 1).token_ids)
    assert found["steps"][1]["metrics"]["logprobs"] == pytest.approx(turn(0, 1).logprobs, abs=1e-6)
    assert found["extra"]["outcome"] == 1.0 and found["steps"][1]["extra"]["reward"] == 0.5
    only = exported(run, tmp_path / "best", "--format", "atif", "--min-outcome", "1")
    assert [file.name for file in only.iterdir()] == ["episode-1.json"]


@pytest.mark.long  # Harbor needs Python 3.12, which continuous integration may lack
@pytest.mark.adapters
def test_harbor_takes_atif(run: RunDir, tmp_path: Path) -> None:
    trajectories: Any = pytest.importorskip("harbor.models.trajectories", reason="Harbor needs Python 3.12")
    out = exported(run, tmp_path / "atif", "--format", "atif")
    for file in out.iterdir():
        text = file.read_text()
        assert trajectories.Trajectory.model_validate_json(text).to_json_dict() == json.loads(text)


@pytest.mark.adapters
def test_verifiers_reads_its_traces(run: RunDir, tmp_path: Path) -> None:
    from verifiers.v1.configs.agent import WireAgentConfig
    from verifiers.v1.state import State
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import Trace
    from verifiers.v1.utils.trace_store import read_episodes

    out = exported(run, tmp_path / "traces", "--format", "verifiers")
    first, second = read_episodes(out, Trace[WireTaskData, State, WireAgentConfig])
    (trace,) = first.traces
    assert first.ok and first.env.id == "test/Env-v0" and second.traces[0].rewards["outcome"].value == 0.0
    assert trace.rewards["outcome"].value == 1.0 and trace.metrics == {"success": 1.0}
    assert trace.stop_condition == "done" and trace.task.data.seed == 100
    roles = [(node.message.role, node.sampled) for node in trace.nodes]
    assert roles[:5] == [("user", False), ("assistant", True), ("tool", False), ("user", False), ("assistant", True)]
    (branch,) = trace.branches
    one, two = turn(0, 1), turn(1, 1)
    assert branch.token_ids == [*one.prompt_ids, *one.token_ids, *two.prompt_ids, *two.token_ids]
    assert sum(branch.sampled_mask) == len(one.token_ids) + len(two.token_ids)
    sampled = [value for value, is_sampled in zip(branch.logprobs, branch.sampled_mask, strict=True) if is_sampled]
    assert sampled == pytest.approx([*one.logprobs, *two.logprobs], abs=1e-3)


@pytest.mark.medium
@pytest.mark.adapters
def test_datasets_reads_parquet(run: RunDir, tmp_path: Path) -> None:
    from datasets import Dataset

    out = exported(run, tmp_path / "episodes.parquet", "--format", "parquet")
    first, second = list(Dataset.from_parquet(str(out), cache_dir=str(tmp_path / "cache")))
    assert (first["episode"], first["outcome"], first["success"], first["env"]) == (1, 1.0, True, "test/Env-v0")
    assert second["outcome"] == 0.0
    said = [{key: value for key, value in message.items() if value is not None} for message in first["messages"]]
    assert said[:3] == [
        {"role": "user", "content": "mend it"},
        {"role": "assistant", "content": "no text ?"},
        {"role": "tool", "content": "42"},
    ]
    (one, _) = first["turns"]
    assert one["token_ids"] == list(turn(0, 1).token_ids) and one["reward"] == 0.5 and one["id"] == "1.0.0"
    assert one["versions"] == list(turn(0, 1).versions)


@pytest.mark.remote
def test_inspect_reads_its_log(run: RunDir, tmp_path: Path) -> None:
    from inspect_ai.log import read_eval_log

    out = exported(run, tmp_path / "log.json", "--format", "inspect")
    log = read_eval_log(str(out))
    assert log.status == "success" and log.eval.task == "mine" and log.eval.model == "agentrl/m"
    assert log.samples is not None
    first, second = log.samples
    assert [message.role for message in first.messages][:5] == ["user", "assistant", "tool", "user", "assistant"]
    assert [message.text for message in first.messages][:4] == ["mend it", "no text ?", "42", "go on"]
    assert first.scores is not None and second.scores is not None
    assert first.scores["outcome"].value == 1.0 and second.scores["outcome"].value == 0.0
    assert first.metadata["seed"] == 100 and first.id == 1


def test_a_place_that_cannot_be_written_is_one_line(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    for out, form, said in (
        ("log.txt", "inspect", r"log\.json"),
        ("taken", "atif", "give another --out"),
        ("none/x.json", "inspect", "give another --out"),
    ):
        words = ["export-episodes", str(run.path), "--out", str(tmp_path / out), "--format", form]
        done = CliRunner().invoke(app, words)
        assert isinstance(done.exception, UsageError)
        with pytest.raises(UsageError, match=said):
            raise done.exception
