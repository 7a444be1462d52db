"""What algorithms with a clipped ratio share: the surrogate, the importance of stale tokens, KL and entropy terms.

    loss = sum over tokens of  weight (rho (surrogate(r, A) + kl) - entropy)
           - observation_weight mean over observed tokens of  log pi

r is the ratio of the current policy to that of the step's start, and rho the importance weight from the policy that
sampled to that of the step's start (decoupled PPO, Hilton et al. 2022). With one update per step r is 1 and cuts
nothing. So an old token has no gradient, too, if its ratio to the policy that sampled it is past the clip
(`clip_from`): the updates since then have already learned what it says.

A is the advantage from rewards, less what the token costs in divergence from reference and teacher
(`agentrl.algos.divergence`). A token whose weight is 0, and an episode that is rejected, stay in the normalisation.

Observed tokens are what the environment answered, between two actions of the policy: predicting them trains a model of
the world from the same pass, also where no action has an advantage (ECHO, Shrivastava et al. 2026, arXiv 2605.24517).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from agentrl.algos.algorithm import Algorithm, Follows, Loss, Outputs, Positive, Slots, Weight

if TYPE_CHECKING:
    from torch import Tensor


OLD = 2
"""Steps. Runs at lag 2 learn without a clip from the policy that sampled, and runs at lag 8 do not."""


class Clipped(Algorithm):
    """The settings of the policy's loss, and the loss."""

    clip_low: Positive = 0.2  # PPO: the ratio may fall by so much
    clip_high: Positive = 0.28  # and rise by so much
    clip_from: Literal["auto", "proximal", "behaviour"] = "auto"  # policy of the step's start; that which sampled, too
    dual_clip: Weight = 0.0  # bound on it with a negative advantage, such as 3 (Ye et al. 2020); 0: none
    importance: Literal["token", "sequence", "geometric", "none"] = "token"  # the ratio that weighs stale tokens
    importance_floor: Weight = 0.0  # importance weights are at least this, see `importance_mode`
    importance_mode: Literal["truncate", "mask"] = "truncate"  # a weight out of floor and cap: the bound, or 0 (IcePop)
    reject: Literal["none", "token", "sequence", "geometric"] = "none"  # an episode is left out if this ratio
    reject_below: Weight = 0.5  # is below this, `token`: of any of its tokens
    reject_above: Positive = 2.0  # or above this
    kl_weight: Weight = 0.0  # of a penalty on leaving the reference
    kl_in: Literal["loss", "reward"] = "loss"  # the penalty of each token, or that of the episode, as a reward
    kl_gradient: Literal["k3", "k2", "k1"] = "k3"  # in the loss: k3 along KL(reference || policy), k2 and k1 reverse
    reference_every: Annotated[int, Field(ge=0)] = 0  # steps after which the reference follows the policy; 0: never
    reference_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of itself that it keeps then; 0: it is the policy
    entropy_weight: Weight = 0.0  # bonus on the entropy of the policy
    reward_weight: Weight = 1.0  # of the advantage from rewards; 0: distillation alone
    distil_weight: Weight = 0.0  # of a penalty on leaving the teacher
    distil_level: Literal["token", "episode"] = "token"  # what a token costs: itself, or all later ones too
    observation_weight: Weight = 0.0  # of the cross-entropy of what the environment answered (ECHO)
    teacher: str | None = None  # in the learner: a folder, a registered id, or one of the Hugging Face hub
    teacher_every: Annotated[int, Field(ge=0)] = 0  # or the policy itself, followed after so many steps; 0: it is not
    teacher_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of itself that such a teacher keeps then

    @model_validator(mode="after")
    def _of_references(self) -> Self:
        for name in ("reference", "teacher"):
            if (decay := getattr(self, f"{name}_decay")) and not getattr(self, f"{name}_every"):
                raise ValueError(f"{name}_decay = {decay:g}: give {name}_every, the steps between")
        if self.reference_every and not self.kl_weight:
            raise ValueError(f"reference_every = {self.reference_every}: give kl_weight, or leave it at 0")
        if self.teacher is not None and self.teacher_every:
            raise ValueError(f"teacher = {self.teacher!r} does not follow the policy: leave out teacher_every, or it")
        if self.teacher_every and not self.distil_weight:
            raise ValueError(f"teacher_every = {self.teacher_every}: give distil_weight, or leave it at 0")
        if self.teacher is not None and not self.distil_weight:
            raise ValueError(f"teacher = {self.teacher!r}: give distil_weight, or leave it out")
        return self

    @model_validator(mode="after")
    def _dual(self) -> Self:
        if 0 < self.dual_clip <= 1 + self.clip_high:
            least = f"1 + clip_high = {1 + self.clip_high:g}"
            raise ValueError(f"dual_clip = {self.dual_clip:g}: must be above {least}, or 0 for no bound")
        return self

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        for low, high in (("importance_floor", "importance_cap"), ("reject_below", "reject_above")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(f"{low} = {getattr(self, low):g} must be below {high} = {getattr(self, high):g}")
        if self.importance_mode == "mask" and self.importance == "none":
            raise ValueError("importance_mode = 'mask' and importance = 'none': give importance = 'token'")
        return self

    @property
    def corrects(self) -> bool:
        return self.importance != "none"

    @property
    def ahead(self) -> bool:
        return self.importance in ("sequence", "geometric") or self.reject != "none" or bool(self.charges)

    @property
    def slots(self) -> Slots:
        frozen: dict[str, str | None] = {"teacher": self.teacher} if self.teacher is not None else {}
        moving: dict[str, Follows] = {}
        if self.kl_weight > 0 and self.reference_every:
            moving["reference"] = Follows(every=self.reference_every, decay=self.reference_decay)
        elif self.kl_weight > 0:
            frozen["reference"] = None
        if self.teacher_every:
            moving["teacher"] = Follows(every=self.teacher_every, decay=self.teacher_decay)
        return Slots(frozen=frozen, moving=moving)

    @property
    def charges(self) -> dict[str, float]:
        """The weights of the divergences, by the model diverged from, that an episode as a whole is charged for."""
        reference = self.kl_weight if self.kl_in == "reward" else 0.0
        teacher = self.distil_weight if self.distil_level == "episode" else 0.0
        return {name: weight for name, weight in (("reference", reference), ("teacher", teacher)) if weight > 0}

    @property
    def diverges(self) -> bool:
        return self.kl_weight > 0 or self.distil_weight > 0

    def advantage(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """Of each token, from rewards and divergences: [K]."""
        from agentrl.algos.divergence import gap

        advantage_K = self.reward_weight * tokens["advantage"]
        if self.charges:
            advantage_K = advantage_K - tokens["charge"]
        if self.distil_weight > 0 and self.distil_level == "token":
            advantage_K = advantage_K - self.distil_weight * gap(tokens, "teacher")
        return advantage_K

    @property
    def entropy_gradient(self) -> bool:
        return self.entropy_weight > 0

    @property
    def observes(self) -> bool:
        return self.observation_weight > 0

    def log_ratio(self, tokens: Mapping[str, Tensor], outputs: Outputs) -> Tensor:
        """The logarithm of the ratio that is clipped: [K]."""
        return outputs.logprobs_K - tokens["proximal"]

    def surrogate(self, tokens: Mapping[str, Tensor], outputs: Outputs) -> tuple[Tensor, Tensor]:
        """Loss per token before importance and penalties, and where a clip cut its gradient: both [K]."""
        from agentrl.algos.losses import clipped_surrogate

        return clipped_surrogate(
            outputs.logprobs_K,
            tokens["proximal"],
            tokens["advantage"],
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )

    def advantages(self, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What needs whole sequences, if the settings ask for it: their `importance`, whether they are `kept`, and the
        `charge` that `advantage` takes off."""
        from agentrl.algos.divergence import charge
        from agentrl.algos.importance import bounded, log_ratios, within

        columns: dict[str, Tensor] = {}
        if not self.ahead:
            return columns
        gap_T, keys = tokens["proximal"] - tokens["behaviour"], (tokens["episode"], tokens["role"])
        if self.importance == "sequence" or self.importance == "geometric":
            ratio_T = log_ratios(gap_T, *keys, self.importance).exp()
            weight_T = bounded(ratio_T, self.importance_floor, self.importance_cap, self.importance_mode)
            columns["importance"] = weight_T.to(gap_T.dtype)
        if self.reject != "none":
            ratio_T = log_ratios(gap_T, *keys, self.reject).exp()
            columns["kept"] = within(ratio_T, *keys, self.reject_below, self.reject_above)
        if weights := self.charges:
            columns["charge"] = charge(tokens, weights)
        return columns

    def correction(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """The importance weight of each token, without gradient: [K]."""
        from agentrl.algos.importance import importance_weights

        if "importance" in tokens:
            return tokens["importance"]
        if not self.corrects:
            return tokens["proximal"].new_ones(tokens["proximal"].shape)
        floor, cap = self.importance_floor, self.importance_cap
        return importance_weights(tokens["proximal"], tokens["behaviour"], cap, floor=floor, mode=self.importance_mode)

    def _held(self, tokens: Mapping[str, Tensor]) -> Tensor | None:
        """Which tokens are clipped from the policy that sampled them, too: bool [K], or None if none are."""
        import torch

        if self.clip_from == "proximal" or "clip_from" in self.unused:
            return None
        if self.clip_from == "behaviour":
            return torch.ones_like(tokens["behaviour"], dtype=torch.bool)
        return tokens["lag"] > OLD if "lag" in tokens else None

    def loss(self, tokens: Mapping[str, Tensor], outputs: Outputs, step: int) -> Loss:
        import torch

        from agentrl.algos.divergence import gauges
        from agentrl.algos.losses import kl_penalty, policy_loss

        advantage_K = self.advantage(tokens)
        surrogate_K, clipped_K = self.surrogate({**tokens, "advantage": advantage_K}, outputs)
        if (held_K := self._held(tokens)) is not None:
            moved_K = (outputs.logprobs_K.detach() - tokens["behaviour"]).exp() - 1
            far_K = held_K & torch.where(advantage_K > 0, moved_K > self.clip_high, moved_K < -self.clip_low)
            surrogate_K, clipped_K = torch.where(far_K, surrogate_K.detach(), surrogate_K), clipped_K | far_K
        log_ratio_K = self.log_ratio(tokens, outputs).detach()
        kl_K = None
        if self.kl_weight > 0 and self.kl_in == "loss":
            kl_K = kl_penalty(outputs.logprobs_K, tokens["reference"], self.kl_gradient, tokens["proximal"])
        importance_K = self.correction(tokens)
        total = policy_loss(
            surrogate_K,
            tokens["weight"] * tokens["kept"] if "kept" in tokens else tokens["weight"],
            importance_K,
            kl_T=kl_K,
            kl_weight=self.kl_weight,
            entropy_T=outputs.entropy_K if self.entropy_weight > 0 else None,
            entropy_weight=self.entropy_weight,
        )
        measured = gauges(tokens, reference=self.kl_weight > 0, teacher=self.distil_weight > 0)
        if self.observes:
            assert outputs.observed_O is not None and outputs.observed_weight_O is not None
            observation_loss = -(outputs.observed_weight_O * outputs.observed_O).sum()
            total = total + self.observation_weight * observation_loss
            share = outputs.observed_weight_O.sum().clamp(min=1e-12)
            measured = {**measured, "observation_loss": observation_loss / share * tokens["weight"].sum()}
        return Loss(
            total=total,
            clipped_K=clipped_K,
            importance_K=importance_K,
            log_ratio_K=log_ratio_K,
            gauges=measured,
            gauged=tokens["weight"].sum(),
        )
