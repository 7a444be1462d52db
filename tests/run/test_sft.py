"""Supervised training: the loss of a plain torch loop, on the assistant's tokens alone; what it gives begins a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.cli.main import app
from agentrl.engine.rendering.renderer import Renderer
from agentrl.errors import AgentRLError, ModelError, UsageError
from agentrl.learner.checkpoints.folders import complete
from agentrl.models.resolve import model_dir
from agentrl.offline import sft
from agentrl.offline.demonstrations import read
from agentrl.run.run_folder import RunDir
from agentrl.run.trainer import _pinned
from agentrl.store import RunStore
from tests.run.test_retrain import typed
from tests.store.play import START, answer, play, serve, task, turn

MODEL = "agentrl/tiny-coder"
TALK = [
    {"role": "user", "content": "say one"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "and two"},
    {"role": "assistant", "content": "two = 1 + 1"},
]


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer(model_dir(MODEL))


def written(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def rows_of(file: Path, renderer: Renderer) -> list[Any]:
    return read(file, renderer, vocab=100_000, max_context=2048)


def test_only_what_the_assistant_says_is_trained_with_the_end_of_its_turn(tmp_path: Path, renderer: Renderer) -> None:
    (told,) = rows_of(written(tmp_path / "a.jsonl", {"messages": TALK}), renderer)
    said = [turn.token_ids for turn in told.turns]
    assert [renderer.decode(ids) for ids in said] == ["one", "two = 1 + 1"]
    assert all(ids[-1] in renderer.stop_token_ids for ids in said)
    first, second = told.turns
    assert first.prompt_ids == renderer.start(TALK[:1])
    assert second.parent == 0
    assert second.prompt_ids == renderer.extend(first.token_ids, TALK[2:3])  # as an episode would have gone on
    assert first.prompt_ids + first.token_ids + second.prompt_ids == renderer.start(TALK[:3])


def test_tool_calls_are_said_by_the_assistant(tmp_path: Path, renderer: Renderer) -> None:
    """A template that writes calls: their text is trained, the tool's answer is not."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "it is 2"},
    ]
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_dir(MODEL).iterdir():
        if "template" not in file.name and "safetensors" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with_calls = Renderer(folder)
    (told,) = rows_of(written(tmp_path / "a.jsonl", {"messages": talk}), with_calls)
    assert [with_calls.decode(turn.token_ids) for turn in told.turns] == ['<call>add {"a": 1}</call>', "it is 2"]
    assert [turn.parent for turn in told.turns] == [None, 0]


def test_prompt_and_completion_are_a_conversation_of_two(tmp_path: Path, renderer: Renderer) -> None:
    rows = rows_of(
        written(
            tmp_path / "a.jsonl",
            {"prompt": "say one", "completion": "one"},
            {"prompt": TALK[:1], "completion": TALK[1:2]},
            {"messages": TALK[:2]},
        ),
        renderer,
    )
    assert rows[0].turns == rows[1].turns == rows[2].turns


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "x"}, "line 1: it has neither messages, nor prompt and completion, nor turns"),
        ({"messages": TALK[:1]}, "line 1: there is nothing to learn"),
        ({"prompt": "x"}, "line 1: no 'completion'"),
        ({"turns": [{"parent": None, "prompt_ids": [1], "token_ids": [10**6]}]}, "token beyond the model's 100000"),
        ({"turns": [{"parent": 3, "prompt_ids": [1], "token_ids": [1]}]}, "line 1: turn 0 extends turn 3"),
        ({"messages": [{"role": "user", "content": "long " * 3000}, TALK[1]]}, r"tokens: raise max_context \(2048\)"),
    ],
)
def test_a_bad_line_is_named(row: dict[str, Any], says: str, tmp_path: Path, renderer: Renderer) -> None:
    with pytest.raises(UsageError, match=says):
        rows_of(written(tmp_path / "a.jsonl", row), renderer)


# --- training -------------------------------------------------------------------------------------------------------


def demonstrations(n: int, of: str = "plus") -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"{at} {of} 1"}, {"role": "assistant", "content": f"it is {at + 1}"}]}
        for at in range(n)
    ]


