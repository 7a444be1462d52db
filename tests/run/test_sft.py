"""Supervised training: the loss of a plain torch loop, on the assistant's tokens alone; what it gives begins a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case
from transformers import AutoModelForCausalLM

from agentrl.config import parse, to_json
from agentrl.engine.rendering.renderer import Renderer
from agentrl.errors import AgentRLError, ModelError, UsageError
from agentrl.learner.checkpoints.folders import complete
from agentrl.models.resolve import model_dir
from agentrl.offline import sft
from agentrl.offline.demonstrations import read
from agentrl.offline.episode_export import Choice, select
from agentrl.offline.episode_formats import write_episodes
from agentrl.records import ShownTools, Step, StopReason
from agentrl.run.run_folder import RunDir
from agentrl.run.trainer import _pinned
from agentrl.store import Ending, RunStore
from tests.closeness import assert_moved_alike
from tests.run.test_retrain import typed
from tests.store.play import START, admit, answer, play, serve, task, turn

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


def calling(arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_a_key_that_stands_twice_is_refused(tmp_path: Path, renderer: Renderer) -> None:
    """Python's own reader takes the last one: half of the row would be gone."""
    (file := tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK})[:-1] + ', "messages": []}')
    with pytest.raises(UsageError, match="line 1 is not JSON: the key 'messages' stands twice"):
        rows_of(file, renderer)


def test_what_the_assistant_says_in_a_prompt_is_context(tmp_path: Path, renderer: Renderer) -> None:
    """As in TRL: of prompt and completion, the completion alone is trained."""
    (episode,) = rows_of(written(tmp_path / "a.jsonl", {"prompt": TALK[:3], "completion": TALK[3:]}), renderer)
    assert [(renderer.decode(turn.token_ids), turn.learns) for turn in episode.turns] == [
        ("one", False),
        ("two = 1 + 1", True),
    ]


def test_what_a_row_teaches_by_mistake_is_named(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"messages": [TALK[0], calling('{"a": 1}')]},
        {"messages": TALK[:3]},
        {"messages": [{**TALK[0], "role": "human"}, TALK[1]]},
        {"prompt": json.dumps(TALK[:1]), "completion": "one"},
    ]
    rows_of(written(tmp_path / "a.jsonl", *rows), renderer)
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        "demonstrations: calls of 'add', which is not among the tools of its row, are trained",
        "demonstrations: messages behind the assistant's last one are not used",
        "demonstrations: the role 'human' is not known to the chat template: it is context",
        "demonstrations: a prompt that is the JSON text of chat messages is taken as a text",
    ]


def test_demonstrations_of_a_parquet_file_are_those_of_its_lines(tmp_path: Path, renderer: Renderer) -> None:
    """Arrow has one schema for a column: its nulls are not in the prompt, and a mark of one row is none of another."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    look = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    count = {"type": "object", "properties": {"rows": {"type": "array", "items": look}}}
    tools = [
        [{"type": "function", "function": {"name": "add", "description": "d", "parameters": parameters}}]
        for parameters in (look, count)
    ]
    rows = [
        {"messages": [TALK[0], calling({"path": "a"})], "tools": tools[0]},
        {
            "messages": [*TALK[:1], {**TALK[1], "weight": 0}, TALK[2], calling({"rows": [{"path": "b"}]})],
            "tools": tools[1],
        },
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file := tmp_path / "a.parquet")
    packed = rows_of(file, renderer)
    assert packed == rows_of(written(tmp_path / "a.jsonl", *rows), renderer)
    assert [turn.learns for turn in packed[1].turns] == [False, True]


def test_a_message_marked_as_context_is_not_trained(tmp_path: Path, renderer: Renderer) -> None:
    """OpenAI's `weight: 0`: the turn stays in the row, since the next one answers to it."""
    talk: list[dict[str, Any]] = [dict(message) for message in TALK]
    talk[1] |= {"weight": 0}
    talk[3] |= {"weight": 1}
    (episode,) = rows_of(written(tmp_path / "a.jsonl", {"messages": talk}), renderer)
    assert [(renderer.decode(turn.token_ids), turn.learns) for turn in episode.turns] == [
        ("one", False),
        ("two = 1 + 1", True),
    ]
    (unmarked,) = rows_of(written(tmp_path / "b.jsonl", {"messages": TALK}), renderer)
    assert [turn.prompt_ids for turn in episode.turns] == [turn.prompt_ids for turn in unmarked.turns]


