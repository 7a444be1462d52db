"""GiGPO (Feng et al. 2025, arXiv 2505.10978): groups in groups. A turn is also judged by turns in the same state.

    A[i, t]   = A_E[i, t] + omega A_S[i, t]
    A_E[i, t] = R_i - mean of R over the group                       that of `agentrl.algos.grpo`
    A_S[i, t] = C[i, t] - mean of C over the turns in state s[i, t]  C[i, t] = sum over u >= t of gamma^(u - t) r[i, u]

The outcome is the reward of the last turn. Two turns are in the same state if they answer the same text: if the tokens
that were new to the policy before it acted are equal. The first turns of a group always are. Earlier messages are not
compared, so the state should be in the observation; a counter of turns in it makes every state another. A turn alone in
its state has A_S = 0.

The paper's own settings are `baseline = "group_mean"` and `scale = "std"`, which divides A_E by the deviation of the
group, and A_S by that of the turns in its state. With "group_mean" an episode's later visits to a state are in the
baseline of its earlier ones, which they depend on. With "leave_one_out" the siblings' visits alone are the baseline,
and no action judges itself: with `scale = "none"` and gamma = 1 the expected gradient is that of the return, plus
omega times its part from turns that a sibling has met, each by the chance that one did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from agentrl.algos.algorithm import Share, Siblings, Weight
from agentrl.algos.grpo import GRPO

if TYPE_CHECKING:
    from torch import Tensor


class GiGPO(GRPO):
    """Judges a turn also by turns in the same state: group-in-group policy optimization."""

    kind: Literal["gigpo"] = "gigpo"  # pyright: ignore[reportIncompatibleVariableOverride]

    step_weight: Weight = 1.0
    """Weight of the advantage among turns in the same state, beside that of the whole episode (omega in Feng et al.
    2025)."""

    step_discount: Share = 0.95
    """Discount of a reward per turn of distance, in the advantage among turns in the same state (gamma in Feng et al.
    2025)."""

    @model_validator(mode="after")
    def _of_turns(self) -> Self:
        if self.baseline == "none" or (self.scale != "none" and self.scale != "std"):
            raise ValueError("kind = 'gigpo' takes baseline = 'leave_one_out' or 'group_mean', scale = 'none' or 'std'")
        return self

    @property
    def judges_returns(self) -> bool:
        return False  # at different turns of equal episodes the same state may return something else

    def prepare(self, siblings: Siblings) -> dict[str, Tensor]:
        import torch

        from agentrl.algos.advantages import state_advantages
        from agentrl.algos.credit import outcome_to_go, reward_to_go

        assert siblings.states_GT is not None, "a group's members come with the states of their turns"
        turn_count = siblings.rewards_GT.shape[1]
        alive_GT = (torch.arange(turn_count) < siblings.turns_G[:, None]) & siblings.scored_G[:, None]
        rewards_GT = torch.where(alive_GT, siblings.rewards_GT, 0.0)
        returns_GT = self.process_weight * reward_to_go(rewards_GT, self.step_discount)
        returns_GT = returns_GT + outcome_to_go(siblings.outcomes_G, siblings.turns_G, turn_count, self.step_discount)
        step_GT = state_advantages(
            returns_GT,
            siblings.states_GT,
            # Unknown states are below 0 (law 8): two turns of which nothing is known are not in the same state.
            alive_GT & (siblings.states_GT >= 0),
            siblings.judges_G,
            baseline=self.baseline,
            scale="std" if self.scale == "std" else "none",
        )
        return {"advantage": super().prepare(siblings)["advantage"] + self.step_weight * step_GT}
