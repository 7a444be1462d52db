"""What a training server computes is what our own trainer computes of the same episodes: loss and gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.algos.algorithm import Algorithm
from agentrl.algos.grpo import GRPO
from agentrl.algos.sft import Supervised
from agentrl.config import Train
from agentrl.learner.adapter_learner import ALPHA, AdamStep, AdapterLearner, AdapterShape, TargetRow
from agentrl.learner.learner import Learner
from agentrl.learner.model.policy import PolicyModel
from agentrl.run.training_server.target_losses import target_loss
from tests.closeness import assert_gradients_alike
from tests.learner.making import episode, group_of, run_config, tiny_qwen3, turn

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

RANK = 4
EPISODES = [[([1, 5, 2, 9], [3, 4, 11]), ([7, 6], [2, 8])], [([1, 5, 2, 9], [3, 10, 12, 1])]]
"""The turns of two siblings: what they are told, and what they say."""
OUTCOMES = [1.0, 0.0]
ADVANTAGES = [1.0, -1.0]  # each is judged by the other one
CAP = 1e9  # on importance weights: the API has none
CASES: dict[str, tuple[Algorithm, dict[str, float]]] = {
    "cross_entropy": (Supervised(), {}),
    "importance_sampling": (GRPO(clip_from="proximal", importance_bounds=(0.0, CAP)), {}),
    "ppo": (
        GRPO(clip_from="behaviour", clip_low=0.1, clip_high=0.05, importance_bounds=(0.0, CAP)),
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    ),
}


def plain(name: str) -> str:
    """The name of an adapter's parameter without the adapter's."""
    return re.sub(r"\.(lora_[AB])\.\w+\.weight$", r".\1.weight", name.removeprefix("weight/"))


def rows(logprobs: list[list[float]], loss: str) -> list[TargetRow]:
    """As a client sends them, so that the loss is a mean over tokens. `logprobs` are of the places of each episode."""
    said = sum(len(tokens) for turns in EPISODES for _, tokens in turns)
    found: list[TargetRow] = []
    for turns, advantage, sampled in zip(EPISODES, ADVANTAGES, logprobs, strict=True):
        tokens = torch.tensor([token for told, own in turns for token in (*told, *own)])
        own_T = torch.tensor([mine for told, own in turns for mine in (*[0.0] * len(told), *[1.0] * len(own))])[1:]
        columns = {"weights": own_T / said}
        if loss != "cross_entropy":
            columns = {"logprobs": torch.tensor(sampled) * own_T, "advantages": advantage * own_T / said}
        found.append(TargetRow(input_T=tokens[:-1], target_TC=tokens[1:], columns=columns))
    return found


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Learner, AdapterLearner, Path]:
    """Ours and the server's, with the same adapter, which changes something."""
    folder = tmp_path_factory.mktemp("model")
    tiny_qwen3(folder)
    train = Train(warmup_steps=0, lora_rank=RANK, lora_alpha=ALPHA)
    ours, theirs = Learner(run_config(train=train).learner, folder), AdapterLearner(folder)
    theirs.create("a", AdapterShape(RANK), seed=5)
    file = folder / "adapter.safetensors"
    theirs.save("a", file)
    weights = {name: one if "lora_A" in name else torch.randn_like(one) / 8 for name, one in load_file(file).items()}
    save_file(weights, file)
    theirs.load("a", file)
    given = {plain(name): one for name, one in weights.items()}
    own = {plain(name): one for name, one in ours.model.module.named_parameters() if ".lora_" in name}
    assert own.keys() == given.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(given[name])
    return ours, theirs, file


def gradients_of(learner: AdapterLearner, file: Path) -> dict[str, Tensor]:
    """Those at hand of adapter `a`, which are gone then: without decay the first moment is the gradient."""
    learner.step("a", AdamStep(lr=0.0, beta1=0.0))
    learner.save("a", file)
    return {name.removeprefix("exp_avg/"): one for name, one in load_file(file).items() if name.startswith("exp_avg/")}


