"""What is known before a run starts: one line at once, and no process is left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from each_case import each_case

from agentrl.config import parse
from agentrl.config.machine_defaults import Machine
from agentrl.env.dataset_env import ID, TOOLS_ID
from agentrl.errors import ConfigError, UsageError
from agentrl.models.resolve import model_dir
from agentrl.records import Message, Task, Trajectory
from agentrl.run import preflight
from agentrl.run.preflight import check_limits, check_tasks
from agentrl.run.trainer import check_startable
from agentrl.task_ids import task_id

from .envs import Vowels

HERE = __name__


def config(
    model: Path | str = "agentrl/tiny-coder", env: str | dict[str, Any] = f"{HERE}:Vowels", **tables: Any
) -> Any:
    return parse({"model": str(model), "env": {"id": env} if isinstance(env, str) else env, **tables})


class Broken(Vowels):
    """Its reset raises for the seeds of `broken`, all of them by default."""

    def __init__(self, broken: list[int] | None = None) -> None:
        self._broken = broken

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self._broken is None or seed in self._broken:
            raise KeyError("no such table")
        print("error: this is no finding")
        return super().reset(seed=seed, options=options)


class Long(Vowels):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        return (Message(role="user", content="word " * 3000),), {}


class Published(Vowels):
    evaluation_set = "its answers are published"


class Exits(Vowels):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        import os

        os._exit(9)


def judge(prompt: Any, completion: str, row: Any) -> float:
    return row["missing"]


async def wait() -> str:
    """Wait."""
    return ""


def same(prompt: Any, completion: str, row: Any) -> bool:
    return completion == row["answer"]


def of_episode(episode: Trajectory) -> float:
    return 1.0


def of_two(prompt: str, completion: str) -> float:
    return 1.0


class Judge:
    def __call__(self, episode: Trajectory, weight: float = 1.0) -> float:
        return weight


judging = Judge()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(model_dir("agentrl/tiny-coder"), folder)
    return folder


def rows(tmp_path: Path, *found: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in found))
    id = TOOLS_ID if "tools" in kwargs else ID
    env = {"id": id, "kwargs": {"rewards": [f"{HERE}:same"], **kwargs}}
    return {"env": env, "tasks": [{"rows": str(file)}]}


@pytest.mark.medium
def test_what_can_be_played_is_not_remarked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_tasks(config(eval={"sets": [{"name": "e"}]}))
    check_tasks(config(**rows(tmp_path, {"prompt": "a", "answer": "b"})))
    assert capsys.readouterr().err == ""


@pytest.mark.medium
@each_case(
    ("env", "said"),
    [
        (f"{HERE}:Broken", r"test_preflight:Broken: reset raised KeyError: 'no such table'"),
        (f"{HERE}:Exits", r"a worker could not start: it ended with status 9"),
        (f"{HERE}:Long", r"rollout\.max_context = 512: the prompt of \S+:Long, seed 0, has \d+ tokens: give more"),
        ({"id": "agentrl/CodeRepair-v0", "kwargs": {"sandbox": "nowhere"}}, r"'nowhere'"),
        ({"id": "agentrl/CodeRepair-v0", "kwargs": {"sandbox": "docker"}}, r"docker"),
    ],
)
def test_what_fails_in_all_tasks_is_one_line(
    env: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    with pytest.raises(UsageError, match=said) as refused:
        check_tasks(config(env=env, rollout={"max_context": 512}))
    assert "\n" not in str(refused.value)


def test_a_task_that_is_broken_is_named_and_the_others_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    check_tasks(config(env={"id": f"{HERE}:Broken", "kwargs": {"broken": [0, 1]}}))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("no such table" in line and line.startswith("agentrl: warning: ") for line in lines)


@pytest.mark.medium
def test_tasks_that_the_run_skips_are_not_tried(capsys: pytest.CaptureFixture[str]) -> None:
    env: dict[str, Any] = {"id": f"{HERE}:Broken", "kwargs": {"broken": [0, 1, 2, 3]}}
    with pytest.raises(UsageError, match="no such table"):
        check_tasks(config(env=env))
    capsys.readouterr()
    skipped = [task_id(Task(index=0, env=env["id"], seed=seed, kwargs=env["kwargs"])) for seed in range(4)]
    check_tasks(config(env=env, rollout={"skip_tasks": skipped}))
    assert capsys.readouterr().err == ""


@pytest.mark.medium
@each_case(
    ("row", "kwargs", "said"),
    [
        (
            {"question": "a", "answer": "b"},
            {},
            r"prompt = '\{prompt\}' cannot be filled: 'prompt'; a row has answer",
        ),
        ({"prompt": "a"}, {}, r"same' raised KeyError: 'answer' \(.*test_preflight\.py:\d+\)"),
        ({"prompt": "a"}, {"tools": [f"{HERE}:wait"]}, r"same' raised KeyError: 'answer'"),
        ({"prompt": "a", "answer": "b"}, {"rewards": [f"{HERE}:judge"]}, r"judge' raised KeyError: 'missing'"),
    ],
)
def test_reward_functions_judge_a_canned_answer_with_the_columns_there_are(
    row: dict[str, Any], kwargs: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        check_tasks(config(**rows(tmp_path, row, row, row, **kwargs)))


def test_a_template_that_refuses_every_first_message_is_one_line(model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.content.startswith('task') %}{{ raise_exception('no task') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    with pytest.raises(UsageError, match=r"refuses these messages: no task \(roles: user\)"):
        check_tasks(config(model))


@pytest.mark.medium
def test_tests_of_a_reward_source_have_a_box_and_their_command(tmp_path: Path) -> None:
    source = {"source": "t", "kind": "tests", "command": ["no-such-program"], "sandbox": "nowhere"}
    with pytest.raises(UsageError, match=r"reward source 't': no sandboxes id 'nowhere' is registered"):
        check_tasks(config(rewards=[source]))


def test_more_context_than_the_model_has_positions_is_refused(model: Path) -> None:
    described = json.loads((model / "config.json").read_text())
    assert described["max_position_embeddings"] == 2048
    with pytest.raises(ConfigError, match=r"rollout.max_context = 4096: the model .* has 2048 positions: give at most"):
        check_limits(config(model, rollout={"max_context": 4096}))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    (model / "config.json").write_text(json.dumps({**described, "rope_scaling": yarn}))
    check_limits(config(model, rollout={"max_context": 8192}, train={"tokens_per_batch": 10_000}))
    with pytest.raises(ConfigError, match="has 8192 positions"):
        check_limits(config(model, rollout={"max_context": 8193}, train={"tokens_per_batch": 10_000}))


@pytest.mark.parametrize(("name", "value"), [("workers", 200_000), ("max_running", 100_000_000)])
def test_more_processes_and_episodes_than_memory_holds_are_refused(name: str, value: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"rollout.{name} = {value}: each takes about .* are free: give at most (\d+)"
    ) as no:
        check_limits(config(rollout={name: value}))
    most = int(str(no.value).split()[-1])
    check_limits(config(rollout={name: most // 2}))


def test_the_bound_of_workers_is_free_memory_by_what_each_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "free_memory_bytes", lambda: 900 << 20)
    check_limits(config(rollout={"workers": 10}))
    with pytest.raises(ConfigError, match=r"workers = 11: each takes about 90 MB of memory, .* give at most 10$"):
        check_limits(config(rollout={"workers": 11}))


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "seen", classmethod(lambda cls: cls()))
    with pytest.raises(ConfigError, match=r"train\.device = 'cuda': torch sees no GPU here: give 'cpu'"):
        check_limits(config(train={"device": "cuda"}))
    monkeypatch.setattr(Machine, "seen", classmethod(lambda cls: cls(gpus=1)))
    check_limits(config(train={"device": "cuda"}))


def test_rewarders_that_cannot_be_called_with_an_episode_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.reward = '\S+:of_two': takes \(prompt.*: give a function of one"):
        check_limits(config(env={"id": f"{HERE}:Vowels", "reward": f"{HERE}:of_two"}))
    source = {"source": "s", "kind": "callable", "call": f"{HERE}:of_two"}
    with pytest.raises(ConfigError, match=r"rewards\.0\.call = '\S+:of_two': takes \(prompt"):
        check_limits(config(rewards=[source]))
    for name in ("of_episode", "judging"):
        check_limits(config(env={"id": f"{HERE}:Vowels", "reward": f"{HERE}:{name}"}))


@pytest.mark.medium
def test_an_evaluation_set_is_named_where_a_run_trains_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    check_tasks(config(eval={"sets": [{"name": "e", "id": f"{HERE}:Published"}]}))
    assert capsys.readouterr().err == ""
    check_tasks(config(env=f"{HERE}:Published"))
    assert capsys.readouterr().err == (f"agentrl: warning: {HERE}:Published is trained on: its answers are published\n")


@pytest.mark.medium
def test_a_reset_that_never_ends_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    check_tasks(config(env="tests.run.envs:Hanging"), task_s=1.0)
    assert "seed 0, was not reset within 1 s" in capsys.readouterr().err
    check_tasks(config(), deadline_s=0.01)
    assert "no task could be reset within 0.01 s: the run starts without this check" in capsys.readouterr().err


def test_it_is_part_of_what_is_checked_before_a_start() -> None:
    with pytest.raises(UsageError, match="no such table"):
        check_startable(config(env=f"{HERE}:Broken"))
