"""The work of one rank in a step: passes forward and backward, and the update of its weights.

Every rank has a `RankWorker`, rank 0 too. Rank 0 sends the same order to all (`agentrl.learner.rank_orders`), so that
they meet in collectives. Never knows groups, advantages, or what the other ranks compute.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from agentrl.algos.algorithm import Loss, Outputs
from agentrl.config.roles import LearnerSettings
from agentrl.errors import ConfigError
from agentrl.learner.data.device_copy import moved
from agentrl.learner.data.prefix_trees import Pack
from agentrl.learner.model.models import ModelPasses, Models
from agentrl.learner.moe.routers import Routers, listening
from agentrl.learner.moe.routing_replay import Routed, check, routed
from agentrl.learner.optimizers.lr_schedule import lr_share
from agentrl.learner.parallel.pass_schedule import Pass
from agentrl.learner.parallel.ranks import ALONE, Ranks
from agentrl.learner.step_report import PassResult, Stopwatch, pass_result

T = TypeVar("T")

PassHook = Callable[[Pack, Mapping[str, Tensor], Outputs], None]
"""Called in each pass between forward and backward: the pass, the columns of its tokens, the models' outputs."""


OwnLoss = Callable[[Mapping[str, Tensor], Outputs], Tensor]
"""The loss of one pass, a scalar, from the columns of its tokens and the models' outputs; those of all passes add
up."""


