"""The routers of a mixture in the learner: which experts compute a token, and how evenly all are used.

Owns what happens where a router has judged a token and takes the best experts. Never knows where routes come from.

Replay (Ma et al., 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers"): a token
is computed with the experts that the engine computed it with, weighted by what the current router says of them, and
normalised as the model does, so that gradients reach the router. Only the choice is replayed: inside a router, a `topk`
answers with the chosen experts in the place of the best ones.

Balance (Fedus et al., 2021, "Switch Transformers", equations 4 to 6; as transformers' load_balancing_loss_func, with
which Qwen3-MoE was trained, a token counts for each of its K experts), over all tokens of an update as in Qiu et al.,
2025, "Demons in the Detail":

    loss = weight · mean over mixtures of  E · Σ_e f_e P_e
    f_e = 1/T Σ_t [t is computed with e]        P_e = 1/T Σ_t p_t(e)

It is K where all experts are used alike. A node of a prefix tree counts once for each row whose loss depends on it: so
T is that of the rows, however they are divided into passes and ranks. f has no gradient, so with f of the whole update
at hand the loss of a pass is a sum over its tokens, and losses of passes add up.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.host.user_warnings import warn
from agentrl.learner.moe.expert_records import ExpertShape, Routes, known, used
from agentrl.learner.parallel.layers import added_up

_ROUTERS = ("gate", "router")  # what transformers calls the part that chooses, beside one called `experts`
_TOPK = (torch.topk, Tensor.topk)
_ROUNDING = 1e-3
_eager: Any = torch.compiler.disable  # routes are other objects in every pass


@dataclass(slots=True)
class RouterRecord:
    """The routers' choices in a pass, by mixture [E] each: `load` counts the tokens of rows that each expert got,
    `mass` adds up the probabilities of the router, with gradients. `agreed` counts the replayed experts of tokens of
    rows that the router would have chosen too, of `replayed` ones."""

    load: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    mass: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    agreed: Tensor | float = 0.0
    replayed: Tensor | float = 0.0

    @torch.no_grad()
    def add(self, at: int, index_TK: Tensor, best_TK: Tensor, experts: int, routes: Routes) -> None:
        """Count the choices of the router of mixture number `at` for some tokens."""
        load_E = used(index_TK, routes.rows_N, experts)
        self.load[at] = self.load[at] + load_E if at in self.load else load_E
        if routes.chosen_NLK is not None:
            rows_T = routes.rows_N * known(routes)
            same_TK = (index_TK[:, :, None] == best_TK[:, None, :]).any(-1)
            self.agreed += (same_TK * rows_T[:, None]).sum()
            self.replayed += rows_T.sum() * index_TK.shape[1]

    def join(self, group: Any) -> None:
        """Add up the records of the ranks of a group, each of some of the tokens of a pass."""
        mass_ME = added_up(torch.stack(list(self.mass.values())), group, "probabilities of experts")
        load_ME = torch.stack(list(self.load.values()))
        replay_counts = torch.stack(
            [load_ME.new_tensor(float(replay_count)) for replay_count in (self.agreed, self.replayed)]
        )
        joined_counts = added_up(torch.cat([load_ME.flatten(), replay_counts]), group, "loads of experts")
        self.mass = dict(zip(self.mass, mass_ME.unbind(), strict=True))
        self.load = dict(zip(self.load, joined_counts[:-2].view_as(load_ME).unbind(), strict=True))
        self.agreed, self.replayed = joined_counts[-2:].unbind()

    def begin(self, stem: RouterRecord, rows: Tensor) -> None:
        """Add the record of the pass's stem, in which each token counts once, for the `rows` rows that have it."""
        for mixture, mass_E in stem.mass.items():
            self.mass[mixture] = self.mass[mixture] + rows * mass_E
            self.load[mixture] = self.load[mixture] + rows * stem.load[mixture]
        self.agreed, self.replayed = self.agreed + rows * stem.agreed, self.replayed + rows * stem.replayed

    def pulled(self, pull_ME: Tensor) -> Tensor:
        """The balance loss of the pass."""
        return sum((pull_E * self.mass[mixture]).sum() for mixture, pull_E in enumerate(pull_ME.unbind()))  # pyright: ignore


def routers(module: nn.Module, run: Callable[[Routes], object], tokens: int) -> Routers | None:
    """The routers of a mixture, hooked; None of another model, and of one whose choice cannot be replayed, with a
    warning. `run` makes a pass over so many tokens with routes, so that the hooks can be tried."""
    if not any(map(_mixtures, _layers(module))):
        return None
    model_routers = Routers(module)
    if obstacle := model_routers.hook(run, tokens):
        warn(f"the experts of {type(module).__name__} cannot be replayed: {obstacle}")
        return None
    return model_routers


@contextmanager
def listening(of: Routers | None) -> Generator[RouterRecord | None]:
    """Inside, what these routers say of tokens with routes is heard; not what a backward pass computes again."""
    with nullcontext() if of is None else of.listening() as router_record:
        yield router_record