def config(tmp_path: Path, **changes: Any) -> sft.SFTConfig:
    written(tmp_path / "data.jsonl", *demonstrations(5), {"messages": TALK})
    written(tmp_path / "held.jsonl", *demonstrations(3, "and"))
    document: dict[str, Any] = {
        "model": MODEL,
        "seed": 1,
        "data": [str(tmp_path / "data.jsonl")],
        "held_out": [str(tmp_path / "held.jsonl")],
        "held_out_every": 2,
        "examples_per_step": 4,
        "max_context": 256,
        "train": {"steps": 4, "lr": 1e-3, "warmup_steps": 1, "tokens_per_batch": 256, "checkpoint_every": 2},
    }
    return sft.parse(document | changes)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_its_own_defaults_hold_beside_settings_that_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft, "cores", lambda: 6)
    for train in ({}, {"train": {"steps": 3}}):
        made = sft.parse({"model": MODEL, "data": ["a.jsonl"], **train}).train
        assert (made.lr, made.threads) == (1e-5, 6)
    given = sft.parse({"model": MODEL, "data": ["a.jsonl"], "train": {"lr": 2e-5, "threads": 1}}).train
    assert (given.lr, given.threads) == (2e-5, 1)
    file = tmp_path / "sft.json"
    file.write_text(sft.SFTConfig(model=MODEL, data=["a.jsonl"], train=given).model_dump_json())
    assert sft.parse(json.loads(file.read_text())).train.threads == 1


def plain_loop(settings: sft.SFTConfig, batches: list[Any], held_out: list[Any]) -> tuple[list[float], Any, float]:
    """Rows one at a time through transformers, cross-entropy, AdamW: no code under test."""
    module = AutoModelForCausalLM.from_pretrained(model_dir(MODEL), attn_implementation="eager")
    train = settings.train
    optimizer = torch.optim.AdamW(module.parameters(), lr=train.lr, betas=train.betas, weight_decay=train.weight_decay)

    def summed(example: Any) -> tuple[torch.Tensor, int]:
        ids: list[int] = []
        labels: list[int] = []
        for each in example.turns:
            ids += [*each.prompt_ids, *each.token_ids]
            labels += [-100] * len(each.prompt_ids) + list(each.token_ids)
        logits = module(torch.tensor([ids])).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum", ignore_index=-100)
        return loss, sum(label != -100 for label in labels)

    losses: list[float] = []
    for step, batch in enumerate(batches):
        parts = [summed(example) for example in batch]
        loss = sum(part for part, _ in parts) / sum(n for _, n in parts)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), train.grad_clip)
        optimizer.param_groups[0]["lr"] = train.lr * min(1.0, (step + 1) / (train.warmup_steps + 1))
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        parts = [summed(example) for example in held_out]
    return losses, module.state_dict(), float(sum(part for part, _ in parts) / sum(n for _, n in parts))


def test_it_trains_as_a_plain_loop_over_rows(tmp_path: Path, renderer: Renderer) -> None:
    settings = config(tmp_path)
    out = tmp_path / "run"
    folder = sft.train(settings, out)
    data, held = (rows_of(tmp_path / name, renderer) for name in ("data.jsonl", "held.jsonl"))
    training = sft._Training(settings, tmp_path / "other")
    batches = [[one for group in training.batch(step) for one in group.trajectories] for step in range(4)]
    order = [example.turns for batch in batches for example in batch]
    assert [sum(turns == one.turns for turns in order[:6]) for one in data] == [1] * 6  # each once in a pass
    losses, state, held_out = plain_loop(settings, batches, held)
    rows = metrics(out)
    assert [row["loss"] for row in rows[1:]] == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0]
    assert rows[-1]["held_out_loss"] == pytest.approx(held_out, rel=1e-4)
    assert rows[0]["step"] == 0 and rows[0]["held_out_loss"] > rows[-1]["held_out_loss"]
    assert 0 < rows[-1]["token_accuracy"] <= 1 and 0 < rows[-1]["held_out_accuracy"] <= 1
    for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        torch.testing.assert_close(tensor, state[name], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("minibatches", [1, 3])
def test_an_update_computes_each_beginning_once(tmp_path: Path, minibatches: int) -> None:
    """Such as an environment's instruction, which all of its demonstrations have."""
    train = {**config(tmp_path).train.model_dump(), "minibatches": minibatches, "tokens_per_batch": 4096}
    training = sft._Training(config(tmp_path, train=train, examples_per_step=7), tmp_path / "run")
    groups = training.batch(0)
    assert [group.size for group in groups] == ([7] if minibatches == 1 else [2, 2, 3])
    distinct = whole = 0
    for group in groups:
        beginnings: set[tuple[int, ...]] = set()
        for member in group.trajectories:
            ids = [token for turn in member.turns for token in (*turn.prompt_ids, *turn.token_ids)]
            beginnings.update(tuple(ids[: end + 1]) for end in range(len(ids)))
            whole += len(ids)
        distinct += len(beginnings)
    report = training._learner.step(groups, step_of=lambda _: 0)
    assert report.tokens_row == whole and report.tokens_distinct == distinct < whole


def test_going_on_is_as_if_nothing_had_happened(tmp_path: Path) -> None:
    straight = sft.train(config(tmp_path), tmp_path / "straight")
    short = config(tmp_path, train={**config(tmp_path).train.model_dump(), "steps": 2})
    sft.train(short, tmp_path / "halves")
    again = sft.resume(tmp_path / "halves", ["train.steps=4"])
    assert (again / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match=r"keeps its settings, but for train\.steps"):
        sft.resume(tmp_path / "halves", ["train.lr=1"])
    with pytest.raises(UsageError, match="is not empty: give another --out, or --resume"):
        sft.train(config(tmp_path), tmp_path / "halves")


def test_one_process_trains_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sft, "_Training", lambda *_: pytest.fail("it trains") if (tmp_path / sft.SETTINGS).exists() else None
    )
    config = sft.parse({"model": MODEL, "data": ["a.jsonl"]})
    with RunDir(tmp_path).lock(), pytest.raises(UsageError, match=r"another process is running .*: wait for its end"):
        sft.train(config, tmp_path)
    (tmp_path / sft.SETTINGS).write_text(config.model_dump_json())
    with RunDir(tmp_path).lock(), pytest.raises(UsageError, match="another process is running"):
        sft.resume(tmp_path)