class RankWorker:
    """The models and optimizers of one rank. Invariants: `step_index` steps are in the weights; between orders of
    different steps the models' gradients are empty. `on_pass`, if set, is called in each pass, and must change nothing;
    `own_loss`, if set, takes the place of the algorithms' losses. `watch` measures the parts of a step."""

    def __init__(
        self,
        settings: LearnerSettings,
        model_dir: Path,
        device: torch.device | str,
        *,
        reference_dir: Path | None = None,
        folder_of: Callable[[str], Path] = Path,
        progress: Callable[[], None] = lambda: None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Load the models. The arguments are those of `Learner`. Raises ModelError."""
        self.settings, self.progress, self.ranks = settings, progress, ranks
        torch.set_num_threads(settings.train.threads)
        # The same on every rank, so that adapters and heads, which are whole everywhere, begin alike.
        torch.manual_seed(settings.seed)
        self.models = Models(settings, model_dir, device, reference_dir=reference_dir, folder_of=folder_of, ranks=ranks)
        check(settings.train, self.models.policies(), routed=settings.routed_experts is not False)
        self.model, self.passes = self.models.policy, ModelPasses(self.models)
        self.step_index = 0
        self.watch = Stopwatch()
        self.on_pass: PassHook | None = None
        self.own_loss: OwnLoss | None = None

    def module_of(self, pack: Pack) -> Any:
        """The module of a pass's policy."""
        return self.models.of(pack.policy).module

    def routers_of(self, pack: Pack) -> Routers | None:
        """The routers of a pass's policy; None if it is no mixture of experts."""
        return self.models.of(pack.policy).routers

    def _on_device(self, one: Pass) -> Pack:
        pack_without_branches = replace(one.pack, branches=())  # a layout reads these on the host
        return replace(moved(pack_without_branches, self.model.device), branches=one.pack.branches)

    def _sent(self, results: T) -> T:
        """Move results to the CPU for sending. With a single rank, leave them on the device."""
        return results if self.ranks.size == 1 else moved(results, "cpu")

    def _passes(self, share: Sequence[Pass], part: str) -> Iterator[tuple[Pass, Pack]]:
        """The passes on this rank's device, grouped by shared prompt; the prompt's own backward pass comes after its
        group. The time goes to `part` of the step."""
        for _, prompt_passes in groupby(share, lambda scheduled: (scheduled.pack.policy, scheduled.pack.stem)):
            with self.passes.stem():
                yield from ((scheduled, self._on_device(scheduled)) for scheduled in prompt_passes)
            self.watch.lap(part)
            self.progress()

    def forward(self, share: Sequence[Pass]) -> list[dict[str, Tensor]]:
        """Forward without gradients: the columns of each pass under the current weights."""
        pass_columns: list[dict[str, Tensor]] = []
        for _, device_pack in self._passes(share, "proximal"):
            self.progress()
            pass_columns.append(self.passes.columns(device_pack))
        return moved(pass_columns, "cpu")

    @torch.no_grad()
    def forward_routing(self, share: Sequence[Pass]) -> list[Routed]:
        """Forward without gradients: the routers' choices in each pass under the current weights."""
        routed_passes: list[Routed] = []
        for _, device_pack in self._passes(share, "forward"):
            with listening(self.routers_of(device_pack)) as router_record:
                self.passes.forward(device_pack, trained=())
            assert router_record is not None, "only passes of mixtures"
            routed_passes.append(routed(router_record))
            self.progress()
        return moved(routed_passes, "cpu")

    def forward_backward(self, share: Sequence[Pass]) -> list[PassResult]:
        """Forward and backward; accumulate gradients."""
        pass_results: list[PassResult] = []
        for scheduled, device_pack in self._passes(share, "backward"):
            # With the proximal log-probs computed ahead, those of the reference came with them.
            other_columns = {} if "proximal" in device_pack.columns else self.passes.others(device_pack)
            trained_names = device_pack.algo.trained(self.step_index)
            with listening(self.routers_of(device_pack)) as router_record:
                outputs = self.passes.forward(device_pack, trained=trained_names)
            token_columns = {"proximal": outputs.logprobs_K.detach(), **device_pack.columns, **other_columns}
            if self.on_pass is not None:
                self.on_pass(device_pack, token_columns, outputs)
            if self.own_loss is None:
                pass_loss = device_pack.algo.loss(token_columns, outputs, self.step_index)
            else:
                pass_loss = _own(self.own_loss, token_columns, outputs)
            if (
                router_record is not None
                and device_pack.routes
                and device_pack.routes.pull_ME is not None
                and "policy" in trained_names
            ):
                pass_loss = replace(pass_loss, total=pass_loss.total + router_record.pulled(device_pack.routes.pull_ME))
            pass_results.append(pass_result(token_columns, outputs, pass_loss, router_record))
            self.watch.lap("forward")
            self.progress()
            # The loss is a sum over passes, and gradients are one over ranks: who shares a pass has a part of its loss.
            (pass_loss.total * (1 / self.ranks.team if scheduled.counts else 0)).backward()
            self.watch.lap("backward")
            self.progress()
        return self._sent(pass_results)

    def optimizer_step(self, names: Sequence[str], loss: Tensor) -> float | None:
        """Update the named models from the gradients accumulated for `loss`: see `Models.optimizer_step`."""
        gradient_norm = self.models.optimizer_step(
            names, loss=loss, lr_share=lr_share(self.settings.train, self.step_index + 1)
        )
        self.watch.lap("optimizer")
        self.progress()
        return gradient_norm

    def take_settings(self, settings: LearnerSettings) -> None:
        """Go on with other rates and bounds."""
        self.settings = settings
        self.models.retune(settings)

    def end_step(self) -> None:
        """Count the step and let moving models follow."""
        self.step_index += 1
        self.models.follow(self.step_index)


def _own(function: OwnLoss, tokens: Mapping[str, Tensor], outputs: Outputs) -> Loss:
    """Call a user's loss function. Raises ConfigError unless it returns a scalar with a gradient."""
    total_loss = cast("object", function(tokens, outputs))
    if not isinstance(total_loss, Tensor) or total_loss.ndim or not total_loss.requires_grad:
        result_kind = (
            f"a tensor of shape {tuple(total_loss.shape)}"
            if isinstance(total_loss, Tensor)
            else type(total_loss).__name__
        )
        raise ConfigError("loss", result_kind, "give a scalar tensor that depends on outputs.logprobs_K, such as a sum")
    return Loss(total=total_loss, clipped_K=torch.zeros_like(outputs.logprobs_K, dtype=torch.bool))
