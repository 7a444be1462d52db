"""The learner computes with the experts that an engine told, and evens the load of all if it is asked to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from each_case import each_case
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from agentrl.algos.grpo import GRPO
from agentrl.config import EngineSettings, Rollout, RunConfig, Train
from agentrl.config.sections import Alarms
from agentrl.errors import ModelError, RunFailed
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import Pack, packs
from agentrl.learner.learner import Learner
from agentrl.learner.model.policy import PolicyModel
from agentrl.learner.moe.expert_records import ExpertShape
from agentrl.learner.moe.routing_replay import RoutingSummary, prepared
from agentrl.learner.step_report import StepReport
from agentrl.records import Group, RoutedExperts, Trajectory
from agentrl.run.alarms import raised
from tests.closeness import assert_gradients_alike

from .making import episode, group_of, mixture, random_group, run_config, tiny_qwen3, turn
from .test_lora_mixture import shared_and_dense, stacked

LAYERS, EXPERTS, PER_TOKEN = 2, 4, 2
STEP_OF = {1: 0, 2: 0}.__getitem__
Choice = Callable[[Sequence[int]], np.ndarray]
"""The experts of the tokens of a row [T, layers, per token]."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("mixture"), layers=LAYERS)


def config(algo: Any = None, routed: Any = True, **train: Any) -> RunConfig:
    told = {"optimizer": "sgd", "lr": 1.0, "grad_clip": None, "warmup_steps": 0, "tokens_per_batch": 60, **train}
    rollout = Rollout(max_context=30, max_tokens_per_turn=16)
    made = run_config(algo=algo or GRPO(), rollout=rollout, seed=3)
    engine = EngineSettings(kind="vllm", routed_experts=routed)
    return made.model_copy(update={"train": Train.model_validate(told), "engine": engine})


