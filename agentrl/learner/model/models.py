"""The models of a learner by name: the policy, and the frozen ones, the moving ones and the critic that its algorithms
ask for. If roles have adapters of their own, each is a policy over the same weights, with an optimizer of its own. A
role with a model of its own is a policy with other weights: the frozen and moving models of its passes are its own too.

Owns them, their optimizers, and what a checkpoint keeps of those besides the policy. Never knows a loss.

A critic is a linear head on a language model's last layer, before each scored token; it owns the trunk if that is its
own. A model that follows the policy is a copy of the trained parameters, as they were or on average, and no second
model: a pass under it runs through the policy, which has the copy in the place of its own meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from agentrl.algos.algorithm import Follows, Outputs
from agentrl.config import Train, algorithms
from agentrl.config.roles import LearnerSettings
from agentrl.errors import ModelError
from agentrl.learner.checkpoints.checkpoint import CRITIC, CheckpointPart
from agentrl.learner.data.prefix_trees import Pack
from agentrl.learner.data.shared_prompt import Roots
from agentrl.learner.model import lora
from agentrl.learner.model.policy import PolicyModel
from agentrl.learner.optimizers import master_weights as masters
from agentrl.learner.optimizers import optimizers
from agentrl.learner.optimizers.master_weights import master
from agentrl.learner.optimizers.parameter_roles import roles_of
from agentrl.learner.parallel.fsdp import clipped, fill, is_sharded, local, reshard
from agentrl.learner.parallel.ranks import ALONE, Ranks

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)


class Critic:
    """Values of a pack's tokens. A trunk of its own begins as the policy does; a shared one is the policy, and learns
    from both losses. The head begins at 0, so that a new critic says 0 of everything."""

    file = "critic.safetensors"

    def __init__(self, trunk: PolicyModel, *, own: bool) -> None:
        """If it is its `own`, `trunk` needs no output layer."""
        self._trunk, self.own = trunk, own
        self.head = nn.Linear(trunk.module.config.get_text_config().hidden_size, 1, device=trunk.device)
        # At 0 a new critic changes nothing: advantages begin as those without one. A random head would push the
        # policy around for as long as it takes to learn.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def trunk(self) -> PolicyModel:
        """The model below the head: the critic's own, or the policy."""
        return self._trunk

    def values(self, pack: Pack, hidden_PH: Tensor, roots: Roots | None = None) -> Tensor:
        """The value [K] of the text before each scored token. `hidden_PH` is the input of the policy's output layer, of
        those that this rank has; a trunk of its own runs a pass here, after the `roots` that it made."""
        hidden_PH = self._trunk.hidden(pack, roots) if self.own else hidden_PH
        values_P = self._trunk.joined(pack, self.head(hidden_PH.float())[:, 0], "values")
        return values_P[pack.predictor_K]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that only the critic trains."""
        return [*(self._trunk.parameters() if self.own else ()), *self.head.parameters()]

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read its `tensors` from the file in `folder`. Raises ModelError if it is not there or of another shape."""
        try:
            file_tensors = load_file(folder / self.file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"no critic in {str(folder)!r} ({error}): was another algo.kind trained?") from error
        own_tensors = self.tensors()
        different = own_tensors.keys() ^ file_tensors.keys() or {
            name for name in own_tensors if own_tensors[name].shape != file_tensors[name].shape
        }
        if different:
            raise ModelError(
                f"the critic in {str(folder)!r} is another one: {sorted(different)[0]} (algo.critic, train.lora_rank)"
            )
        for name, own_tensor in own_tensors.items():
            fill(own_tensor, file_tensors[name])

    def tensors(self) -> dict[str, Tensor]:
        """The parameters that only the critic trains by name, not copied."""
        trunk_parameters = self._trunk.module.named_parameters() if self.own else ()
        trunk_tensors = {
            f"trunk.{parameter_name}": parameter
            for parameter_name, parameter in trunk_parameters
            if parameter.requires_grad
        }
        return {
            **trunk_tensors,
            **{f"head.{parameter_name}": parameter for parameter_name, parameter in self.head.named_parameters()},
        }