def test_overwrite_replaces_a_run_of_ours_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Training:
        def __init__(self, config: sft.SFTConfig, out: Path) -> None:
            self.out = out

        def run(self, told: Any) -> Path:
            return self.out

    monkeypatch.setattr(sft, "_Training", Training)
    settings, ours, other = sft.parse({"model": MODEL, "data": ["a.jsonl"]}), tmp_path / "ours", tmp_path / "other"
    for folder in (ours, other):
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "old.jsonl").write_text("{}")
    (ours / sft.SETTINGS).write_text("{}")
    with pytest.raises(UsageError, match=r"or --overwrite$"):
        sft.train(settings, ours)
    sft.train(settings, ours, overwrite=True)
    assert not (ours / "old.jsonl").exists() and (ours / sft.SETTINGS).read_text() != "{}"
    with pytest.raises(UsageError, match=r"is not empty: give another --out$"):
        sft.train(settings, other, overwrite=True)
    assert (other / "old.jsonl").exists()


def test_overwrite_begins_with_the_model_not_with_what_was_there(tmp_path: Path) -> None:
    run, train, begins = tmp_path / "run", config(tmp_path).train.model_dump(), list[float]()
    for steps in (2, 2, 1):
        made = sft.train(config(tmp_path, train=train | {"steps": steps}), run, overwrite=True)
        before, *rows = metrics(run)
        begins.append(before["held_out_loss"])
        assert [row["step"] for row in rows] == [1, 2][:steps]
        assert complete(run / "checkpoints") == [made] and made.name == f"step-{steps:08}"
    assert begins == begins[:1] * 3