class Routers:
    """The routers of a mixture, whose `shape` is known once they are hooked, and whether they are `probable`: each
    chooses by a softmax over all experts, as the balance loss needs."""

    def __init__(self, module: nn.Module) -> None:
        self._routes: Routes | None = None
        self._heard: RouterRecord | None = None
        self._gates: list[tuple[int, nn.Module]] = []
        self._layers = _layers(module)
        for layer_index, decoder_layer in enumerate(self._layers):
            for mixture_block in _mixtures(decoder_layer):
                if router_module := next(
                    (
                        child_module
                        for child_name, child_module in mixture_block.named_children()
                        if child_name in _ROUTERS
                    ),
                    None,
                ):
                    self._gates.append((layer_index, router_module))
        mixture_layers = tuple(layer_index for layer_index, _ in self._gates)
        self.shape = ExpertShape(layers=len(self._layers), mixed=mixture_layers, experts=0, per_token=0)
        self.probable = False

    def hook(self, run: Callable[[Routes], object], tokens: int) -> str | None:
        """Put the hooks in, and try them. Returns why they do not work, if so: then no pass may have routes."""
        if len(self._gates) != sum(bool(_mixtures(decoder_layer)) for decoder_layer in self._layers):
            return "a layer has experts, and no router beside them"
        for decoder_layer in self._layers:
            decoder_layer.register_forward_pre_hook(_eager(self._enter), with_kwargs=True)
        for mixture, (layer_index, router_module) in enumerate(self._gates):
            forward = partial(self._forward, mixture, layer_index, router_module.forward)
            setattr(router_module, "forward", _eager(forward))  # noqa: B010
        rows_T = torch.ones(tokens, dtype=torch.int32, device=next(self._layers[0].parameters()).device)
        with self.listening() as router_record:
            try:
                run(Routes(chosen_NLK=None, rows_N=rows_T))
            except TypeError as argument_error:  # it takes no further arguments
                return next(iter(str(argument_error).splitlines()), "TypeError")
        # Tried, and not looked up in the configuration: the number of `topk` calls and what they are over show
        # whether a replay would do what it says.
        expert_sizes = {(len(load_E), int(load_E.sum()) // tokens) for load_E in router_record.load.values()}
        if len(router_record.load) != len(self._gates) or len(expert_sizes) != 1:
            return f"{type(self._gates[0][1]).__name__} does not choose experts by one topk"
        ((expert_count, per_token),) = expert_sizes
        self.shape = replace(self.shape, experts=expert_count, per_token=per_token)
        self.probable = all(abs(float(mass_E.sum()) / tokens - 1) < _ROUNDING for mass_E in router_record.mass.values())
        return None

    def _enter(self, _: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A layer begins, in a pass or once more for its gradients. Transformers hands the argument `routes` on to it,
        as it does all that a model does not know."""
        # At each layer, and not once a pass: gradient checkpointing runs a layer again later, when another pass may
        # have begun.
        self._routes = kwargs.get("routes")
        # Taken out here: the attention below refuses arguments that it does not know.
        return args, {
            argument_name: argument for argument_name, argument in kwargs.items() if argument_name != "routes"
        }

    def _forward(self, at: int, layer: int, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        pass_routes = self._routes
        if pass_routes is None:
            return forward(*inputs, **named)
        chosen_NLK = pass_routes.chosen_NLK
        with _Choosing(None if chosen_NLK is None else chosen_NLK[:, layer].long()) as expert_choice:
            router_output = forward(*inputs, **named)
        if len(expert_choice.seen) == 1:
            scores_TE, index_TK, best_TK = expert_choice.seen[0]
            with nullcontext() if pass_routes.pull_ME is not None else torch.no_grad():
                # Outside of "is anybody listening": a backward pass that computes the layer again must build the same
                # graph, or its saved tensors do not match.
                mass_E = (pass_routes.rows_N[:, None] * scores_TE.float()).sum(0)
            if self._heard is not None:
                self._heard.mass[at] = self._heard.mass[at] + mass_E if at in self._heard.mass else mass_E
                self._heard.add(at, index_TK, best_TK, len(mass_E), pass_routes)
        return router_output

    @contextmanager
    def listening(self) -> Generator[RouterRecord]:
        """See `listening`. A recording inside another one is not part of the outer one."""
        outer_record, self._heard = self._heard, (inner_record := RouterRecord())
        try:
            yield inner_record
        finally:
            self._heard, self._routes = outer_record, None

    def join(self, group: Any) -> None:
        """Add up the records after a pass whose tokens the ranks of a group shared: each has that of all tokens
        then."""
        if group is not None and self._heard is not None and self._heard.load:
            self._heard.join(group)

    def begin(self, stem: RouterRecord, rows: Tensor) -> None:
        """Add a stem's record after a pass that began with it: see `RouterRecord.begin`."""
        if self._heard is not None:
            self._heard.begin(stem, rows)


def _layers(module: nn.Module) -> list[nn.Module]:
    return [submodule for submodule in module.modules() if isinstance(submodule, GradientCheckpointingLayer)]


def _mixtures(layer: nn.Module) -> list[nn.Module]:
    """The parts of a layer that have experts."""
    return [submodule for submodule in layer.modules() if "experts" in dict(submodule.named_children())]


class _Choosing(TorchFunctionMode):
    """Inside, `topk` over rows takes the numbers chosen for them [T, K], where these are not negative. `seen` has, of
    each, what it was over [T, E], the numbers that it took, and the best ones."""

    def __init__(self, chosen_TK: Tensor | None) -> None:
        super().__init__()
        self._chosen_TK = chosen_TK
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function_result = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return function_result
        scores_TE: Tensor = args[0]
        index_TK = best_TK = cast(Tensor, function_result.indices)
        if self._chosen_TK is not None:
            index_TK = torch.where(self._chosen_TK < 0, best_TK, self._chosen_TK)
            # The current scores of the replayed experts: the weight of each is the learner's own, so that gradients
            # reach the router; only the choice is the engine's.
            function_result = torch.return_types.topk((scores_TE.gather(-1, index_TK), index_TK))
        self.seen.append((scores_TE, index_TK, best_TK))
        return function_result
