"""Replay of the experts that engines reported in a step, and the report on its mixtures.

Owns which tokens are replayed, the balance loss of each pass, and the numbers on both. Never knows how a router is made
to choose (`agentrl.learner.moe.routers`), nor ranks.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from agentrl.config.train import Train
from agentrl.errors import ModelError, RunFailed
from agentrl.learner.data.prefix_trees import Pack
from agentrl.learner.model.policy import PolicyModel
from agentrl.learner.moe.expert_records import Routes, fitted, known, load
from agentrl.learner.moe.routers import RouterRecord, Routers

RoutersOf = Callable[[Pack], Routers | None]
"""Those of the policy of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """The routers' choices in a pass: how many tokens of rows each expert of each mixture got and how much probability
    [M, E], and the numbers of replayed experts and of those that the router would have chosen too."""

    load_ME: Tensor
    mass_ME: Tensor
    agreed: Tensor | float
    replayed: Tensor | float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSummary:
    """Routing of a step's mixtures. Tokens are those of rows, but their last ones. `missing` ones had to be replayed,
    and their experts are not journaled: the learner's router chose. `differing` counts nodes that have other experts in
    another row: those of one row were replayed. `agreement` is the share of replayed experts that the learner's router
    would choose too. `balance` is the balance loss without its weight, K at best. `load_max` and `load_mean` are the
    load of the busiest expert of a layer by the mean of its experts: in the worst layer, and on average over layers.
    `unused` is the share of experts that got no token (none is ever dropped)."""

    replayed: int
    missing: int
    differing: int
    agreement: float | None
    balance: float
    load_max: float
    load_mean: float
    unused: float


def check(train: Train, policies: Sequence[PolicyModel], *, routed: bool) -> None:
    """Raises ModelError if the engine's experts are to be replayed by a model that cannot, which would show nowhere, or
    if a model has no load that could be evened. `routed`: experts are journaled."""
    for model in policies:
        if model.routers is None and routed:
            hint = "it is no mixture whose experts can be replayed: set engine.routed_experts = false"
            raise ModelError(f"the model in {str(model.folder)!r}: {hint}")
        if train.balance_weight and not (model.routers and model.routers.probable):
            hint = "it has no routers that choose by a softmax over all experts: set train.balance_weight = 0"
            raise ModelError(f"the model in {str(model.folder)!r}: {hint}")


def routed(of: RouterRecord) -> Routed:
    """The routers' outputs in a pass, without gradients."""
    load_ME, mass_ME = (
        torch.stack([by_mixture[mixture].detach() for mixture in sorted(by_mixture)])
        for by_mixture in (of.load, of.mass)
    )
    return Routed(load_ME=load_ME, mass_ME=mass_ME, agreed=of.agreed, replayed=of.replayed)


def prepared(packs: Sequence[Pack], routers_of: RoutersOf, routed_experts: bool | Literal["required"]) -> list[Pack]:
    """The passes with routes that their policies can replay; without any where these are no mixtures. Raises RunFailed
    for a token that is not journaled if every one has to be replayed."""
    ready: list[Pack] = []
    for pack in packs:
        routers, routes = routers_of(pack), pack.routes
        if routers is None or routes is None:
            ready.append(replace(pack, routes=None))
        elif not routed_experts:
            ready.append(replace(pack, routes=replace(routes, chosen_NLK=None, differing=0)))
        else:
            ready.append(replace(pack, routes=fitted(routes, routers.shape)))
    needed = sum(int(pack.routes.rows_N.sum()) for pack in ready if pack.routes)
    lacking = sum(int(routes.rows_N[~known(routes)].sum()) for pack in ready if (routes := pack.routes))
    # Before anything of the step is computed: half a step trained with other experts could not be taken back.
    if routed_experts == "required" and lacking:
        raise RunFailed(
            f"engine.routed_experts = 'required', and {lacking} of {needed} tokens have no journaled experts that the "
            "model has: none of them was trained; go on with --set engine.routed_experts=true"
        )
    return ready