def test_a_run_that_made_no_checkpoint_says_so_where_it_is_named_as_a_model(tmp_path: Path) -> None:
    def stops(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sft.train(config(tmp_path), tmp_path / "run", told=stops)
    with pytest.raises(ModelError, match="has no checkpoint yet: train it for longer"):
        model_dir(str(tmp_path / "run"))


@pytest.mark.parametrize("there", [True, False])
def test_a_machine_that_is_better_at_bfloat16_trains_in_it_and_says_so(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft, "faster_in_bfloat16", lambda machine, parameters: there)
    given = config(tmp_path, train={"steps": 1, "tokens_per_batch": 4096})
    for number, settings in enumerate((given, config(tmp_path, train=given.train.model_dump()))):
        told, out, chooses = list[str](), tmp_path / str(number), there and number == 0
        sft.train(settings, out, told=told.append)
        assert ("chosen for this machine and model: train.dtype = 'bfloat16'" in told) is chooses
        assert json.loads((out / sft.SETTINGS).read_text())["train"]["dtype"] == ("bfloat16" if chooses else "float32")


def test_an_adapter_is_trained_alone(tmp_path: Path) -> None:
    train = {**config(tmp_path).train.model_dump(), "lora_rank": 4, "steps": 2}
    folder = sft.train(config(tmp_path, train=train), tmp_path / "run")
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    rows = metrics(tmp_path / "run")
    assert rows[-1]["held_out_loss"] < rows[0]["held_out_loss"]


def test_a_run_begins_with_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.config import parse

    monkeypatch.chdir(tmp_path)
    config(tmp_path)
    Path("sft.toml").write_text(
        f'name = "warm"\nmodel = "{MODEL}"\ndata = ["data.jsonl"]\n[train]\nsteps = 1\ntokens_per_batch = 4096\n'
    )
    said, code = typed("sft", "sft.toml")
    assert code == 0 and said.splitlines()[-1] == "begin a run with it: agentrl train RUN_FILE --set model=runs/warm"
    (made,) = complete(Path("runs/warm/checkpoints"))
    assert model_dir("runs/warm") == made
    pinned = _pinned(parse({"model": "runs/warm", "env": {"id": "test/Env-v0"}}))
    assert pinned.model == str(made)
    assert (made / "tokenizer.json").is_file() and Renderer(made).stop_token_ids
    with pytest.raises(AgentRLError, match="did you mean 'data'"):
        typed("sft", "sft.toml", "--set", "datta=3")


# --- demonstrations out of a run --------------------------------------------------------------------------------------


@pytest.fixture
def played(tmp_path: Path) -> RunDir:
    """Two tasks of three episodes each: outcomes 0, 1, 0.5 and 0.2, 0.2, 0."""
    path = tmp_path / "played"
    path.mkdir()
    with RunStore.create(path / "store.sqlite", json.dumps({"model": MODEL, "env": {"id": "test/Env-v0"}})) as store:
        serve(store, 0)
        store.add_groups([task(0), task(1)], size=3, purpose="train")
        outcomes = iter([0.0, 1.0, 0.5, 0.2, 0.2, 0.0])
        for claim in store.claim("w", 9, lease_s=10):
            play(store, claim, outcome=next(outcomes))
    return RunDir(path)


@pytest.mark.parametrize(
    ("words", "episodes"),
    [
        ([], [1, 2, 3, 4, 5, 6]),
        (["--best-of", 3], [2, 4]),  # of two as good the earlier
        (["--best-of", 1], [1, 4]),
        (["--min-outcome", 0.2], [2, 3, 4, 5]),
        (["--min-outcome", 0.2, "--per-task", 1], [2, 4]),
        (["--best-of", 3, "--per-task", 2, "--min-outcome", 0.5], [2, 3]),
    ],
)
def test_the_best_episodes_of_each_task_are_chosen(
    words: list[object], episodes: list[int], played: RunDir, tmp_path: Path
) -> None:
    out = tmp_path / "chosen.jsonl"
    said, code = typed("export-episodes", played.path, "--out", out, "--format", "messages", *words)
    assert code == 0 and said.splitlines() == [f"{len(episodes)} episodes in {out}"]
    assert [json.loads(line)["episode"] for line in out.read_text().splitlines()] == episodes
    first = out.read_bytes()
    typed("export-episodes", played.path, "--out", out, "--format", "messages", *words)
    assert out.read_bytes() == first


def test_an_episode_comes_out_as_its_conversation_and_as_its_tokens(
    played: RunDir, tmp_path: Path, renderer: Renderer
) -> None:
    for form in ("messages", "tokens"):
        typed("export-episodes", played.path, "--out", tmp_path / form, "--format", form, "--best-of", 3)
    line = json.loads((tmp_path / "messages").read_text().splitlines()[0])
    assert line["messages"] == [
        *START,
        {"role": "assistant", "content": "action 0"},
        *answer(0).observation,
        {"role": "assistant", "content": "action 1"},
    ]
    assert (line["outcome"], line["seed"]) == (1.0, 100)
    exact, _ = rows_of(tmp_path / "tokens", renderer)
    sampled = [turn(0, 1), turn(1, 1)]
    assert [(one.parent, one.prompt_ids, one.token_ids) for one in exact.turns] == [
        (one.parent, one.prompt_ids, one.token_ids) for one in sampled
    ]
    told, _ = rows_of(tmp_path / "messages", renderer)
    assert [renderer.decode(one.token_ids) for one in told.turns] == ["action 0", "action 1"]
    with pytest.raises(UsageError, match="choose demonstrations: give --format messages too"):
        typed("export-episodes", played.path, "--out", tmp_path / "x", "--best-of", 3)


def test_the_command_is_offered() -> None:
    assert {"sft", "retrain"} <= {command.callback.__name__ for command in app.registered_commands if command.callback}