@pytest.mark.parametrize("loss", CASES)
def test_loss_and_gradients_are_those_of_our_own_trainer(
    loss: str, trainers: tuple[Learner, AdapterLearner, Path], tmp_path: Path
) -> None:
    ours, theirs, file = trainers
    algo, settings = CASES[loss]
    of_client = target_loss(loss, settings)
    blank = [[0.0] * (sum(len(told) + len(own) for told, own in turns) - 1) for turns in EPISODES]
    _, now = theirs.forward("a", rows(blank, "cross_entropy"), target_loss("cross_entropy", {}).compute)
    sampled = [[one + 0.3 * math.sin(1 + at) for at, one in enumerate(row.tolist())] for row in now]

    members = list[object]()
    for number, (turns, outcome) in enumerate(zip(EPISODES, OUTCOMES, strict=True)):
        made, at = list[object](), 0
        for index, (told, own) in enumerate(turns):
            at += len(told)
            behaviour = sampled[number][at - 1 : at - 1 + len(own)]
            made.append(turn(index, told, own, parent=index - 1 if index else None, logprobs=behaviour))
            at += len(own)
        members.append(episode(number, made, outcome))  # pyright: ignore
    ours.models.zero_grad()
    accumulated = ours.accumulate([group_of(members)], step_of=lambda _: 0, algo=algo)  # pyright: ignore
    own = ours.model.module.named_parameters()
    gradients = {plain(name): one.grad for name, one in own if ".lora_" in name and one.grad is not None}

    theirs.load("a", file)
    total, _ = theirs.forward_backward("a", rows(sampled, loss), of_client.compute)
    found = gradients_of(theirs, tmp_path / "after.safetensors")

    if loss != "ppo":  # ours says what a clipped token's loss would be unclipped: only its gradient is cut
        assert total == pytest.approx(accumulated.loss, rel=1e-5, abs=1e-4)
    assert_gradients_alike(found, gradients)
    assert max(float(one.abs().max()) for one in found.values()) > 1e-2
    if loss == "ppo":
        ratio = [math.exp(-0.3 * math.sin(1 + at)) for at in range(len(blank[0]))]
        assert any(one > 1.05 for one in ratio) and any(one <= 1.05 for one in ratio)  # some are clipped, some not


def test_a_batch_in_small_passes_is_the_same_batch(
    trainers: tuple[Learner, AdapterLearner, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass has more tokens than it may."""
    _, theirs, file = trainers
    batch, compute = rows([[]] * len(EPISODES), "cross_entropy"), target_loss("cross_entropy", {}).compute
    batch = [*batch[1:], *batch[1:], *batch[:1], *batch[:1]]
    lengths = [7, 7, 10, 10]
    small = AdapterLearner(file.parent, tokens_per_pass=14, logits_mb=1)
    small.create("a", AdapterShape(RANK), seed=5)
    found = list[tuple[float, dict[str, Tensor], list[Tensor]]]()
    passes = list[list[int]]()
    choices = PolicyModel.choices

    def counted(self: PolicyModel, asked: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        passes.append([len(tokens_T) for tokens_T, _ in asked])
        return choices(self, asked)

    monkeypatch.setattr(PolicyModel, "choices", counted)
    for learner in (theirs, small):
        learner.load("a", file)
        total, logprobs = learner.forward_backward("a", batch, compute)
        found.append((total, gradients_of(learner, tmp_path / "after.safetensors"), logprobs))
    assert passes == [lengths, lengths[:2], lengths[2:3], lengths[3:]]
    (one, gradients, all_), (other, in_parts, parts) = found
    assert one == pytest.approx(other, rel=1e-5)
    assert_gradients_alike(gradients, in_parts)
    torch.testing.assert_close(all_, parts, atol=1e-5, rtol=1e-5)