class Follower:
    """Begins as the policy is. The average of an adapter is that of its matrices A and B, each by itself."""

    file = "follower.safetensors"

    def __init__(self, policy: Any, follows: Follows) -> None:
        """`policy` is the module that learns."""
        self._follows = follows
        self._leaders: dict[str, nn.Parameter] = {
            parameter_name: parameter
            for parameter_name, parameter in policy.named_parameters()
            if parameter.requires_grad
        }
        # From masters, in float32: the average of bfloat16 numbers moves only when a step is larger than their grid,
        # and a decay of 0.999 would never see one (`test_an_average_follows_weights_in_bfloat16`).
        self._tensors: dict[str, Tensor] = {
            parameter_name: master(parameter).detach().float().clone()
            for parameter_name, parameter in self._leaders.items()
        }

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Inside, the policy computes with this model's parameters. No backward pass may cross its ends."""
        narrow_numbers = {
            parameter_name: parameter.data
            for parameter_name, parameter in self._leaders.items()
            if parameter.dtype != torch.float32
        }
        self._exchange(narrow_numbers)
        for parameter_name in narrow_numbers:
            policy_parameter = self._leaders[parameter_name]
            policy_parameter.data = self._tensors[parameter_name].to(policy_parameter.device, policy_parameter.dtype)
        try:
            yield
        finally:
            self._exchange(narrow_numbers)
            for parameter_name, policy_numbers in narrow_numbers.items():
                self._leaders[parameter_name].data = policy_numbers

    @torch.no_grad()
    def _exchange(self, but: Collection[str]) -> None:
        """The policy gets this model's parameters, and this model the policy's, `but` for some. FSDP reads shards where
        they are."""
        for parameter_name, policy_parameter in self._leaders.items():
            follower_tensor = self._tensors[parameter_name]
            if parameter_name in but:
                continue
            if is_sharded(policy_parameter):
                policy_shard, follower_shard = local(policy_parameter), local(follower_tensor)
                policy_copy = policy_shard.clone()
                # FSDP keeps the address of the shard: there the numbers have to move.
                policy_shard.copy_(follower_shard)
                follower_shard.copy_(policy_copy)
            else:
                # The two change places, and nothing is copied: a pass under the reference costs a pass, and no memory
                # beside the copy that it is anyway.
                self._tensors[parameter_name], policy_parameter.data = policy_parameter.data, follower_tensor

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Follow the policy after step number `step` (from 1)."""
        if step % self._follows.every:
            return
        for parameter_name, follower_tensor in self._tensors.items():
            policy_master = master(self._leaders[parameter_name]).detach()
            if self._follows.decay:
                follower_tensor.lerp_(policy_master.float(), 1 - self._follows.decay)
            else:
                follower_tensor.copy_(policy_master)

    def tensors(self) -> dict[str, Tensor]:
        """Its parameters by name, not copied."""
        return dict(self._tensors)

    def load(self, folder: Path) -> None:
        """Read its `tensors` from the file in `folder`. Raises ModelError if it is not there or of another shape."""
        try:
            file_tensors = load_file(folder / self.file)
        except (OSError, SafetensorError) as error:
            possible_cause = f"the run that wrote it had no number as algo.{folder.name.partition('.')[0]}"
            raise ModelError(f"no moving model in {str(folder)!r} ({error}): perhaps {possible_cause}") from error
        own_tensors = self._tensors
        different = own_tensors.keys() ^ file_tensors.keys() or {
            name for name in own_tensors if own_tensors[name].shape != file_tensors[name].shape
        }
        if different:
            raise ModelError(f"the model in {str(folder)!r} is another one: {sorted(different)[0]} (train.lora_rank)")
        for name, own_tensor in own_tensors.items():
            fill(own_tensor, file_tensors[name])


REFERENCE = "reference"


def policy_of(role: str | None) -> str:
    """The name of the policy that is a role's own, or of the one of all other roles."""
    return _named("policy", role)


def _named(name: str, role: str | None) -> str:
    """The name of a model that is a role's own, or of the one of all other roles."""
    return name if role is None else f"{name}.{role}"