def own_choice(folder: Path) -> Choice:
    """That of the model's own routers, by transformers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def choose(tokens: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            routers = model(torch.tensor([list(tokens)]), output_router_logits=True).router_logits
        return torch.stack([logits.topk(PER_TOKEN, dim=-1).indices for logits in routers], dim=1).numpy()

    return choose


def other_choice(tokens: Sequence[int]) -> np.ndarray:
    """Any experts, the same for the same beginning."""
    rngs = [random.Random(str(list(tokens[: at + 1]))) for at in range(len(tokens))]
    return np.array([[rng.sample(range(EXPERTS), PER_TOKEN) for _ in range(LAYERS)] for rng in rngs])


def told(group: Group, choose: Choice) -> Group:
    """The group as engines journal it that choose so: a turn's experts begin at the last token of its parent, and end
    before its own last."""

    def of(member: Trajectory) -> Trajectory:
        contexts: list[tuple[int, ...]] = []
        turns: list[Any] = []
        for one in member.turns:
            before = () if one.parent is None else contexts[one.parent]
            contexts.append((*before, *one.prompt_ids, *one.token_ids))
            start = max(0, len(before) - 1)
            data = choose(contexts[-1])[start:-1].astype(np.uint8).tobytes()
            experts = RoutedExperts(start=start, layers=LAYERS, per_token=PER_TOKEN, width=1, data=data)
            turns.append(replace(one, experts=experts))
        return replace(member, turns=tuple(turns))

    return replace(group, trajectories=tuple(map(of, group.trajectories)))


def forked(id: int) -> Group:
    """One member goes on from its first turn in two ways, over both versions."""
    first = turn(0, [1, 2, 3, 4], [5, 6], reward=0.3)
    second = turn(1, [7], [8, 9, 3], parent=0, version=2)
    other = turn(2, [4, 4], [6, 1], parent=0, version=2, reward=0.2)
    anew = turn(3, [2, 2], [7, 7], version=2)
    members = [(first, second, other, anew), (turn(0, [1, 2, 3, 4], [5, 6, 2], reward=-0.2),)]
    return group_of([episode(at, turns, float(at), group=id) for at, turns in enumerate(members)], id=id)


def all_groups(choose: Choice | None) -> list[Group]:
    made = [random_group(1, 1), random_group(2, 2), forked(3)]
    return made if choose is None else [told(group, choose) for group in made]


def after(
    folder: Path, tmp_path: Path, groups: Sequence[Group], ranks: Any = None, *, steps: int = 1, **train: Any
) -> tuple[StepReport, dict[str, Tensor]]:
    """The report of the last of some steps, and the weights after it: each is one of 1 against the gradient."""
    given = {} if ranks is None else {"ranks": ranks}
    learner = Learner(config(**train).learner, folder, **given)
    report = [learner.step(groups, step_of=STEP_OF) for _ in range(steps)][-1]
    return report, load_file(learner.export(tmp_path / "now.safetensors").path)


def of(report: StepReport) -> RoutingSummary:
    assert report.routing is not None
    return report.routing


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_replay_of_the_routers_own_choice_changes_no_bit(recomputed: bool, folder: Path, tmp_path: Path) -> None:
    groups = all_groups(own_choice(folder))
    plain, weights = after(folder, tmp_path, groups, routed=False)
    replayed, others = after(folder, tmp_path, groups, routed="required", gradient_checkpointing=recomputed)
    assert replayed.loss == plain.loss and replayed.grad_norm == plain.grad_norm
    assert largest(weights, others) == 0.0
    assert (of(plain).replayed, of(plain).missing, of(replayed).missing) == (0, 0, 0)
    assert of(replayed).replayed > 60 and of(replayed).agreement == 1.0


@each_case(
    ("make", "settings", "message"),
    [
        (tiny_qwen3, {}, r"no mixture whose experts can be replayed: set engine\.routed_experts = false"),
        (tiny_qwen3, {"routed": False, "balance_weight": 0.1}, r"no routers .* set train\.balance_weight = 0"),
        (stacked, {"balance_weight": 0.1}, r"no routers .* set train\.balance_weight = 0"),
    ],
)
def test_a_model_that_cannot_is_refused_with_what_to_set(
    make: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        Learner(config(**settings).learner, make(tmp_path / "model"))


def test_dense_layers_among_mixtures_have_no_routers(tmp_path: Path) -> None:
    routers = PolicyModel(shared_and_dense(tmp_path / "model")).routers
    assert routers is not None
    assert routers.shape == ExpertShape(layers=2, mixed=(1,), experts=EXPERTS, per_token=PER_TOKEN)


# --- a second implementation, in loops --------------------------------------------------------------------------------


class Loops:
    """Rows alone, tokens alone, experts alone."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._row: np.ndarray | None = None
        self.probabilities: list[Tensor] = []  # [T, E] of each layer of the row before
        monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeSparseMoeBlock, "forward", lambda *given: self._block(*given))

    def logprobs(self, tokens: Sequence[int], chosen_TLK: np.ndarray) -> Tensor:
        """Of what may come after each token [T, V]."""
        self._row, self.probabilities = chosen_TLK, []
        return self.model(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)

    def _block(self, block: Any, states: Tensor) -> Tensor:
        layer = len(self.probabilities)
        rows: list[Tensor] = []
        judged: list[Tensor] = []
        for at, state_H in enumerate(states[0]):
            score_E = torch.stack([(state_H * weight_H).sum() for weight_H in block.gate.weight]).exp()
            judged.append(score_E / score_E.sum())
            gates = [judged[-1][expert] for expert in self._row[at, layer]]
            total = sum(gates) if block.gate.norm_topk_prob else 1.0
            row_H = torch.zeros_like(state_H)
            for gate, expert in zip(gates, self._row[at, layer], strict=True):
                both = block.experts.gate_up_proj[expert] @ state_H
                middle = functional.silu(both[: len(both) // 2]) * both[len(both) // 2 :]
                row_H = row_H + gate / total * (block.experts.down_proj[expert] @ middle)
            rows.append(row_H)
        self.probabilities.append(torch.stack(judged))
        return torch.stack(rows)[None]


def laid(groups: Sequence[Group], model: PolicyModel) -> list[Pack]:
    rows = [group_rows(group, GRPO(), step_of=STEP_OF, step_now=0, max_lag=4).rows for group in groups]
    return prepared(packs(rows, 60), lambda _: model.routers, "on")


def scattered(module: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("by_rows", [False, True])
def test_with_other_experts_log_probs_and_gradients_are_those_of_loops(
    by_rows: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = all_groups(other_choice)
    model = PolicyModel(folder)
    if by_rows:  # as a model is computed that has no trees
        model.obstacle = "none"
        model.module.set_attn_implementation("eager")
        rows = [group_rows(group, GRPO(), step_of=STEP_OF, step_now=0, max_lag=4).rows for group in groups]
        made = prepared(packs(rows, 60, shared=False), lambda _: model.routers, "on")
    else:
        made = laid(groups, model)
    found = {}
    for pack in made:
        logprobs_K = model.logprobs(pack, temperature=1.0)[0]
        share_K = torch.sin(torch.arange(len(logprobs_K)) + pack.columns["episode"].float())
        found |= {(id(pack), "share"): share_K, (id(pack), "logprobs"): logprobs_K.detach()}
        (logprobs_K * share_K).sum().backward()
    grads = scattered(model.module)
    loops = Loops(folder, monkeypatch)
    for pack in made:
        expected: list[Tensor] = []
        rows: dict[int, Tensor] = {}
        for node, target in zip(pack.predictors_P[pack.predictor_K].tolist(), pack.target_K.tolist(), strict=True):
            (branch,) = [branch for branch in pack.branches if branch.start <= node < branch.stop]
            if branch.start not in rows:
                tokens = pack.token_ids_N[branch.path].tolist()
                rows[branch.start] = loops.logprobs(tokens, other_choice(tokens))
            expected.append(rows[branch.start][node - branch.stop, target])
        logprobs_K = torch.stack(expected)
        torch.testing.assert_close(found[id(pack), "logprobs"], logprobs_K.detach(), atol=1e-5, rtol=0)
        (logprobs_K * found[id(pack), "share"]).sum().backward()
    for name, grad in scattered(loops.model).items():
        torch.testing.assert_close(grads[name], grad, atol=2e-5, rtol=1e-4)
    assert float(grads["model.layers.0.mlp.gate.weight"].abs().max()) > 1e-3


# --- which tokens -----------------------------------------------------------------------------------------------------


def without(group: Group, member: int, index: int) -> Group:
    """The group without the experts of one turn."""
    members = list(group.trajectories)
    turns = [replace(one, experts=None) if one.index == index else one for one in members[member].turns]
    members[member] = replace(members[member], turns=tuple(turns))
    return replace(group, trajectories=tuple(members))


@pytest.mark.parametrize(
    ("value", "missing"), [(None, 3), (77, 6), (3, 6)], ids=["not told", "no such expert", "one expert twice"]
)
def test_a_token_without_experts_is_counted_alarmed_or_refused(
    value: int | None, missing: int, folder: Path, tmp_path: Path
) -> None:
    """The second turn of the member that forks: it tells of the first turn's last token, which three rows have and the
    fork tells as well, of its prompt, and of its own tokens but the last one."""
    group = told(forked(1), other_choice)
    whole = of(after(folder, tmp_path, [group])[0])
    assert (whole.missing, whole.differing) == (0, 0)
    if value is None:
        group = without(group, 0, 1)
    else:
        wrong: Any = group.trajectories[0].turns[1].experts
        wrong = replace(wrong, data=bytes([value]) * len(wrong.data))
        turns = list(group.trajectories[0].turns)
        turns[1] = replace(turns[1], experts=wrong)
        group = replace(group, trajectories=(replace(group.trajectories[0], turns=tuple(turns)), group.trajectories[1]))
    report, _ = after(folder, tmp_path, [group])
    assert (of(report).missing, of(report).replayed) == (missing, whole.replayed - missing)
    (alarm,) = [alarm for alarm in raised({"routing": asdict(of(report))}, Alarms()) if alarm.name == "routing"]
    assert f"routing.missing = {missing}" in alarm.text
    learner = Learner(config(routed="required").learner, folder)
    before = learner.hashes()
    with pytest.raises(RunFailed, match=rf"{missing} of {whole.replayed} tokens .* --set engine\.routed_experts=true"):
        learner.step([group], step_of=STEP_OF)
    assert learner.hashes() == before and learner.step_index == 0


def test_what_nobody_told_is_nobodys_alarm(folder: Path, tmp_path: Path) -> None:
    """If the run does not ask its engine."""
    report, _ = after(folder, tmp_path, all_groups(None), routed=False)
    assert (of(report).replayed, of(report).missing, of(report).agreement) == (0, 0, None)


def test_rows_that_were_told_other_experts_for_a_token_they_share_are_counted(folder: Path, tmp_path: Path) -> None:
    group = told(forked(1), other_choice)
    one, other = group.trajectories

    def moved(tokens: Sequence[int]) -> np.ndarray:
        return (other_choice(tokens) + 1) % EXPERTS

    second = told(replace(group, trajectories=(other,)), moved).trajectories[0]
    report, _ = after(folder, tmp_path, [replace(group, trajectories=(one, second))])
    assert (of(report).missing, of(report).differing) == (0, 6)  # four of the prompt and two sampled ones


# --- balance ----------------------------------------------------------------------------------------------------------


def balance(loops: Loops, rows: Sequence[tuple[Sequence[int], np.ndarray]]) -> Tensor:
    """The mean over layers of E Σ f P over all tokens of all rows, each with its experts, but their last ones."""
    judged: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    used: list[list[int]] = [[] for _ in range(LAYERS)]
    for tokens, chosen in rows:
        loops.logprobs(tokens, chosen)
        for layer, probability_TE in enumerate(loops.probabilities):
            judged[layer] += probability_TE[:-1].unbind()
            used[layer] += chosen[:-1, layer].flatten().tolist()
    total = torch.zeros(())
    for layer in range(LAYERS):
        size = len(judged[layer])
        mean_E = torch.stack(judged[layer]).mean(0)
        for expert in range(EXPERTS):
            total = total + EXPERTS * used[layer].count(expert) / size * mean_E[expert] / LAYERS
    return total


@pytest.mark.medium
@pytest.mark.parametrize("replayed", [True, False])
def test_the_balance_loss_is_that_of_all_rows_however_they_are_divided(
    replayed: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = other_choice if replayed else own_choice(folder)
    groups = all_groups(choose if replayed else None)
    made = [row for group in groups for row in group_rows(group, GRPO(), step_of=STEP_OF, step_now=0, max_lag=4).rows]
    rows = [(row.token_ids, choose(row.token_ids)) for row in made]
    plain, weights = after(folder, tmp_path, groups)
    reports: list[StepReport] = []
    for budget, recomputed in ((60, False), (30, False), (4000, True)):
        divided = {"tokens_per_batch": budget, "gradient_checkpointing": recomputed}
        report, others = after(folder, tmp_path, groups, balance_weight=0.5, **divided)
        reports.append(report)
        pushed = {name: weights[name] - others[name] for name in weights}  # half of the gradient of the balance
        if len(reports) == 1:
            first = pushed
        assert_gradients_alike(pushed, first, norm=plain.grad_norm)
        assert report.loss == pytest.approx(plain.loss + 0.5 * of(report).balance, abs=1e-5)
        assert of(report).balance == pytest.approx(of(reports[0]).balance, rel=1e-6)
    loops = Loops(folder, monkeypatch)
    expected = balance(loops, rows)
    assert of(reports[0]).balance == pytest.approx(float(expected.detach()), rel=1e-5)
    (0.5 * expected).backward()
    expected_grads = {name: grad for name, grad in scattered(loops.model).items() if name in first}  # the rest is fused
    assert_gradients_alike({name: first[name] for name in expected_grads}, expected_grads, norm=plain.grad_norm)
    assert float(first["model.layers.1.mlp.gate.weight"].abs().max()) > 1e-3


def test_one_row_has_the_balance_loss_of_transformers(folder: Path, tmp_path: Path) -> None:
    """Which adds up layers before it multiplies: so one layer."""
    single = mixture(tmp_path / "single")
    group = group_of([episode(0, [turn(0, [1, 2, 3, 4, 5], [6, 7, 9])], 1.0), episode(1, [turn(0, [3], [4])], 0.0)])
    report, _ = after(single, tmp_path, [group])
    model: Any = AutoModelForCausalLM.from_pretrained(single, dtype=torch.float32)
    rows = [torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), torch.tensor([[3]])]
    routers = torch.cat([model(row, output_router_logits=True).router_logits[0] for row in rows])
    assert of(report).balance == pytest.approx(
        float(load_balancing_loss_func((routers.detach(),), EXPERTS, PER_TOKEN)), rel=1e-6
    )


def test_the_balance_loss_evens_the_load(folder: Path, tmp_path: Path) -> None:
    groups = all_groups(None)
    learner = Learner(config(balance_weight=1.0, lr=0.5).learner, folder)
    reports = [learner.step(groups, step_of=STEP_OF) for _ in range(5)]
    assert of(reports[-1]).balance < of(reports[0]).balance - 0.05
    assert of(reports[-1]).load_mean < of(reports[0]).load_mean
    assert 1 <= of(reports[0]).load_mean <= of(reports[0]).load_max <= EXPERTS / PER_TOKEN
