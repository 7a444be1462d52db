"""What a step holds in memory: predicted without numbers, beside the peak of a real step of the same learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from transformers import Qwen3Config, Qwen3MoeConfig

from agentrl.algos.grpo import GRPO
from agentrl.algos.ppo import PPO
from agentrl.config import Rollout, Train
from agentrl.learner import memory_budget
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.data.rows import Row
from agentrl.learner.data.shares import weigh
from agentrl.learner.learner import Learner
from agentrl.learner.memory_budget import Kernel, MemoryBudget, Tracker, held
from agentrl.learner.model.models import ModelPasses, Models
from agentrl.learner.parallel.collective_trace import first_of
from agentrl.records import Group

from .making import episode, group_of, run_config, turn

VOCAB, PROMPT, SAMPLED, MEMBERS = 2048, 96, 64, 4


def save(folder: Path, layers: int, *, weights: bool = True, experts: int = 0) -> Path:
    """A Qwen3, or a Qwen3-MoE with so many experts."""
    torch.manual_seed(0)
    kind = "Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 96} if experts else {}
    config = (Qwen3MoeConfig if experts else Qwen3Config)(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        architectures=[kind],
        **mixture,
    )
    if weights:
        getattr(transformers, kind)(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("budget"), 3)


def group(id: int) -> Group:
    asked = [(7 * at + id) % VOCAB for at in range(PROMPT)]
    said = [[(11 * at + 13 * member + id) % VOCAB for at in range(SAMPLED)] for member in range(MEMBERS)]
    return group_of([episode(m, [turn(0, asked, said[m])], float(m % 2), group=id) for m in range(MEMBERS)], id=id)


def rows_of(one: Group, algo: Any) -> list[Row]:
    ready = [group_rows(one, algo, step_of=lambda _: 0, step_now=0, max_lag=0)]
    return [row for rows in weigh([ready])[0] for row in rows]


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "float32": (GRPO(), {}),
    "bfloat16": (GRPO(), {"dtype": "bfloat16"}),
    "checkpointing": (GRPO(), {"gradient_checkpointing": True, "logits_mb": 8}),
    "lora": (GRPO(), {"lora_rank": 4, "logits_mb": 8}),
    "lora, bfloat16": (GRPO(), {"lora_rank": 4, "logits_mb": 8, "dtype": "bfloat16"}),
    "reference, bfloat16": (GRPO(kl_weight=0.1), {"logits_mb": 8, "dtype": "bfloat16"}),
    "reference that follows": (GRPO(kl_weight=0.1, reference=1), {"logits_mb": 8}),
    "critic": (PPO(critic_warmup_steps=0), {"logits_mb": 8}),
    "muon": (GRPO(), {"optimizer": "muon", "logits_mb": 8}),
    "sgd": (GRPO(), {"optimizer": "sgd", "logits_mb": 8}),
    "offloaded": (GRPO(), {"offload_optimizer": True, "logits_mb": 8}),
    "masters": (GRPO(), {"dtype": "bfloat16", "weights": "bfloat16", "logits_mb": 8}),
    "masters, offloaded": (
        GRPO(),
        {"dtype": "bfloat16", "weights": "bfloat16", "offload_optimizer": True, "logits_mb": 8},
    ),
    "no masters": (GRPO(), {"dtype": "bfloat16", "weights": "bfloat16_alone", "logits_mb": 8}),
}


QUICK = ("float32", "checkpointing", "lora, bfloat16", "critic", "masters, offloaded")
"""The other cases combine the same settings, or are in `test_what_an_optimizer_remembers_is_planned_by_its_kind`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_the_memory_of_a_step_is_predicted_within_a_tenth(name: str, folder: Path) -> None:
    algo, settings = CASES[name]
    predicted(algo, {"tokens_per_batch": PROMPT + MEMBERS * SAMPLED, **settings}, folder)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("experts", "settings"),
    [
        (0, {"logits_mb": 1, "gradient_checkpointing": True}),
        pytest.param(0, {"logits_mb": 1}, marks=pytest.mark.slow),
        pytest.param(4, {"logits_mb": 1}, marks=pytest.mark.slow),
    ],
    ids=["recomputed", "kept", "mixture"],
)
def test_so_is_that_of_a_group_that_is_larger_than_a_pass(
    experts: int, settings: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    folder = save(tmp_path, 3, experts=experts) if experts else folder
    found = predicted(GRPO(kl_weight=0.1), {"tokens_per_batch": PROMPT + SAMPLED, **settings}, folder, members=1)
    assert 0 < found.again < found.operations / 2


def predicted(algo: Any, settings: dict[str, Any], folder: Path, members: int = MEMBERS) -> MemoryBudget:
    """What a step is predicted to hold, of passes over so many members; beside what it holds."""
    config = run_config(
        algo=algo,
        train=Train.model_validate({"warmup_steps": 0, **settings}),
        rollout=Rollout(max_context=PROMPT + SAMPLED, max_tokens_per_turn=SAMPLED),
    )
    learner = Learner(config.learner, folder)
    groups = [group(1), group(2)]  # two passes: in the second there are gradients already
    learner.step(groups, step_of=lambda _: 0)
    tracker = Tracker()
    own, others = learner.models.held()
    states = [one for o in learner.models.optimizers.values() for of in o.state.values() for one in of.values()]
    with tracker:
        tracker.add(
            [*own, *others, *learner.models.masters(), *(one for one in states if isinstance(one, torch.Tensor))]
        )
        host = tracker.leave(learner.models.away())
        tracker.peak = tracker.now
        learner.step(groups, step_of=lambda _: 0)
    rows = rows_of(group(1), algo)[:members]
    found = held(config.learner, folder, rows, on_gpu=False, passes=MEMBERS // members)
    assert found.total == pytest.approx(tracker.peak, rel=0.1)
    assert found.host == host
    assert found.weights >= sum(p.nbytes for p in learner.model.module.parameters())
    recomputed = {"lora_rank", "gradient_checkpointing"} & settings.keys()
    assert found.activations > found.total / 10 or recomputed
    return found


@pytest.mark.medium
def test_what_an_optimizer_remembers_is_planned_by_its_kind(folder: Path) -> None:
    """Bytes of each parameter, of the policy's own; the embedding and vectors have moments of AdamW."""
    rows, found = rows_of(group(1), GRPO()), dict[str, float]()
    for name in ("float32", "muon", "sgd", "offloaded", "masters", "masters, offloaded", "no masters"):
        settings = CASES[name][1]
        one = held(run_config(algo=GRPO(), train=Train.model_validate(settings)).learner, folder, rows, on_gpu=False)
        found[name], found[f"{name}: host"] = one.optimizer, one.host
        outer = VOCAB * 64 + (one.parameters - VOCAB * 64) * 0
        matrices = one.parameters - outer - 64 * 7 - 2 * 16 * 3  # of norms: two and one more in each layer, of heads
        assert one.gradients == 4 * one.parameters
    small = 4 * 2 * 36  # how often each was updated
    expected = {
        "float32": 8 * one.parameters,
        "muon": 4 * matrices + 8 * (one.parameters - matrices),
        "sgd": 0,
        "offloaded": 0,
        "offloaded: host": 8 * one.parameters,
        "masters": 8 * one.parameters + 4 * matrices,
        "masters, offloaded": 0,
        "masters, offloaded: host": 8 * one.parameters + 4 * matrices,
        "no masters": 8 * one.parameters,
        **dict.fromkeys(("float32: host", "muon: host", "sgd: host", "masters: host", "no masters: host"), 0),
    }
    assert found == pytest.approx(expected, abs=small)


def test_a_model_is_planned_from_its_configuration_alone(folder: Path, tmp_path: Path) -> None:
    config, rows = run_config(), rows_of(group(1), GRPO())
    bare = save(tmp_path / "bare", 3, weights=False)
    assert not list(bare.glob("*.safetensors"))
    assert held(config.learner, bare, rows, on_gpu=False) == held(config.learner, folder, rows, on_gpu=False)


@pytest.mark.medium
def test_a_deep_model_follows_from_two_shallow_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, rows = run_config(), rows_of(group(1), GRPO())
    folder = save(tmp_path, 7, weights=False)
    found = held(config.learner, folder, rows, on_gpu=True)
    monkeypatch.setattr(memory_budget, "TRACED", (2, 7))  # all its layers, and none left to follow
    whole = held(config.learner, folder, rows, on_gpu=True)
    assert (found.weights, found.gradients, found.operations) == (whole.weights, whole.gradients, whole.operations)
    assert found.total == pytest.approx(whole.total, rel=0.02)


def of_pass(prompt: int, sampled: int, members: int) -> list[Row]:
    place = torch.arange(prompt, prompt + sampled)
    ids = [(0, *[0] * (prompt - 1), 1 + member, *[0] * (sampled - 1)) for member in range(members)]
    return [
        Row(group_id=0, episode_id=at, algo=GRPO(), token_ids=of, place_S=place, columns={})
        for at, of in enumerate(ids)
    ]


@pytest.mark.medium
@pytest.mark.parametrize("context", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_that_shares_passes_holds_what_is_planned(context: int, folder: Path) -> None:
    """The rank's own layers over its own nodes, with the ranks beside it made up. Of two passes, since it has gathered
    the same weights for either. Logits are not kept: ranks divide them without a rest."""
    train: dict[str, Any] = {"logits_mb": 1, "parallel": {"ranks": context, "context": context}}
    settings = run_config(rollout=Rollout(max_context=1024), train=Train.model_validate(train))

    class Layout(Kernel):
        heard: ClassVar[list[int]] = []

    def of_rank(rows: list[Row]) -> int:
        with first_of(settings.train.parallel) as first:
            with memory_budget.hollow():
                models = Models(
                    settings.learner, folder, "cpu", reference_dir=folder, folder_of=lambda _: folder, ranks=first
                )
            models.policy.layout = Layout
            (pack,) = packs([rows], 1 << 60)
            with (tracker := Tracker()):
                outputs = ModelPasses(models).forward(pack, trained=("policy",))
            assert outputs.logprobs_K.requires_grad
            return tracker.now

    small, large = of_pass(8, 8, 2), of_pass(200, 100, 8)
    planned = [
        held(settings.learner, folder, rows, on_gpu=True, context=context).activations for rows in (small, large)
    ]
    assert planned[1] - planned[0] == pytest.approx(of_rank(large) - of_rank(small), rel=0.05)
    assert planned[1] > 1.05 * held(settings.learner, folder, large, on_gpu=True).activations / context
    again = run_config(train=Train(gradient_checkpointing=True, logits_mb=1))
    kept, shared = (held(again.learner, folder, large, on_gpu=True, context=many).activations for many in (1, context))
    assert shared == kept / context, "computed again, keys and values are no longer held"