class Models:
    """`policy` is the model that engines get, `own` has those of roles with a model of their own, by role. `optimizers`
    has one for each model that is trained: `policy`, that of each role with its own adapter or model (`policy_of`), and
    `critic` if there is one."""

    def __init__(
        self,
        settings: LearnerSettings,
        model_dir: Path,
        device: torch.device | str,
        *,
        reference_dir: Path | None,
        folder_of: Callable[[str], Path] = Path,
        ranks: Ranks = ALONE,
    ) -> None:
        """Load the models. With several `ranks`, each has a shard of every model. Raises ModelError for a folder that
        cannot be used."""
        train_settings, critic_slots = settings.train, algorithms.slots(settings.algorithms)
        self.settings, self._ranks = settings, ranks
        ranks.arrange(train_settings.parallel)
        adapter_settings = train_settings if train_settings.lora_rank else None
        self.policy = self._load(
            model_dir, device, adapter=adapter_settings, held=train_settings, roles=settings.adapted_roles
        )
        self.own = {
            role_name: self._load(folder_of(role_folder), device, held=train_settings)
            for role_name, role_folder in settings.role_models.items()
        }
        self.frozen: dict[str, PolicyModel | None] = {}  # None: the policy with its adapter switched off
        self.moving: dict[str, Follower] = {}
        for role_name in (None, *self.own):
            role_slots, policy_folder = algorithms.slots(settings.algorithms_of(role_name)), self.of(role_name).folder
            for model_name, frozen_folder in role_slots.frozen.items():
                reference = reference_dir if model_name == REFERENCE and role_name is None else None
                chosen_folder = folder_of(frozen_folder) if frozen_folder else reference or policy_folder
                # A reference that is the model below the adapter needs no weights of its own: its pass runs with the
                # adapter off (`test_the_reference_of_an_adapter_is_the_model_below_it_and_no_second_one`).
                is_policy_base = bool(train_settings.lora_rank) and chosen_folder == policy_folder
                self.frozen[_named(model_name, role_name)] = (
                    None if is_policy_base else self._load(chosen_folder, device, frozen=True)
                )
            for model_name, follows in role_slots.moving.items():
                self.moving[_named(model_name, role_name)] = Follower(self.of(role_name).module, follows)
        self.critic: Critic | None = None
        if critic_slots.critic is not None:
            has_own_trunk = critic_slots.critic == "own"
            critic_trunk = (
                self._load(model_dir, device, adapter=adapter_settings, headless=True) if has_own_trunk else self.policy
            )
            self.critic = Critic(critic_trunk, own=has_own_trunk)
            ranks.cut(self.critic.head)
        self._own: dict[str, list[nn.Parameter]] = {"policy": self.policy.parameters()}  # by optimizer
        if settings.adapted_roles:
            adapter_roles = (None, *settings.adapted_roles)
            self._own = {
                policy_of(role_name): lora.parameters(self.policy.module, role_name) for role_name in adapter_roles
            }
        self._own |= {policy_of(role_name): role_model.parameters() for role_name, role_model in self.own.items()}
        self.optimizers = {
            model_name: self._optimizer(parameters, train_settings.lr) for model_name, parameters in self._own.items()
        }
        self._lr: dict[str, float | None] = dict.fromkeys(self._own)  # None: the settings' one
        if self.critic is not None:
            self._lr["critic"] = critic_slots.critic_lr
            self._own["critic"] = self.critic.parameters()
            self.optimizers["critic"] = self._optimizer(
                self._own["critic"], critic_slots.critic_lr or train_settings.lr
            )

    def _load(
        self,
        folder: Path,
        device: torch.device | str,
        *,
        adapter: Train | None = None,
        held: Train | None = None,
        roles: Sequence[str] = (),
        frozen: bool = False,
        headless: bool = False,
    ) -> PolicyModel:
        train_settings = self.settings.train
        return PolicyModel(
            folder,
            device=device,
            dtype=torch.bfloat16 if train_settings.dtype == "bfloat16" else torch.float32,
            checkpointing=train_settings.gradient_checkpointing is not False,
            offloading=train_settings.gradient_checkpointing == "offload",
            compiled=train_settings.compile,
            attention=train_settings.attention,
            adapter=adapter,
            held=held,
            roles=roles,
            frozen=frozen,
            headless=headless,
            logits_mb=train_settings.logits_mb,
            ranks=self._ranks,
        )

    def _optimizer(self, parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        # A matrix with one row is no map between two hidden spaces: making it orthogonal would only fix its length.
        outer_weights = [] if self.critic is None else [self.critic.head.weight]
        language_models = self.language_models()
        for language_model in language_models:
            outer_layers = (language_model.module.get_input_embeddings(), language_model.module.get_output_embeddings())
            outer_weights += [layer_weight for outer_layer in outer_layers for layer_weight in outer_layer.parameters()]
        parameter_roles = roles_of(language_model.module for language_model in language_models)
        table_ids = {id(layer_weight) for layer_weight in outer_weights} | parameter_roles.embeddings
        return optimizers.make(self.settings.train, parameters, lr, outer=table_ids, vectors=parameter_roles.others)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all models that a step changes by name, not copied; tied ones once."""
        learned_tensors = {
            f"{policy_of(role_name)}.{tensor_name}": masters.master(parameter)
            for role_name in (None, *self.own)
            for tensor_name, parameter in self.of(role_name).module.named_parameters()
            if parameter.requires_grad
        }
        critic_tensors = {} if self.critic is None else self.critic.tensors()
        tensors_by_part = {
            CRITIC: critic_tensors,
            **{tensor_name: follower.tensors() for tensor_name, follower in self.moving.items()},
        }
        return learned_tensors | {
            f"{part_name}.{tensor_name}": part_tensor
            for part_name, part_tensors in tensors_by_part.items()
            for tensor_name, part_tensor in part_tensors.items()
        }

    def of(self, role: str | None) -> PolicyModel:
        """The model that computes the policy of a role, or that of all others."""
        return self.own.get(role, self.policy) if role is not None else self.policy

    def policies(self) -> list[PolicyModel]:
        """The models that compute policies."""
        return [self.policy, *self.own.values()]

    def language_models(self) -> list[PolicyModel]:
        """All that are loaded: the policies, a critic's own trunk, frozen ones."""
        own_trunk = [self.critic.trunk] if self.critic is not None and self.critic.own else []
        return [
            *self.policies(),
            *own_trunk,
            *(frozen_model for frozen_model in self.frozen.values() if frozen_model is not None),
        ]

    def held(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of models that learn, and those of the others; not copied."""
        moving_tensors = [
            model_tensor for follower in self.moving.values() for model_tensor in follower.tensors().values()
        ]
        frozen_models = [language_model for language_model in self.frozen.values() if language_model is not None]
        learning_models = [
            language_model for language_model in self.language_models() if language_model not in frozen_models
        ]
        head_parameters = [] if self.critic is None else list(self.critic.head.parameters())
        learning_tensors = [
            model_tensor for language_model in learning_models for model_tensor in _tensors(language_model)
        ]
        return learning_tensors + head_parameters, [
            model_tensor for language_model in frozen_models for model_tensor in _tensors(language_model)
        ] + moving_tensors

    def learned(self) -> list[nn.Parameter]:
        """All parameters that optimizers update."""
        return [parameter for parameters in self._own.values() for parameter in parameters]

    def masters(self) -> list[Tensor]:
        """The float32 numbers behind weights that are held in less."""
        return [
            master_tensor
            for policy_model in self.policies()
            for master_tensor in masters.masters(policy_model.module).values()
        ]

    def away(self) -> list[Tensor]:
        """The tensors of optimizers, and masters, that wait in host memory."""
        parameterwise = [
            optimizer
            for optimizer in self.optimizers.values()
            if isinstance(optimizer, optimizers.ParameterwiseOptimizer)
        ]
        return [host_tensor for optimizer in parameterwise for host_tensor in optimizer.away()]

    @property
    def prompt_once(self) -> bool:
        """Whether passes may have stems: all models can compute one by itself."""
        return all(language_model.has_stems for language_model in self.language_models())

    # --- updates --------------------------------------------------------------------------------------------------

    def optimizer_step(self, names: Sequence[str], *, loss: Tensor, lr_share: float) -> float | None:
        """Clip the gradients, step the optimizers of the named models, zero the gradients. `lr_share` scales the
        learning rates. Returns the gradient norm of the first model before clipping. If a gradient or `loss` is not
        finite, nothing changes, and it returns None. The host waits for the device once, to read all of these."""
        gradient_norms = torch.stack([self._clip(model_name).double() for model_name in names])
        # All in one transfer: each `float()` would wait for the device by itself, in a place where the next step's
        # kernels could already be queued.
        host_values = torch.cat([gradient_norms, loss.to(gradient_norms).view(1)]).tolist()
        # All models or none: the policy's update without the critic's would leave them at two different steps.
        if not all(map(math.isfinite, host_values)):
            self.zero_grad()
            return None
        for model_name in names:
            optimizers.set_lr(self.optimizers[model_name], (self._lr[model_name] or self.settings.train.lr) * lr_share)
            self.optimizers[model_name].step()
        self.zero_grad()
        return host_values[0]

    def retune(self, settings: LearnerSettings) -> None:
        """Go on with another learning rate and another bound of the gradients."""
        self.settings = settings

    def follow(self, step: int) -> None:
        """Have the moving models follow their policies, after step number `step` (from 1)."""
        for follower in self.moving.values():
            follower.follow(step)

    def parts(self) -> Mapping[str, CheckpointPart]:
        """The parts of a checkpoint besides the policies and the optimizers, by the name of the folder."""
        critic_part: dict[str, CheckpointPart] = {} if self.critic is None else {CRITIC: self.critic}
        return {**critic_part, **self.moving}

    def _clip(self, name: str) -> Tensor:
        largest_norm = self.settings.train.grad_clip
        return clipped(self._own[name], math.inf if largest_norm is None else largest_norm)

    def zero_grad(self) -> None:
        """Drop the gradients at hand."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        for policy_model in self.policies():
            reshard(policy_model.module)  # no backward pass may have come to it


def _tensors(model: PolicyModel) -> list[Tensor]:
    return [*model.module.parameters(), *model.module.buffers()]


class ModelPasses:
    """Forward passes under the models of a learner. A stem that several passes begin with is computed by the first of
    them under each model, and kept until `stem` ends."""

    def __init__(self, models: Models) -> None:
        self._models, self._temperature = models, models.settings.temperature
        self._roots: dict[str, Roots] = {}  # of the stem of the passes under way, by model

    @torch.no_grad()
    def columns(self, pack: Pack) -> dict[str, Tensor]:
        """Columns of a pass under the current weights: `proximal`, `values` if it needs the critic, and those of
        `others`."""
        pass_outputs = self.forward(pack, trained=())
        pass_columns = {"proximal": pass_outputs.logprobs_K, **self.others(pack)}
        return pass_columns if pass_outputs.values_K is None else {**pass_columns, "values": pass_outputs.values_K}

    def forward(self, pack: Pack, *, trained: Collection[str]) -> Outputs:
        """The outputs of the policy, and of the critic if the pass needs it, with gradients for those `trained`. A
        critic on the policy's trunk trains the trunk only if the policy is trained too."""
        pass_critic = None if pack.algo.slots.critic is None else self._models.critic
        self._activate_adapter(pack)  # until the next pass: a backward pass may compute layers again
        logprobs_K, entropy_K, observed_O, hidden_PH = self._models.of(pack.policy).outputs(
            pack,
            temperature=self._temperature,
            entropy_grad=pack.algo.entropy_gradient,
            roots=self._roots_of(policy_of(pack.policy), self._models.of(pack.policy), pack),
        )
        # While a critic warms up the policy must not move, not even its trunk through the critic's loss.
        heard_PH = hidden_PH if "policy" in trained else hidden_PH.detach()
        critic_roots = None
        if pass_critic is not None and pass_critic.own:  # its own routers choose
            critic_roots = self._roots_of("critic", pass_critic.trunk, replace(pack, routes=None))
        values_K = None if pass_critic is None else pass_critic.values(pack, heard_PH, critic_roots)
        return Outputs(
            logprobs_K=logprobs_K,
            entropy_K=entropy_K,
            values_K=values_K,
            observed_O=observed_O,
            observed_weight_O=pack.observed_weight_O,
        )

    def _activate_adapter(self, pack: Pack) -> None:
        """Have the policy compute with the adapter of a pass, if roles have their own."""
        if self._models.settings.adapted_roles:
            lora.activate(self._models.policy.module, pack.policy)

    @torch.no_grad()
    def others(self, pack: Pack) -> dict[str, Tensor]:
        """The log-probs of a pass under each frozen and each moving model that it needs, by its name. Their own routers
        choose the experts: they are other policies."""
        logprobs_by_name: dict[str, Tensor] = {}
        pack = replace(pack, routes=None)
        self._activate_adapter(pack)
        policy_model, own_role = self._models.of(pack.policy), pack.policy if pack.policy in self._models.own else None
        for slot_name in pack.algo.slots.frozen:
            frozen_model = self._models.frozen[_named(slot_name, own_role)]
            with lora.switched_off(policy_model.module) if frozen_model is None else nullcontext():
                logprobs_by_name[slot_name] = self._logprobs(
                    _named(slot_name, own_role), frozen_model or policy_model, pack
                )
        for slot_name in pack.algo.slots.moving:
            with self._models.moving[_named(slot_name, own_role)].in_place():
                logprobs_by_name[slot_name] = self._logprobs(_named(slot_name, own_role), policy_model, pack)
        return logprobs_by_name

    def _logprobs(self, name: str, model: PolicyModel, pack: Pack) -> Tensor:
        return model.logprobs(pack, temperature=self._temperature, roots=self._roots_of(name, model, pack))[0]

    def _roots_of(self, name: str, model: PolicyModel, pack: Pack) -> Roots | None:
        """The stem of a pass under the model of that name: the first pass computes it."""
        if pack.stem is None:
            return None
        if name not in self._roots:
            self._roots[name] = model.roots(pack)
        return self._roots[name]

    @contextmanager
    def stem(self) -> Generator[None]:
        """Around the passes of one stem, forward and backward, or around passes without one. At its end the stem's
        parameters have their gradients too."""
        try:
            yield
            for stem_roots in self._roots.values():
                stem_roots.backward()
        finally:
            self._roots = {}

    @property
    def lent_bytes(self) -> int:
        """Bytes that the stem under way keeps for its passes."""
        return sum(stem_roots.size_bytes for stem_roots in self._roots.values())
