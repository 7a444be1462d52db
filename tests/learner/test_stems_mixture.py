"""A mixture computes the prompt of a group that is larger than a pass once, with the experts that were journaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.algos.grpo import GRPO
from agentrl.algos.ppo import PPO
from agentrl.learner.learner import Learner
from agentrl.learner.step_report import StepReport
from agentrl.records import Group
from tests.closeness import assert_gradients_alike, numbers_of

from .making import mixture
from .test_routing import EXPERTS, STEP_OF, Choice, config, of, other_choice, told
from .test_stems import long_prompt, prompt_in_every_pass

PASS = 40
PROMPT = 23  # tokens that are computed once: the last one predicts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("mixture"), layers=2)


class Stepped:
    """A learner's steps of 1 against the gradient: the last report, the weights, and how many tokens went through the
    policy's layers."""

    def __init__(
        self,
        folder: Path,
        groups: Sequence[Group],
        algo: Any = None,
        *,
        steps: int = 1,
        routed: bool = True,
        **train: Any,
    ) -> None:
        learner = Learner(config(algo, routed, **{"tokens_per_batch": PASS, **train}).learner, folder)
        self.computed = 0
        learner.model.module.get_input_embeddings().register_forward_hook(self._count)
        self.report: StepReport = [learner.step(groups, step_of=STEP_OF) for _ in range(steps)][-1]
        self.weights = {name: one.detach().clone() for name, one in learner.models.tensors().items()}
        self.routing = of(self.report)

    def _count(self, _: object, given: Any, __: object) -> None:
        self.computed += given[0].numel()


def both(folder: Path, groups: Sequence[Group], *given: Any, **train: Any) -> tuple[Stepped, Stepped]:
    """With the prompt computed once, and in every pass; they do the same."""
    once = Stepped(folder, groups, *given, **train)
    with prompt_in_every_pass():
        again = Stepped(folder, groups, *given, **train)
    assert once.report.loss == pytest.approx(again.report.loss, abs=1e-4)
    assert once.report.algorithm == pytest.approx(again.report.algorithm, rel=1e-3, abs=1e-4)
    assert numbers_of(once.routing) == pytest.approx(numbers_of(again.routing), rel=1e-4)
    assert_gradients_alike(once.weights, again.weights, norm=again.report.grad_norm, rel=1e-4)
    assert once.computed < 0.75 * again.computed
    assert once.report.tokens_distinct < 0.75 * again.report.tokens_distinct
    return once, again


def groups(choose: Choice | None) -> list[Group]:
    made = [long_prompt(1), long_prompt(2), long_prompt(3, members=3)]
    return made if choose is None else [told(group, choose) for group in made]


BALANCED = {"balance_weight": 0.5}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "balance": (None, BALANCED),
    "own choice, balance, recomputed": (None, {"routed": False, **BALANCED, "gradient_checkpointing": True}),
    "adapter, reference, balance": (
        GRPO(kl_weight=0.1),
        {**BALANCED, "steps": 2, "lora_rank": 2, "lora_targets": ["experts", "gate", "q_proj"]},
    ),
    "several updates, recomputed, moving": (
        GRPO(kl_weight=0.1, reference=1),
        {**BALANCED, "minibatches": 2, "epochs": 2, "lr": 0.1, "gradient_checkpointing": True},
    ),
    "own critic": (PPO(critic="own", critic_warmup_steps=0), {**BALANCED, "steps": 2, "lr": 0.1}),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("balance", "own choice, balance, recomputed") else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
    ],
)
def test_a_step_of_a_mixture_is_that_of_passes_without_stems(name: str, folder: Path) -> None:
    algo, train = CASES[name]
    once, _ = both(folder, groups(other_choice if train.get("routed", True) else None), algo, **train)
    if "lora_rank" not in train:  # every model that is trained has moved: experts and routers
        begun = Learner(config(algo, routed=False).learner, folder).models.tensors()
        own = [name for name in begun if ".mlp." in name and not name.startswith("reference.")]
        assert min(float((once.weights[name] - begun[name].detach()).abs().max()) for name in own) > 1e-5
    assert (once.routing.replayed > 200) == train.get("routed", True)
    assert once.routing.missing == 0


# --- which experts ----------------------------------------------------------------------------------------------------


def other_prompt(tokens: Sequence[int]) -> np.ndarray:
    """Of the tokens that are computed once, experts that another member does not tell."""
    found = other_choice(tokens)
    found[:PROMPT] = (found[:PROMPT] + 1) % EXPERTS
    return found


def silent(group: Group, *members: int) -> Group:
    """The group, in which these tell nothing of the tokens that are computed once."""

    def of(turn: Any) -> Any:
        if turn.experts is None or turn.experts.start:
            return turn
        cut = PROMPT * turn.experts.layers * turn.experts.per_token
        return replace(turn, experts=replace(turn.experts, start=PROMPT, data=turn.experts.data[cut:]))

    made = [
        replace(one, turns=tuple(map(of, one.turns))) if at in members else one
        for at, one in enumerate(group.trajectories)
    ]
    return replace(group, trajectories=tuple(made))


def test_a_stem_has_the_experts_that_a_pass_of_the_whole_group_would_replay(folder: Path) -> None:
    """The first member tells none, the second some, and two of the others tell other ones."""
    one, other = (told(long_prompt(1), choose).trajectories for choose in (other_choice, other_prompt))
    members = (one[0], one[1], other[2], other[3], one[4])
    group = silent(replace(long_prompt(1), trajectories=members), 0)
    divided, whole = (Stepped(folder, [group], **BALANCED, tokens_per_batch=size) for size in (PASS, 400))
    assert divided.report.tokens_distinct > whole.report.tokens_distinct
    assert divided.report.loss == pytest.approx(whole.report.loss, abs=1e-5)
    assert_gradients_alike(divided.weights, whole.weights, norm=whole.report.grad_norm)
    assert (divided.routing.missing, divided.routing.differing) == (0, PROMPT)
    assert numbers_of(divided.routing) == pytest.approx(numbers_of(whole.routing), rel=1e-5)


def test_a_prompt_of_which_nobody_tells_experts_is_missing_once_in_each_row(folder: Path) -> None:
    group = told(long_prompt(2), other_choice)
    once, _ = both(folder, [silent(group, *range(5))], **BALANCED)
    assert once.routing.missing == 6 * PROMPT  # one member forks


def test_groups_of_one_prompt_whose_experts_differ_share_no_stem(folder: Path) -> None:
    both(folder, [told(long_prompt(1), other_choice), told(replace(long_prompt(1), id=2), other_prompt)])
