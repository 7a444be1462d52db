"""Common parts of clipped-ratio algorithms: the surrogate, the importance of stale tokens, KL and entropy terms.

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

from agentrl.algos.algorithm import Algorithm, Count, Follows, Loss, Outputs, Positive, Slots, Weight

if TYPE_CHECKING:
    from torch import Tensor


OLD = 2
"""Steps. Runs at lag 2 learn without a clip from the policy that sampled, and runs at lag 8 do not."""


Past = Count | Annotated[float, Field(gt=0, lt=1)]
"""A model that follows the policy: copied after so many steps, or below 1 averaged by this decay after each."""


def _follows(past: float) -> Follows:
    return Follows(every=past) if isinstance(past, int) else Follows(every=1, decay=past)


class Clipped(Algorithm):
    """Computes the loss of the policy with a clipped ratio, and holds its settings."""

    clip_low: Positive = 0.2
    """Distance below 1 at which PPO's clip cuts the ratio of the current policy to the policy at the start of the step.
    Below it, a token with a negative advantage adds no gradient."""

    clip_high: Positive = 0.28
    """Distance above 1 at which PPO's clip cuts the ratio of the current policy to the policy at the start of the step.
    Above it, a token with a positive advantage adds no gradient. A larger value than `algo.clip_low` leaves unlikely
    tokens more room (clip-higher, Yu et al. 2025)."""

    clip_from: Literal["auto", "proximal", "behaviour"] = "auto"
    """Policy that the clip holds a token close to: the policy at the start of the step ("proximal"), or also the policy
    that sampled the token ("behaviour"). "auto" means "behaviour" for tokens more than 2 optimizer steps old, so that a
    policy does not learn the same from them again and again."""

    dual_clip: Weight = 0.0
    """Bound on the loss of a token with a negative advantage, in multiples of that advantage, such as 3 (dual-clip PPO,
    Ye et al. 2020). It must be above 1 + `algo.clip_high`; 0 sets no bound."""

    importance: Literal["token", "sequence", "geometric", "none"] = "token"
    """Importance weight of stale tokens, from their ratios of the policy at the start of the step to the policy that
    sampled: the token's ratio ("token"), the product over its role's tokens in the episode ("sequence"), their
    geometric mean ("geometric"), or 1 ("none"). "sequence" has the least bias and the most variance."""

    importance_mode: Literal["truncate", "mask"] = "truncate"
    """Treatment of a weight beyond `algo.importance_bounds`: "truncate" sets it to the bound, "mask" sets it to 0
    (IcePop) and leaves the token in the normalisation."""

    reject: Literal["none", "token", "sequence", "geometric"] = "none"
    """Ratio, of the policy at the start of the step to the policy that sampled, that must lie within
    `algo.reject_bounds` or the episode leaves the loss: of each token ("token"), their product ("sequence") or their
    geometric mean ("geometric"). Each role is judged apart. "none" rejects nothing."""

    reject_bounds: Annotated[tuple[Weight, Weight], Field(strict=False)] = (0.5, 2.0)
    """Smallest and largest ratio with which an episode stays in the loss, if `algo.reject` is on."""

    kl_weight: Weight = 0.0
    """Weight of a penalty on leaving the reference, in the form of `algo.kl_form`. 0 needs no reference."""

    kl_form: Literal["k3", "k2", "k1", "reward"] = "k3"
    """Form of the penalty of `algo.kl_weight`. In the loss, "k3" has the gradient of KL(reference || policy), as in
    GRPO, "k2" and "k1" that of KL(policy || reference); only "k1" stays exact over several updates in a step. "reward"
    takes the divergence of a token and of all later ones off the reward instead."""

    reference: Literal["start"] | Past = "start"
    """Reference of `algo.kl_weight`: the model that the run began with ("start"), a copy of the policy after every so
    many optimizer steps (a whole number), or a moving average of its weights with this decay (a number below 1, such as
    0.99)."""

    entropy_weight: Weight = 0.0
    """Weight of a bonus on the policy's entropy. Raise it if the entropy falls to 0 at once."""

    reward_weight: Weight = 1.0
    """Weight of the advantage from rewards. 0 leaves distillation alone (`algo.distil_weight`)."""

    distil_weight: Weight = 0.0
    """Weight of a penalty on leaving the teacher: it times log policy - log teacher is taken off a token's advantage.
    The teacher is `algo.teacher` or a reward source of kind "teacher". 0 switches distillation off."""

    distil_level: Literal["token", "episode"] = "token"
    """Tokens whose divergence from the teacher lowers a token's advantage: itself ("token"), or itself and all later
    ones ("episode"), which is exact for whole episodes and has more variance."""

    observation_weight: Weight = 0.0
    """Weight of the cross-entropy of the environment's answers, by which the policy learns to predict them (ECHO,
    Shrivastava et al. 2026)."""

    teacher: str | Past | None = None
    """Teacher that the learner holds for `algo.distil_weight`: a model with the policy's tokenizer (a folder, a run, a
    registered or Hugging Face id), or a number for the policy's own past, as in `algo.reference`. Without it, only a
    reward source of kind "teacher" can teach."""

    @model_validator(mode="after")
    def _of_references(self) -> Self:
        if self.reference != "start" and not self.kl_weight:
            raise ValueError(f"reference = {self.reference}: give kl_weight, or leave it out")
        if self.teacher is not None and not self.distil_weight:
            raise ValueError(f"teacher = {self.teacher!r}: give distil_weight, or leave it out")
        return self

    @model_validator(mode="after")
    def _dual(self) -> Self:
        if 0 < self.dual_clip <= 1 + self.clip_high:
            least_bound = f"1 + clip_high = {1 + self.clip_high:g}"
            raise ValueError(f"dual_clip = {self.dual_clip:g}: must be above {least_bound}, or 0 for no bound")
        return self

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        for field_name in ("importance_bounds", "reject_bounds"):
            lower_bound, upper_bound = getattr(self, field_name)
            if lower_bound >= upper_bound:
                raise ValueError(f"{field_name} = {[lower_bound, upper_bound]}: the first must be below the second")
        # Weights that are all 1 are within any bounds: the setting would do nothing, and look as if it did.
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
        models: dict[str, str | float | None] = {} if self.teacher is None else {"teacher": self.teacher}
        if self.kl_weight > 0:
            models["reference"] = None if self.reference == "start" else self.reference
        return Slots(
            frozen={model_name: model for model_name, model in models.items() if not isinstance(model, int | float)},
            moving={
                model_name: _follows(model_age)
                for model_name, model_age in models.items()
                if isinstance(model_age, int | float)
            },
        )

    @property
    def charges(self) -> dict[str, float]:
        """The weights of the divergences, by the model diverged from, that an episode as a whole is charged for."""
        reference_weight = self.kl_weight if self.kl_form == "reward" else 0.0
        teacher_weight = self.distil_weight if self.distil_level == "episode" else 0.0
        return {
            model: weight
            for model, weight in (("reference", reference_weight), ("teacher", teacher_weight))
            if weight > 0
        }

    @property
    def diverges(self) -> bool:
        return self.kl_weight > 0 or self.distil_weight > 0

    def advantage(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """Advantage of each token, from rewards and divergences: [K]."""
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
        """Compute the columns that need whole sequences, if the settings ask for them: the `importance` of sequences,
        whether they are `kept`, and the `charge` that `advantage` takes off."""
        from agentrl.algos.divergence import charge
        from agentrl.algos.importance import bounded, log_ratios, within

        new_columns: dict[str, Tensor] = {}
        if not self.ahead:
            return new_columns
        gap_T, sequence_keys = tokens["proximal"] - tokens["behaviour"], (tokens["episode"], tokens["role"])
        if self.importance == "sequence" or self.importance == "geometric":
            ratio_T = log_ratios(gap_T, *sequence_keys, self.importance).exp()
            weight_T = bounded(ratio_T, *self.importance_bounds, self.importance_mode)
            new_columns["importance"] = weight_T.to(gap_T.dtype)
        if self.reject != "none":
            ratio_T = log_ratios(gap_T, *sequence_keys, self.reject).exp()
            new_columns["kept"] = within(ratio_T, *sequence_keys, *self.reject_bounds)
        if charge_weights := self.charges:
            new_columns["charge"] = charge(tokens, charge_weights)
        return new_columns

    def correction(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """The importance weight of each token, without gradient: [K]."""
        from agentrl.algos.importance import importance_weights

        if "importance" in tokens:
            return tokens["importance"]
        if not self.corrects:
            return tokens["proximal"].new_ones(tokens["proximal"].shape)
        lower_bound, upper_bound = self.importance_bounds
        return importance_weights(
            tokens["proximal"], tokens["behaviour"], upper_bound, floor=lower_bound, mode=self.importance_mode
        )

    # Why old tokens have a second clip. With one update a step the ratio to the step's start is 1, so PPO's clip
    # never cuts: nothing holds a policy back that learns, for eight steps, from tokens that all say the same, since
    # the first of these steps cannot be seen in the data of the others. For a token that is older than `OLD` steps
    # the clip therefore holds from the policy that sampled it as well. The price is a bias towards smaller steps for
    # these tokens alone; `benchmarks/learning.md` has runs with it and without.
    def _has_second_clip(self, tokens: Mapping[str, Tensor]) -> Tensor | None:
        """Which tokens are also clipped by their ratio to the policy that sampled them: bool [K], or None if none
        are."""
        import torch

        if self.clip_from == "proximal" or "clip_from" in self.unused:
            return None
        if self.clip_from == "behaviour":
            return torch.ones_like(tokens["behaviour"], dtype=torch.bool)
        return tokens["lag"] > OLD if "lag" in tokens else None

    def loss(self, tokens: Mapping[str, Tensor], outputs: Outputs, step: int) -> Loss:
        """The surrogate with importance weights, after both clips; then KL penalty, entropy bonus and observations."""
        import torch

        from agentrl.algos.divergence import gauges
        from agentrl.algos.kl_penalty import kl_penalty
        from agentrl.algos.losses import policy_loss

        advantage_K = self.advantage(tokens)
        surrogate_K, clipped_K = self.surrogate({**tokens, "advantage": advantage_K}, outputs)
        second_clip_K = self._has_second_clip(tokens)
        far_K = torch.zeros_like(clipped_K, dtype=torch.bool)  # cut by the second clip
        if second_clip_K is not None:
            moved_K = (outputs.logprobs_K.detach() - tokens["behaviour"]).exp() - 1
            far_K = second_clip_K & torch.where(advantage_K > 0, moved_K > self.clip_high, moved_K < -self.clip_low)
            # Detached and not set to 0: the value of the loss stays comparable with that of other steps, only the
            # gradient is gone.
            surrogate_K, clipped_K = torch.where(far_K, surrogate_K.detach(), surrogate_K), clipped_K | far_K
        log_ratio_K = self.log_ratio(tokens, outputs).detach()
        if second_clip_K is not None:
            # The metrics show on which side a token was cut, so a token that the second clip cut shows the ratio of
            # that clip.
            log_ratio_K = torch.where(far_K, outputs.logprobs_K.detach() - tokens["behaviour"], log_ratio_K)
        kl_K = None
        if self.kl_weight > 0 and self.kl_form != "reward":
            kl_K = kl_penalty(outputs.logprobs_K, tokens["reference"], self.kl_form, tokens["proximal"])
        importance_K = self.correction(tokens)
        total_loss = policy_loss(
            surrogate_K,
            # A rejected episode counts 0 and stays in the normalisation: to divide by what is left would make the
            # other episodes weigh more exactly when many are bad.
            tokens["weight"] * tokens["kept"] if "kept" in tokens else tokens["weight"],
            importance_K,
            kl_T=kl_K,
            kl_weight=self.kl_weight,
            entropy_T=outputs.entropy_K if self.entropy_weight > 0 else None,
            entropy_weight=self.entropy_weight,
        )
        step_gauges = gauges(tokens, reference=self.kl_weight > 0, teacher=self.distil_weight > 0)
        if self.observes:
            assert outputs.observed_O is not None and outputs.observed_weight_O is not None
            observation_loss = -(outputs.observed_weight_O * outputs.observed_O).sum()
            total_loss = total_loss + self.observation_weight * observation_loss
            # The gauge is divided by the weight of scored tokens when it is reported: here it is put on that scale,
            # so that its mean is one over observed tokens.
            observed_share = outputs.observed_weight_O.sum().clamp(min=1e-12)
            step_gauges = {
                **step_gauges,
                "observation_loss": observation_loss / observed_share * tokens["weight"].sum(),
            }
        return Loss(
            total=total_loss,
            clipped_K=clipped_K,
            importance_K=importance_K,
            log_ratio_K=log_ratio_K,
            gauges=step_gauges,
            gauged=tokens["weight"].sum(),
        )