def test_keys_that_nobody_reads_are_named_once_with_their_number(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    talk = [{**TALK[0], "emotion": "calm"}, TALK[1]]
    rows = [{"messages": talk, "source": "web"}, {"messages": TALK}, {"messages": talk}]
    rows_of(written(file := tmp_path / "a.jsonl", *rows), renderer)
    assert sorted(caplog.messages) == [
        "demonstrations: the key 'emotion' of a message is not read by the chat template "
        f"(2 times, first: {file}, line 1)",
        f"demonstrations: the key 'source' is not used ({file}, line 1)",
    ]


@each_case(
    ("row", "reason"),
    [
        ({"messages": [TALK[0], {"role": "assistant", "content": None}]}, "message 1: the assistant says nothing"),
        ({"messages": [TALK[0], {**TALK[1], "weight": 0.5}]}, "weight = 0.5"),
        ({"messages": [TALK[0], {**TALK[1], "weight": 0}]}, "nothing to learn"),
        ({"messages": TALK, "tools": "look"}, "tools is a text that is no JSON"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "give messages"),
        ({"messages": "hello"}, "messages is a text that is no JSON"),
        ({"messages": [TALK[0], {**TALK[1], "loss_mask": 0}]}, "loss_mask = 0 reads like a mark"),
        ({"messages": [TALK[0], calling('{"a": 1,}')]}, """the arguments of 'add' are '{"a": 1,}'"""),
        ({"messages": [TALK[0], calling([1])]}, "the arguments of 'add' are [1]"),
        ({"messages": [TALK[0], {**TALK[1], "content": "<think>a</think>one", "reasoning": "b"}]}, "give one of them"),
        ({"messages": TALK, "weight": 0}, "the row has weight = 0: give its messages weight 0, or leave the row out"),
        ({"messages": TALK, "loss_mask": [0, 1]}, "the row has loss_mask = [0, 1]"),
        ({"prompt": "q", "completion": "a", "train": False}, "the row has train = False"),
        ({"messages": TALK, "images": ["a.png"]}, "leave 'images' out"),
        ({"prompt": TALK[:2], "completion": "three"}, "the prompt ends with the assistant's words"),
        ({"prompt": TALK[:3], "completion": None}, "a prompt and no completion"),
        ({"turns": [{"parent": None, "prompt_ids": ["a"], "token_ids": [1]}]}, "give a list of token ids"),
        ({"turns": [{"parent": None, "prompt_ids": [-1], "token_ids": [1]}]}, "give a list of token ids"),
        ({"turns": [{"parent": None, "prompt_ids": [1], "token_ids": [1], "learns": "false"}]}, "learns = 'false'"),
    ],
)
def test_a_row_that_would_teach_something_else_is_refused(
    tmp_path: Path, renderer: Renderer, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match="line 1: ") as refusal:
        rows_of(written(tmp_path / "a.jsonl", row), renderer)
    assert reason in str(refusal.value)


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


@each_case(
    ("row", "says"),
    [
        ({"text": "x"}, "line 1: it has neither messages, nor prompt and completion, nor turns"),
        ({"messages": TALK[:1]}, "line 1: there is nothing to learn"),
        ({"prompt": "x"}, "line 1: it has a prompt and no completion"),
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a whole run, whose files of rows lie beside it, and its last checkpoint."""
    out = tmp_path_factory.mktemp("trained") / "run"
    return out, sft.train(config(out.parent), out)


def test_it_trains_as_a_plain_loop_over_rows(trained: tuple[Path, Path], renderer: Renderer) -> None:
    out, folder = trained
    tmp_path = out.parent
    settings = config(tmp_path)
    data, held = (rows_of(tmp_path / name, renderer) for name in ("data.jsonl", "held.jsonl"))
    training = sft._Training(settings, tmp_path / "other")
    batches = [[one for group in training.batch(step) for one in group.trajectories] for step in range(4)]
    order = [example.turns for batch in batches for example in batch]
    for drawn in (order[:6], order[6:12]):
        assert [sum(turns == one.turns for turns in drawn) for one in data] == [1] * 6, "each once in a pass"
    assert order[:6] != order[6:12], "each pass has an order of its own"
    losses, state, held_out = plain_loop(settings, batches, held)
    rows = metrics(out)
    assert [row["loss"] for row in rows[1:]] == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0]
    assert rows[-1]["held_out_loss"] == pytest.approx(held_out, rel=1e-4)
    assert rows[0]["step"] == 0 and rows[0]["held_out_loss"] > rows[-1]["held_out_loss"]
    assert 0 < rows[-1]["token_accuracy"] <= 1 and 0 < rows[-1]["held_out_accuracy"] <= 1
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert_moved_alike(found, state, lr=settings.train.lr, steps=settings.train.steps)


def test_an_update_computes_each_beginning_once(tmp_path: Path) -> None:
    """Such as an environment's instruction, which all of its demonstrations have."""
    train = {**config(tmp_path).train.model_dump(), "minibatches": 3, "tokens_per_batch": 4096}
    training = sft._Training(config(tmp_path, train=train, examples_per_step=7), tmp_path / "run")
    groups = training.batch(0)
    assert [group.size for group in groups] == [2, 2, 3]
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


def test_going_on_is_as_if_nothing_had_happened(tmp_path: Path, trained: tuple[Path, Path]) -> None:
    _, straight = trained
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
    for steps in (2, 1):
        made = sft.train(config(tmp_path, train=train | {"steps": steps}), run, overwrite=True)
        before, *rows = metrics(run)
        begins.append(before["held_out_loss"])
        assert [row["step"] for row in rows] == [1, 2][:steps]
        assert complete(run / "checkpoints") == [made] and made.name == f"step-{steps:08}"
    assert begins == begins[:1] * 2


def test_a_run_that_made_no_checkpoint_says_so_where_it_is_named_as_a_model(tmp_path: Path) -> None:
    def stops(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sft.train(config(tmp_path), tmp_path / "run", notify=stops)
    with pytest.raises(ModelError, match="has no checkpoint yet: train it for longer"):
        model_dir(str(tmp_path / "run"))


@pytest.mark.parametrize("there", [True, False])
def test_a_machine_that_is_better_at_bfloat16_trains_in_it_and_says_so(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Training:
        def __init__(self, config: sft.SFTConfig, out: Path) -> None:
            self.out = out

        def run(self, told: Any) -> Path:
            return self.out

    monkeypatch.setattr(sft, "_Training", Training)
    monkeypatch.setattr(sft, "faster_in_bfloat16", lambda machine, parameters: there)
    given = config(tmp_path, train={"steps": 1, "tokens_per_batch": 4096})
    for number, settings in enumerate((given, config(tmp_path, train=given.train.model_dump()))):
        told, out, chooses = list[str](), tmp_path / str(number), there and number == 0
        sft.train(settings, out, notify=told.append)
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
    config = to_json(parse({"model": MODEL, "env": {"id": "test/Env-v0"}}))
    with RunStore.create(path / "store.sqlite", config) as store:
        serve(store, 0)
        store.groups.add_groups([task(0), task(1)], size=3, purpose="train")
        outcomes = iter([0.0, 1.0, 0.5, 0.2, 0.2, 0.0])
        for claim in store.leases.claim("w", 9, lease_s=10):
            play(store, claim, outcome=next(outcomes))
    return RunDir(path)


@each_case(
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


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


def test_an_exported_conversation_has_the_tools_and_calls_that_were_played(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    """Rejection sampling: the file trains the prompt that the policy had, and the calls as calls. One turn broke its
    call off, and stays the text that it was."""
    texts = ['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', 'so: <tool_call>\n{"name"']
    result: Any = {"role": "tool", "content": "2", "name": "add", "tool_call_id": "call00000"}
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        version = serve(store, 0)
        (claim,) = _claimed(store)
        store.journal.begin(claim.episode_id, claim.fence, START, ShownTools((ADD,), "hermes"))
        prompts: list[tuple[int, ...]] = [renderer.start(START, [ADD])]
        for index, text in enumerate(texts):
            step = Step(observation=(result,) if index == 0 else (), terminated=index == 1)
            said = replace(turn(index, version, step=step), text=text, prompt_ids=prompts[-1])
            store.journal.journal_turn(claim.episode_id, claim.fence, said)
        store.journal.finish(
            claim.episode_id, claim.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
        )
        told = select(store.reads, Choice(), "messages", tmp_path / "m.jsonl")
    assert (told.written, told.broken_calls) == (1, 1)
    line = json.loads((tmp_path / "m.jsonl").read_text())
    assert line["tools"] == [ADD]
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert line["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        result,
        {"role": "assistant", "content": texts[1]},
    ]
    (episode,) = rows_of(tmp_path / "m.jsonl", renderer)
    assert episode.turns[0].prompt_ids == prompts[0]
    assert renderer.decode(episode.turns[0].token_ids) == texts[0]
    assert caplog.messages == []


def test_an_exported_parquet_file_has_the_calls_and_tools(tmp_path: Path, renderer: Renderer) -> None:
    """The columns of messages are those of a demonstration."""
    parquet = pytest.importorskip("pyarrow.parquet")
    result: Any = {"role": "tool", "content": "2", "name": "add", "tool_call_id": "call00000"}
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        version = serve(store, 0)
        (claim,) = _claimed(store)
        store.journal.begin(claim.episode_id, claim.fence, START, ShownTools((ADD,), "hermes"))
        text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        said = replace(turn(0, version, step=Step(observation=(result,))), text=text)
        store.journal.journal_turn(claim.episode_id, claim.fence, said)
        store.journal.journal_turn(
            claim.episode_id, claim.fence, turn(1, version, step=Step(observation=(), terminated=True))
        )
        store.journal.finish(
            claim.episode_id, claim.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
        )
        ids = list(Choice().of(store.reads))
        settings = parse({"name": "mine", "model": "m", "env": {"id": "test/Env-v0"}})
        assert write_episodes(store.reads, ids, "parquet", tmp_path / "m.parquet", settings) == 1
        select(store.reads, Choice(), "messages", tmp_path / "m.jsonl")
    with pytest.raises(UsageError, match="turns, the exact tokens of a model, beside messages"):
        rows_of(tmp_path / "m.parquet", renderer)
    parquet.write_table(parquet.read_table(tmp_path / "m.parquet").drop_columns(["turns"]), tmp_path / "c.parquet")
    packed, plain = (rows_of(tmp_path / name, renderer) for name in ("c.parquet", "m.jsonl"))
    assert [episode.turns for episode in packed] == [episode.turns for episode in plain]
    assert renderer.decode(packed[0].turns[0].token_ids) == text


def test_turns_that_are_not_to_be_learned_are_context_in_an_export(tmp_path: Path, renderer: Renderer) -> None:
    """A masked turn, one that its length cut (a demonstration has an end there), and an example in the prompt. A raw
    prompt is no message at all."""
    example: list[Any] = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "an example"}]
    observation: Any = ({"role": "user", "content": "go on"},)
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        version = serve(store, 0)
        admit(store, group_size=4)
        one, other, begun, text = store.leases.claim("w", 4, lease_s=60)

        def play_turns(claim: Any, start: Any, *turns: dict[str, Any]) -> None:
            store.journal.begin(claim.episode_id, claim.fence, start)
            for index, changes in enumerate(turns):
                step = Step(observation=observation, masked=changes.pop("masked", False))
                said = replace(turn(index, version, step=step), **changes)
                store.journal.journal_turn(claim.episode_id, claim.fence, said)
            store.journal.finish(
                claim.episode_id, claim.fence, Ending(stop_reason=StopReason.TURN_LIMIT, outcome=1.0, success=True)
            )

        play_turns(one, (*example, *START), {"masked": True}, {"finish": "length"}, {})
        play_turns(other, START, {"finish": "length"})
        play_turns(begun, (*START, {"role": "assistant", "content": "I begin"}), {})
        play_turns(text, ({"role": "user", "content": "<|im_start|>user", "raw": True},), {}, {})
        told = select(store.reads, Choice(), "messages", tmp_path / "m.jsonl")
    assert (told.written, told.cut, told.untaught, told.rewritten) == (1, 1, 1, 2)
    (episode,) = rows_of(tmp_path / "m.jsonl", renderer)
    assert [(renderer.decode(turn.token_ids), turn.learns) for turn in episode.turns] == [
        ("an example", False),
        ("action 0", False),
        ("action 1", False),
        ("action 2", True),
    ]


def _claimed(store: RunStore) -> list[Any]:
    admit(store, group_size=2)
    return store.leases.claim("w", 1, lease_s=60)