def pulled(
    part: Sequence[Pack], routers_of: RoutersOf, weight: float, heard_in: Callable[[Sequence[Pack]], Sequence[Routed]]
) -> list[Pack]:
    """The passes of an update with their shares of the balance loss, which each policy has for itself. Which experts
    compute a token is known beforehand where all are replayed; else it is `heard_in` a pass ahead."""
    places = {pack.policy: [place for place, other in enumerate(part) if other.policy == pack.policy] for pack in part}
    updated = list(part)
    for of_policy in places.values() if weight else ():
        routed = [
            (place, routers, routes)
            for place in of_policy
            if (routers := routers_of(part[place])) and (routes := part[place].routes)
        ]
        loads = {place: load(routes, routers.shape) for place, routers, routes in routed if _all_known(routes)}
        unheard = [place for place, *_ in routed if place not in loads]
        if unheard:
            loads |= {
                place: replay.load_ME
                for place, replay in zip(unheard, heard_in([part[place] for place in unheard]), strict=True)
            }
        for place, routers, routes in routed:
            load_ME = torch.stack([counts.to(routes.rows_N.device) for counts in loads.values()]).sum(0)
            tokens = sum(int(routes.rows_N.sum()) for *_, routes in routed)
            # Over tokens of the whole update, of all passes and ranks: f and P are both divided by T, hence the
            # square. In float64 up to here, since T is millions.
            scale = weight * routers.shape.experts / len(load_ME) / tokens**2
            updated[place] = replace(part[place], routes=replace(routes, pull_ME=(scale * load_ME).float()))
    return updated


def summary(packs: Sequence[Pack], passes: Sequence[Routed | None], *, replays: bool) -> RoutingSummary | None:
    """Summarise some passes and their routers' choices; None if there was no mixture. No token counts as missing if
    replay is off and none has experts."""
    mixed = [(pack, pack.routes, seen) for pack, seen in zip(packs, passes, strict=True) if pack.routes and seen]
    if not mixed:
        return None
    ratios: list[Tensor] = []  # the load of experts by the mean of their layer
    balances: list[Tensor] = []
    for policy in dict.fromkeys(pack.policy for pack, *_ in mixed):
        of_policy = [(routes, seen) for pack, routes, seen in mixed if pack.policy == policy]
        load_ME, mass_ME = (
            sum(seen.load_ME for _, seen in of_policy),
            sum(seen.mass_ME.double() for _, seen in of_policy),
        )
        assert isinstance(load_ME, Tensor) and isinstance(mass_ME, Tensor)
        tokens, experts = sum(int(routes.rows_N.sum()) for routes, _ in of_policy), load_ME.shape[1]
        ratios += (load_ME / load_ME.mean(1, keepdim=True).clamp(min=1)).unbind()
        balances += (experts * (load_ME * mass_ME).sum(1) / max(tokens, 1) ** 2).unbind()
    replayed = sum(int(routes.rows_N[known(routes)].sum()) for _, routes, _ in mixed)
    needed = sum(int(routes.rows_N.sum()) for _, routes, _ in mixed)
    compared = sum(float(seen.replayed) for *_, seen in mixed)
    return RoutingSummary(
        replayed=replayed,
        missing=needed - replayed if replays or replayed else 0,
        differing=sum(routes.differing for _, routes, _ in mixed),
        agreement=sum(float(seen.agreed) for *_, seen in mixed) / compared if compared else None,
        balance=float(torch.stack(balances).mean()),
        load_max=max(float(ratio_E.max()) for ratio_E in ratios),
        load_mean=sum(float(ratio_E.max()) for ratio_E in ratios) / len(ratios),
        unused=sum(int((ratio_E == 0).sum()) for ratio_E in ratios) / sum(map(len, ratios)),
    )


def _all_known(routes: Routes) -> bool:
    return bool((known(routes) | (routes.rows_N == 0)).all())
