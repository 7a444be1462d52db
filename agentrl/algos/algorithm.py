"""Contract of an algorithm: an object with settings as fields and four methods, which a learner calls in this order.

    prepare      what is known of a group before any forward pass, from its rewards alone
    (forward)    if `ahead`: the learner runs the models of `slots` over all tokens of the step
    advantages   what is known of the tokens of a step then: those that this algorithm trains
    loss         the loss of one pass, from the columns of its tokens and what its forward pass says of them

Knows tensors, never models, rows or files. An algorithm of yours derives from `Algorithm` and is offered under the
entry-point group `agentrl.algorithms`; `[algo] kind` names it. Its fields are its settings: the run file's `[algo]`.

This module loads without torch, since every process of a run reads the settings; so does the file of each algorithm,
which imports the functions that it needs inside its methods.

Columns are tensors [N, ...] by name, one entry for each of N scored tokens. The learner's own:

    behaviour    log-prob in nats under the policy that sampled
    weight       share of the loss; if no `normalise` is a number and no group has a weight of its own, those of a
                 step sum to its number of updates, over all algorithms of the run
    lag, origin  optimizer steps since the weights that sampled; a number of `importance.Origin`
    episode, role, turn   numbers that say where the token is; tokens of a turn are in order
    proximal     log-prob under the policy at the start of the step
    values       if `slots` has a critic: its value before the token, at the start of the step
    reference    if `slots` has such a frozen or moving model: log-prob under it; likewise any other, under its name
    and those that `agentrl.tokens.columns` knows, and that `prepare` and `advantages` return
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    field_serializer,
    model_serializer,
    model_validator,
)

if TYPE_CHECKING:
    from torch import Tensor

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]

Trunk = Literal["own", "shared"]

ROUNDING = 1e-9  # sums of equal rewards in another order differ by less


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """Rewards of the members of a group, as one role sees it: G members, T turns of the role. Rewards are float64;
    anything past `turns_G` is 0. `scored_G` says who takes part, `judges_G` who may form a baseline. `rewards_GT` is
    the sum over K sources of `streams_KGT` times `weights_K`. `states_GT` (int64) is equal for turns that answered the
    same text, and below 0 where it is not known what a turn answered."""

    outcomes_G: Tensor
    rewards_GT: Tensor
    turns_G: Tensor
    scored_G: Tensor
    judges_G: Tensor
    streams_KGT: Tensor
    weights_K: Tensor
    states_GT: Tensor | None = None  # no state is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Follows:
    """How a moving model follows the policy: after each `every`-th step it becomes `decay` times itself plus
    1 - `decay` times the policy. It begins as the policy; with decay 0 it is the policy of some steps ago."""

    every: int
    decay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The models besides the policy. `frozen` ones, such as `reference` and `teacher`, by name: the folder of each, or
    None for the model that the run began with. `moving` ones, by name, follow the policy. A critic has a value head on
    a trunk of its own, or on the policy's; its learning rate is `critic_lr` (default: the policy's)."""

    frozen: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])
    moving: Mapping[str, Follows] = field(default_factory=dict[str, Follows])
    critic: Trunk | None = None
    critic_lr: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Outputs of a pass with gradients for its tokens: log-probs in nats, entropies, and values if there is a critic.
    If the algorithm `observes`, `observed_O` are the log-probs of the environment's tokens, and `observed_weight_O`
    their shares, which sum to 1 over an update as those of the scored tokens do."""

    logprobs_K: Tensor
    entropy_K: Tensor
    values_K: Tensor | None = None
    observed_O: Tensor | None = None
    observed_weight_O: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """`total` is the scalar to minimise; those of an update's passes add up. `clipped_K` says where a clip cut the
    gradient. `gauges` are scalars that add up likewise. Each is reported by name as a mean: divided by `gauged`, a sum
    of shares that adds up too, or without it by the number of updates. `importance_K` are the weights that corrected
    stale tokens, `log_ratio_K` is of the ratio that the clip is on, or that cut the token, if the algorithm has
    such."""

    total: Tensor
    clipped_K: Tensor
    gauges: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    gauged: Tensor | None = None
    importance_K: Tensor | None = None
    log_ratio_K: Tensor | None = None


class Algorithm(BaseModel):
    """Defines an algorithm by its settings and the methods that a learner calls. It is immutable and has no state
    between steps."""

    # Strict, since TOML has types: `group_size = "8"` is a mistake worth a line. Frozen, since ranks, the store and
    # the page compute with copies that must stay equal.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=True)

    unused: ClassVar[frozenset[str]] = frozenset()
    """Settings that a kind inherits but does not use: they stay at their defaults."""

    kind: Any = ""
    """Algorithm that trains the policy: one of these, one that an installed package offers under the entry-point group
    `agentrl.algorithms`, or `module:Class` or `file.py:Class`."""

    process_weight: Weight = 1.0
    """Weight of process rewards in a return, beside the outcome. 0 switches them off."""

    importance_bounds: Annotated[tuple[Weight, Weight], Field(strict=False)] = (0.0, 2.0)
    """Lower and upper bound of the importance weights of stale tokens. A weight beyond them is set to a bound or masked
    (`algo.importance_mode`)."""

    normalise: Literal["token", "sequence"] | Count = "token"
    """Divisor of the loss: every token of a step counts equally ("token"), every episode does ("sequence"), or the sum
    over an episode is divided by a fixed number of tokens (a number). Where lengths differ, only a number keeps the
    direction of the gradient of the expected return."""

    # A class outside of agentrl has the id or the reference that the run file gave, which it need not list as its kind.
    @field_serializer("kind")
    def _kind(self, kind: str) -> str:
        return kind

    # Settings at their defaults may be left out of a document, but never the kind: another process would read GRPO.
    @model_serializer(mode="wrap")
    def _with_kind(self, serialize: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        document = serialize(self)
        return document if "kind" in (info.exclude or ()) else {"kind": self.kind, **document}

    @model_validator(mode="after")
    # A setting that a kind ignores is refused, and not dropped in silence (law 8): a run with `clip_low` under SAPO
    # would be reported as a comparison of clips.
    def _without_unused(self) -> Self:
        for field_name in sorted(self.unused):
            if getattr(self, field_name) != type(self).model_fields[field_name].default:
                raise ValueError(f"kind = {self.kind!r} does not use {field_name}: leave it out")
        return self

    @property
    def slots(self) -> Slots:
        """The models that it needs besides the policy."""
        return Slots()

    @property
    def ahead(self) -> bool:
        """Whether `advantages` needs a forward pass over the step before its first update, and episodes whole."""
        return False

    @property
    def entropy_gradient(self) -> bool:
        """Whether its loss differentiates the entropy."""
        return False

    @property
    def observes(self) -> bool:
        """Whether the loss also predicts the environment's answers."""
        return False

    @property
    def compares(self) -> bool:
        """Whether it judges an episode by its siblings, so that a group needs `least_members`."""
        return False

    @property
    def least_members(self) -> int:
        """The least size of a group that it can learn from."""
        return 2 if self.compares else 1

    @property
    def judges_returns(self) -> bool:
        """Whether a group trains nothing if its members' returns are equal from each turn on: dynamic sampling then
        leaves it out. Penalties and bonuses, such as on KL and entropy, do not count."""
        return self.compares

    @property
    def turn_discount(self) -> float:
        """The discount per turn of the returns that it compares."""
        return 1.0

    @property
    def diverges(self) -> bool:
        """Whether its loss has a divergence from another model: a token then moves the weights whatever it earned."""
        return bool(self.slots.frozen or self.slots.moving)

    @property
    def corrects(self) -> bool:
        """Whether it weighs stale tokens by their importance."""
        return True

    def prepare(self, siblings: Siblings) -> dict[str, Tensor]:
        """Columns of the turns of a group, each [G, T], before any forward pass; float32 once they are columns."""
        raise NotImplementedError

    def matters(self, tokens: Mapping[str, Tensor]) -> bool:
        """Whether a row can move any weights. A row that cannot is counted in the normalisation, but not computed."""
        return True

    def advantages(self, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """More columns of all tokens of a step, after the forward pass if `ahead` asks for one."""
        return {}

    def trained(self, step: int) -> tuple[str, ...]:
        """The names of the models that step number `step` (from 0) updates."""
        return ("policy",) if self.slots.critic is None else ("policy", "critic")

    def loss(self, tokens: Mapping[str, Tensor], outputs: Outputs, step: int) -> Loss:
        """The loss of one pass of step number `step`."""
        raise NotImplementedError
