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
    for policy_model in policies:
        if policy_model.routers is None and routed:
            correction = "it is no mixture whose experts can be replayed: set engine.routed_experts = false"
            raise ModelError(f"the model in {str(policy_model.folder)!r}: {correction}")
        if train.balance_weight and not (policy_model.routers and policy_model.routers.probable):
            correction = "it has no routers that choose by a softmax over all experts: set train.balance_weight = 0"
            raise ModelError(f"the model in {str(policy_model.folder)!r}: {correction}")


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
    prepared_packs: list[Pack] = []
    for pack in packs:
        policy_routers, routes = routers_of(pack), pack.routes
        if policy_routers is None or routes is None:
            prepared_packs.append(replace(pack, routes=None))
        elif not routed_experts:
            prepared_packs.append(replace(pack, routes=replace(routes, chosen_NLK=None, differing=0)))
        else:
            prepared_packs.append(replace(pack, routes=fitted(routes, policy_routers.shape)))
    needed_count = sum(int(pack.routes.rows_N.sum()) for pack in prepared_packs if pack.routes)
    lacking_count = sum(int(routes.rows_N[~known(routes)].sum()) for pack in prepared_packs if (routes := pack.routes))
    # Before anything of the step is computed: half a step trained with other experts could not be taken back.
    if routed_experts == "required" and lacking_count:
        raise RunFailed(
            f"engine.routed_experts = 'required', and {lacking_count} of {needed_count} tokens have no journaled "
            "experts that the model has: none of them was trained; go on with --set engine.routed_experts=true"
        )
    return prepared_packs


def pulled(
    part: Sequence[Pack], routers_of: RoutersOf, weight: float, heard_in: Callable[[Sequence[Pack]], Sequence[Routed]]
) -> list[Pack]:
    """The passes of an update, each with the weights `pull_ME` of its balance loss for M mixtures of E experts: a pass
    multiplies them by the probabilities that its routers give the experts. They come from the experts' loads in the
    whole update, of each policy by itself. Where all tokens are replayed the load is known beforehand; else `heard_in`
    runs those passes once ahead to hear it."""
    places_by_policy = {
        pack.policy: [pack_index for pack_index, other in enumerate(part) if other.policy == pack.policy]
        for pack in part
    }
    updated_packs = list(part)
    for policy_places in places_by_policy.values() if weight else ():
        routed_packs = [
            (pack_index, routers, routes)
            for pack_index in policy_places
            if (routers := routers_of(part[pack_index])) and (routes := part[pack_index].routes)
        ]
        known_loads = {
            pack_index: load(routes, routers.shape)
            for pack_index, routers, routes in routed_packs
            if _all_known(routes)
        }
        unheard_places = [pack_index for pack_index, *_ in routed_packs if pack_index not in known_loads]
        if unheard_places:
            known_loads |= {
                pack_index: routed_pass.load_ME
                for pack_index, routed_pass in zip(
                    unheard_places, heard_in([part[pack_index] for pack_index in unheard_places]), strict=True
                )
            }
        for pack_index, routers, routes in routed_packs:
            load_ME = torch.stack([counts_ME.to(routes.rows_N.device) for counts_ME in known_loads.values()]).sum(0)
            token_count = sum(int(routes.rows_N.sum()) for *_, routes in routed_packs)
            # Over tokens of the whole update, of all passes and ranks: f and P are both divided by T, hence the
            # square. In float64 up to here, since T is millions.
            balance_scale = weight * routers.shape.experts / len(load_ME) / token_count**2
            updated_packs[pack_index] = replace(
                part[pack_index], routes=replace(routes, pull_ME=(balance_scale * load_ME).float())
            )
    return updated_packs


def summary(packs: Sequence[Pack], passes: Sequence[Routed | None], *, replays: bool) -> RoutingSummary | None:
    """Summarise some passes and their routers' choices; None if there was no mixture. No token counts as missing if
    replay is off and none has experts."""
    mixed_passes = [
        (pack, pack.routes, routed_pass)
        for pack, routed_pass in zip(packs, passes, strict=True)
        if pack.routes and routed_pass
    ]
    if not mixed_passes:
        return None
    load_ratios: list[Tensor] = []  # the load of experts by the mean of their layer
    balances: list[Tensor] = []
    for policy in dict.fromkeys(pack.policy for pack, *_ in mixed_passes):
        policy_passes = [(routes, routed_pass) for pack, routes, routed_pass in mixed_passes if pack.policy == policy]
        load_ME, mass_ME = (
            sum(routed_pass.load_ME for _, routed_pass in policy_passes),
            sum(routed_pass.mass_ME.double() for _, routed_pass in policy_passes),
        )
        assert isinstance(load_ME, Tensor) and isinstance(mass_ME, Tensor)
        token_count = sum(int(routes.rows_N.sum()) for routes, _ in policy_passes)
        expert_count = load_ME.shape[1]
        load_ratios += (load_ME / load_ME.mean(1, keepdim=True).clamp(min=1)).unbind()
        balances += (expert_count * (load_ME * mass_ME).sum(1) / max(token_count, 1) ** 2).unbind()
    replayed_count = sum(int(routes.rows_N[known(routes)].sum()) for _, routes, _ in mixed_passes)
    needed_count = sum(int(routes.rows_N.sum()) for _, routes, _ in mixed_passes)
    compared_count = sum(float(routed_pass.replayed) for *_, routed_pass in mixed_passes)
    return RoutingSummary(
        replayed=replayed_count,
        missing=needed_count - replayed_count if replays or replayed_count else 0,
        differing=sum(routes.differing for _, routes, _ in mixed_passes),
        agreement=sum(float(routed_pass.agreed) for *_, routed_pass in mixed_passes) / compared_count
        if compared_count
        else None,
        balance=float(torch.stack(balances).mean()),
        load_max=max(float(ratio_E.max()) for ratio_E in load_ratios),
        load_mean=sum(float(ratio_E.max()) for ratio_E in load_ratios) / len(load_ratios),
        unused=sum(int((ratio_E == 0).sum()) for ratio_E in load_ratios) / sum(map(len, load_ratios)),
    )


def _all_known(routes: Routes) -> bool:
    return bool((known(routes) | (routes.rows_N == 0)).all())
