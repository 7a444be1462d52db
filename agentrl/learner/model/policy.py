"""The policy as the learner sees it: log-probs of the scored tokens of a pack.

Owns that its attention is the one over prefix trees. Never knows advantages, losses or optimizers.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import inspect
import itertools
import os
import shutil
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.config.train import Train
from agentrl.errors import ConfigError, ModelError
from agentrl.host import compile_cache
from agentrl.host.user_warnings import warn
from agentrl.learner.checkpoints.checkpoint import ADAPTER
from agentrl.learner.data.prefix_trees import Branch, Pack
from agentrl.learner.data.ragged import normalised
from agentrl.learner.data.shared_prompt import Names, Roots, can_be_lent, restart, stretched
from agentrl.learner.model import lora
from agentrl.learner.model.attention import (
    AttentionShape,
    Gather,
    Layout,
    Paths,
    choose,
    refuse_unknown,
    tree_attention,
)
from agentrl.learner.model.image_inputs import ImageInputs
from agentrl.learner.model.load import load
from agentrl.learner.model.logprobs import OutputHead, Places, TokenQuery, head_of, overheard, room, statistics
from agentrl.learner.moe.expert_records import Routes
from agentrl.learner.moe.routers import Routers, listening, routers
from agentrl.learner.optimizers import master_weights
from agentrl.learner.optimizers.master_weights import master
from agentrl.learner.parallel.fsdp import exactly, local, reshard, settled
from agentrl.learner.parallel.pass_shards import Portion
from agentrl.learner.parallel.ranks import ALONE, Ranks
from agentrl.tokens.columns import KEPT
from agentrl.tokens.vision import read_vision

ATTENTION = "agentrl_tree"
"""Under this name transformers calls `tree_attention` in every layer."""

_STRICT = "agentrl_strict_sdpa"
"""Under this name it calls `_strict_sdpa`."""

_LAYER_TYPES = ("full_attention", "sliding_attention")  # those of transformers that `tree_attention` computes
_WINDOWS = frozenset({"sliding_window", "attention_chunk_size", "window_size", "local_attention"})
_CAPS = frozenset({"attn_logit_softcapping"})
_NOISE = ("drop", "jitter")  # in the names of what is random in training
_SHORT = 4  # tokens of a window in `_obstacle`
_LOW = 0.5  # a cap there
_IN_THE_MASK = "sliding_window"


def _strict_sdpa(module: nn.Module, *inputs: Any, **named: Any) -> tuple[Tensor, None]:
    """transformers' sdpa, which drops what it does not know, such as a cap of the scores: here a ValueError."""
    refuse_unknown(
        {
            argument_name: argument
            for argument_name, argument in named.items()
            if argument_name not in (*_SDPA_KNOWS, _IN_THE_MASK)
        }
    )
    return sdpa_attention_forward(module, *inputs, **named)


_SDPA_KNOWS = inspect.signature(sdpa_attention_forward).parameters

AttentionInterface.register(ATTENTION, cast(Any, tree_attention))
AttentionInterface.register(_STRICT, cast(Any, _strict_sdpa))
AttentionMaskInterface.register(_STRICT, cast(Any, sdpa_mask))


class PolicyModel:
    """A causal language model over packs. `module` is the transformers model; `dtype` is what a pass
    computes in. Trained parameters are float32; of the others, matrices are held in `dtype`, to which a pass would
    round them anyway. `folder` is where tokenizer and configuration came from. `obstacle` says why it cannot compute
    prefix trees, if it cannot: then each branch is the end of a row that is computed alone. `routers` are those of a
    mixture. Under torch's FakeTensorMode the model is made from its config.json alone, and its tensors have no numbers.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        checkpointing: bool = False,
        offloading: bool = False,
        compiled: bool = False,
        attention: str = "auto",
        adapter: Train | None = None,
        held: Train | None = None,
        roles: Sequence[str] = (),
        frozen: bool = False,
        headless: bool = False,
        logits_mb: int = 1024,
        ranks: Ranks = ALONE,
    ) -> None:
        """With `offloading`, what `checkpointing` keeps of a pass for its gradients waits in host memory. With
        `adapter`, only a LoRA adapter of those settings is trained, and one for each of the `roles`; with `held`,
        trained matrices are held as those settings say; if `frozen`, nothing is trained; if `headless`, there is no
        output layer. Of several `ranks` each reads only its shards of the weights. Raises ModelError, in one line, for
        a folder that cannot be trained; ConfigError where `compiled` finds no compiler, or `attention` (of
        `train.attention`) does not work here."""
        self.folder, self.device, self.dtype = folder, torch.device(device), dtype
        self._offloading, self._ranks, self._logits_bytes = offloading, ranks, logits_mb << 20
        self._images = _images_of(folder, ranks, adapter)
        self.module = load(folder, ranks, ATTENTION)
        masters = held if held is not None and held.holds_bfloat16 else None
        self._narrow = dtype != torch.float32 and (frozen or adapter is not None or masters is not None)
        if self._narrow:
            embedding = self.module.get_input_embeddings().weight  # its rows are no operands of a matrix product
            _hold_in(dtype, self.module, lambda parameter: parameter.dim() > 1 and parameter is not embedding, masters)
        self.module.to(self.device)
        if masters is not None and not masters.offload_optimizer:
            master_weights.move(self.module)
        if headless:
            self.module.set_output_embeddings(nn.Identity())
        if adapter is not None:
            lora.inject(self.module, adapter, folder)
            # PEFT's are as narrow as what they adapt
            _hold_in(torch.float32, self.module, lambda one: one.requires_grad)
            lora.add_roles(self.module, roles)
        if frozen:
            self.module.requires_grad_(False)
        # After adapters and dtypes: FSDP takes over the parameters that it finds, and any that comes later is whole
        # on every rank.
        ranks.cut(self.module, torch.float32 if self._narrow else dtype)
        # The checks judge the model below: what they compare must not depend on an adapter.
        with lora.switched_off(self.module):
            self.obstacle = _obstacle(self.module, layer_names := Names())
            self._head, self.routers = _check(self.module, folder, self.obstacle)
        # Compiled layers were never tried.
        is_plain = not compiled and not self.obstacle and self._images is None
        self.has_stems = is_plain and can_be_lent(self.module, layer_names.heard)
        reshard(self.module)
        if self.obstacle and self._images is not None:
            raise ModelError(f"{type(self.module).__name__} in {str(folder)!r} cannot be trained: {self.obstacle}")
        if self.obstacle and ranks.team > ranks.tensor:
            correction = f"the model is computed row by row ({self.obstacle}): give 1"
            raise ConfigError("train.parallel.context", ranks.team // ranks.tensor, correction)
        if self._head is None and not headless:
            model_class, correction = type(self.module).__name__, "lower train.tokens_per_batch if memory is short"
            warn(f"the logits of {model_class} in {str(folder)!r} are computed all at once: {correction}")
        self.layout = choose(
            "sdpa" if self.obstacle or detect_fake_mode() else attention,
            self.device,
            dtype,
            _shape(self.module, ranks.tensor),
        )
        # The engine samples without dropout. With it, the log-prob of a fresh token would differ from the engine's at
        # random, and every ratio with it.
        _without_noise(self.module, folder)
        if checkpointing:
            # The reentrant kind computes no gradients where no input of a layer needs one, as behind a frozen
            # embedding under an adapter.
            self.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if compiled:
            _compile(self.module, self.device)

    @property
    def vocab(self) -> int:
        """Token ids that the model knows: 0 to `vocab` - 1."""
        return self.module.config.get_text_config().vocab_size

    def roots(self, pack: Pack) -> Roots:
        """The stem of a pass, for that and the others that have it."""
        assert pack.stem is not None and self.has_stems, "the learner asks"
        computing, stem_roots = _computing(self.device, self.dtype), Roots()
        # The balance loss counts a token for each of its rows. A stem does not know how many rows its passes have, so
        # it counts once, and each pass multiplies (`RouterRecord.begin`).
        counted_once = replace(pack, routes=pack.routes and pack.routes.once())
        stem_portion = self._ranks.portion(counted_once, (0, len(pack.stem)))
        silenced_head = overheard(self._layer, _nothing)
        with settled(self.module), computing, self._keeping(), silenced_head, listening(self.routers) as router_record:
            stem_output = self._run(stem_portion, stem_roots.keep)
        if router_record is not None:
            stem_roots.hear(router_record)
        if self._ranks.size > 1:
            stem_roots.end(stem_output)
        return stem_roots

    def hidden(self, pack: Pack, roots: Roots | None = None) -> Tensor:
        """The input of the output layer [P, H] at `predictors_P`, computed in `dtype`, of those that this rank has. No
        experts are replayed."""
        computing, rank_portion = _computing(self.device, self.dtype), self._portion(replace(pack, routes=None))
        with settled(self.module), computing, self._keeping(), overheard(self._layer, _nothing) as head_inputs:
            self._run(rank_portion, roots and roots.before)
        return _joined(head_inputs)[rank_portion.rows]

    def joined(self, pack: Pack, own_P: Tensor, name: str) -> Tensor:
        """Numbers of all `predictors_P` from those that this rank has."""
        rank_portion = self._portion(pack)
        if rank_portion.row_p is None:
            return own_P
        return rank_portion.joined([(own_P, rank_portion.row_p, len(pack.predictors_P))], name)[0]

    def logprobs(
        self, pack: Pack, *, temperature: float, entropy_grad: bool = False, roots: Roots | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-prob [K] of each scored token and entropy [K] at its place, in nats, of the distribution that it was
        sampled from: softmax(logits / temperature), over its kept set if the engine cut. Logits are computed for
        `predictors_P` only, a few of them at a time. `roots` holds the keys and values of the pack's stem, whose nodes
        are then not computed again."""
        return self.outputs(pack, temperature=temperature, entropy_grad=entropy_grad, roots=roots)[:2]

    def outputs(
        self, pack: Pack, *, temperature: float, entropy_grad: bool = False, roots: Roots | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`logprobs`, the log-prob [O] of each observed token, at temperature 1: nobody sampled it, and the input of
        the output layer [P, H], of those `predictors_P` that this rank has."""
        assert roots is not None or pack.stem is None, "its nodes are not computed here"
        rank_portion, sampled_sets = self._portion(pack), pack.ragged.get(KEPT)
        of_M, ids_M = (pack.target_K[:0],) * 2 if sampled_sets is None else sampled_sets.sets()
        if len(ids_M):
            # The sampled token and the members of its set in one reading of the logits: a second pass over [P, V]
            # would double what is the largest part of a small model's step.
            own_places = Places(
                torch.cat([pack.predictor_K, pack.predictor_K[of_M]]), torch.cat([pack.target_K, ids_M])
            )
        else:
            own_places = Places(pack.predictor_K, pack.target_K, pack.scored_P)
        plain_places = Places(pack.observer_O, pack.observed_O, pack.observed_P)
        with settled(self.module):
            run_pass = partial(self._run, rank_portion, roots and roots.before)
            hidden_PH, pass_statistics = self._read(
                run_pass, own_places, plain_places, rank_portion, temperature=temperature, dtype=self.dtype
            )
        if roots is not None and self.routers is not None and pack.routes is not None:
            self.routers.begin(roots.heard, pack.routes.rows_N[0])  # all of its rows begin there
        own_KM, observed_O, entropy_P = pass_statistics
        logprobs_K, logprobs_M = own_KM.split([len(pack.target_K), len(ids_M)])
        entropy_K = (entropy_P if entropy_grad else entropy_P.detach())[pack.predictor_K]
        if sampled_sets is None or not len(ids_M):
            return logprobs_K, entropy_K, observed_O, hidden_PH
        # The set's mass under the current policy: subtracted, the log-prob is that of the truncated distribution the
        # token was drawn from, and the ratio is 1 on policy.
        restricted_M, mass_K = normalised(logprobs_M, of_M, len(logprobs_K))
        with nullcontext() if entropy_grad else torch.no_grad():
            own_K = torch.zeros_like(entropy_K).index_add(0, of_M, -restricted_M.exp() * restricted_M)
        return logprobs_K - mass_K, torch.where(sampled_sets.head_K == 0, entropy_K, own_K), observed_O, hidden_PH

    def choices(self, rows: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Compute for each row, tokens [T] and choices [T] or [T, C], the log-probs of the choices after each of its
        tokens, in nats at temperature 1, with gradients and of the choices' shape. Rows share one pass and see nothing
        of each other; no experts are replayed."""
        row_sizes = [len(tokens_T) for tokens_T, _ in rows]
        stop_nodes = list(itertools.accumulate(row_sizes))
        tokens_N = torch.cat([tokens_T for tokens_T, _ in rows]).to(self.device)
        numbers_N = torch.arange(len(tokens_N), device=self.device)
        branches = [
            Branch(stop_node - row_size, stop_node, numbers_N[stop_node - row_size : stop_node])
            for stop_node, row_size in zip(stop_nodes, row_sizes, strict=True)
        ]
        depth_N = torch.cat([numbers_N[:row_size] for row_size in row_sizes])
        places_I = torch.cat(
            [
                numbers_N[branch.start : branch.stop].repeat_interleave(choice_TC[0].numel())
                for branch, (_, choice_TC) in zip(branches, rows, strict=True)
            ]
        )
        own_places = Places(places_I, torch.cat([choice_TC.flatten() for _, choice_TC in rows]).to(self.device))
        no_places = Places(numbers_N[:0], tokens_N[:0])

        def run() -> Tensor:
            if self.obstacle:
                return _logits_of_rows(self.module, tokens_N, branches, numbers_N)
            return _logits(self.module, tokens_N, depth_N, self.layout(branches), numbers_N)

        with settled(self.module):
            _, (logprobs_I, _, _) = self._read(run, own_places, no_places, None, temperature=1.0, dtype=self.dtype)
        row_logprobs = logprobs_I.split([choice_TC.numel() for _, choice_TC in rows])
        return [part_I.view(choice_TC.shape) for part_I, (_, choice_TC) in zip(row_logprobs, rows, strict=True)]

    @torch.no_grad()
    def score(self, token_ids: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[float, ...]:
        """Log-probs, in nats at temperature 1, of `token_ids[1:]`, each conditioned on the tokens before it: computed
        in float32 from weights rounded to `dtype`. (A step too small to change a bfloat16 changes nothing.)"""
        tokens_N = torch.tensor(token_ids, device=self.device)
        numbers_N = torch.arange(len(token_ids), device=self.device)
        row_branch = Branch(0, len(token_ids), numbers_N)
        run_pass: Callable[[], Tensor] = partial(
            _logits, self.module, tokens_N, numbers_N, Paths([row_branch]), numbers_N[:-1]
        )
        if self.obstacle:
            run_pass = partial(_logits_of_rows, self.module, tokens_N, [row_branch], numbers_N[:-1])
        next_places, no_places = Places(numbers_N[:-1], tokens_N[1:]), Places(numbers_N[:0], tokens_N[:0])
        is_exact = dtype == torch.float32 and not self._narrow
        with settled(self.module), exactly(), nullcontext() if is_exact else _rounded(self.module, dtype):
            _, (logprobs_T, _, _) = self._read(
                run_pass, next_places, no_places, None, temperature=1.0, dtype=torch.float32
            )
        return tuple(logprobs_T.tolist())

    def _portion(self, pack: Pack) -> Portion:
        """This rank's share of a pass, without its stem."""
        return self._ranks.portion(pack, None if pack.stem is None else (len(pack.stem), len(pack.token_ids_N)))

    def _run(self, portion: Portion, gather: Gather | None = None) -> Tensor:
        own_pack, own_routes = portion.pack, None if self.routers is None else portion.routes
        if self.obstacle:
            return _logits_of_rows(
                self.module, own_pack.token_ids_N, own_pack.branches, own_pack.predictors_P, own_routes
            )
        pass_layout, gather = self.layout(portion.branches, self.device), portion.gather(gather)
        image_inputs = {} if self._images is None else self._images.of(self.module, own_pack)
        pass_logits = _logits(
            self.module,
            portion.token_ids_n,
            portion.depth_n,
            pass_layout,
            portion.keep_c,
            gather,
            own_routes,
            image_inputs,
        )
        if self.routers is not None and portion.meshes is not None:
            self.routers.join(portion.meshes.context)
        return pass_logits

    def _read(
        self,
        run: Callable[[], Tensor],
        own: Places,
        plain: Places,
        portion: Portion | None,
        *,
        temperature: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The input of the output layer [P, H] in a pass made by `run`, of those rows that this rank has, and what
        `statistics` says of the logits of all."""
        output_head, output_layer = self._head, self._layer
        chunk_rows, block_rows = room(self._logits_bytes, self.vocab, output_head, dtype, self.device)
        with (
            _computing(self.device, dtype),
            self._keeping(),
            overheard(output_layer, _nothing if output_head else None) as head_inputs,
        ):
            logits_PV = run()
        own_rows = slice(None) if portion is None else portion.rows
        hidden_PH = _joined(head_inputs)[own_rows]

        def logits_of(hidden_CH: Tensor) -> Tensor:
            assert output_head is not None
            with _computing(self.device, dtype):
                return output_head(hidden_CH)

        def read_here(own: Places, plain: Places) -> tuple[Tensor, Tensor, Tensor]:
            token_query = TokenQuery(own=own, plain=plain, temperature=temperature, rows=chunk_rows, block=block_rows)
            if output_head is None:
                return statistics(_nothing, logits_PV[own_rows], (), token_query)
            return statistics(logits_of, hidden_PH, tuple(output_layer.parameters()), token_query)

        return hidden_PH, read_here(own, plain) if portion is None else portion.read(own, plain, read_here)

    def _keeping(self) -> AbstractContextManager[object]:
        """Inside, tensors that gradients need are kept where they should wait for these."""
        pins_memory = self.device.type == "cuda"
        return torch.autograd.graph.save_on_cpu(pin_memory=pins_memory) if self._offloading else nullcontext()

    @property
    def _layer(self) -> nn.Module:
        return self.module.get_output_embeddings()

    def load_weights(self, folder: Path) -> None:
        """Load the weights of another folder of the same architecture; if an adapter is trained, only the adapter's.
        Raises ModelError if they do not fit."""
        if lora.has_adapter(self.module):
            lora.load(self.module, folder / ADAPTER)
            return
        try:
            master_weights.load(self.module, load(folder, self._ranks, ATTENTION).state_dict())
        except RuntimeError as load_error:
            raise ModelError(
                f"weights of {str(folder)!r} do not fit {str(self.folder)!r}: {load_error}"
            ) from load_error

    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters; tied ones once."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]


def _images_of(folder: Path, ranks: Ranks, adapter: Train | None) -> ImageInputs | None:
    """Make the reader of the images of a model's passes; None if the model reads none. Raises ConfigError for a setting
    that was never tried with such a model."""
    if (vision := read_vision(folder)) is None:
        return None
    if ranks.size > 1:
        raise ConfigError("train.parallel.ranks", ranks.size, "a model that reads images is trained by one: give 1")
    if adapter is not None:
        raise ConfigError("train.lora_rank", adapter.lora_rank, "a model that reads images is trained whole: give 0")
    return ImageInputs(folder, vision)


def _joined(heard: Sequence[Tensor]) -> Tensor:
    """The recorded hidden states of one pack's passes, joined [P, H]."""
    return heard[0][0] if len(heard) == 1 else torch.cat([one_1PH[0] for one_1PH in heard])


def _nothing(states: Tensor) -> Tensor:
    """Stands in the place of an output layer."""
    return states


def _computing(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Inside, matrix products are computed in `dtype`."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


@contextmanager
def _rounded(module: Any, dtype: torch.dtype) -> Generator[None]:
    """Inside, each layer computes in float32 with its weights rounded to `dtype`; only one layer's are copied at a
    time."""
    # By hooks around each layer, so that one layer's rounded copy is held at a time. Rounding the whole model would
    # take its memory once more, at each version, on the GPU that is full anyway.
    originals: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def before(part: nn.Module, _: object) -> None:
        shards_and_masters = [(local(parameter), master(parameter)) for parameter in part.parameters(recurse=False)]
        originals[part] = [(shard, shard.data) for shard, _ in shards_and_masters]
        for shard, master_tensor in shards_and_masters:
            shard.data = local(master_tensor).data.to(shard.device, dtype).float()

    def after(part: nn.Module, *_: object) -> None:
        for shard, original in originals.pop(part):  # by now FSDP may have put its shard into the parameter's place
            shard.data = original

    weighted_modules = [
        submodule for submodule in module.modules() if next(submodule.parameters(recurse=False), None) is not None
    ]
    layer_hooks = [submodule.register_forward_pre_hook(before) for submodule in weighted_modules]
    layer_hooks += [submodule.register_forward_hook(after) for submodule in weighted_modules]
    try:
        yield
    finally:
        for layer_hook in layer_hooks:
            layer_hook.remove()
        for submodule in list(originals):  # left over if a pass failed
            after(submodule)


def _logits(
    module: Any,
    token_ids_N: Tensor,
    depth_N: Tensor,
    layout: Layout,
    keep_P: Tensor,
    gather: Gather | None = None,
    routes: Routes | None = None,
    seen: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The logits at the nodes `keep_P`. If images are among the nodes, `seen` takes the place of ids and depths."""
    model_output = module(
        **(seen or {"input_ids": token_ids_N[None], "position_ids": depth_N[None]}),
        use_cache=False,
        logits_to_keep=keep_P,
        layout=layout,
        gather=gather,
        **({} if routes is None else {"routes": routes}),
    )
    return model_output.logits[0]


def _logits_of_rows(
    module: Any, token_ids_N: Tensor, branches: Sequence[Branch], keep_P: Tensor, routes: Routes | None = None
) -> Tensor:
    """By the model's own attention and rotations: a node's logits in the row that ends with its branch."""
    branch_logits: list[Tensor] = []
    for branch in branches:
        kept_nodes = keep_P[(keep_P >= branch.start) & (keep_P < branch.stop)]
        if len(kept_nodes):
            kept_places = kept_nodes + (len(branch.path) - branch.stop)
            row_token_ids = token_ids_N[branch.path][None]
            route_argument = {} if routes is None else {"routes": routes.at(branch.path)}
            # Rotary caches that grow with the longest row so far would make a row's numbers depend on those before
            # it.
            restart(module)
            branch_logits.append(
                module(input_ids=row_token_ids, use_cache=False, logits_to_keep=kept_places, **route_argument).logits[0]
            )
    return torch.cat(branch_logits)


def _shape(module: Any, ranks: int) -> AttentionShape:
    """The shape of the model's attention, as far as its configuration says, on each of the ranks that share it."""
    text_config = module.config.get_text_config()
    head_count = text_config.num_attention_heads
    return AttentionShape(
        heads=head_count // ranks,
        kv_heads=(getattr(text_config, "num_key_value_heads", None) or head_count) // ranks,
        head_dim=getattr(text_config, "head_dim", None) or text_config.hidden_size // head_count,
        sinks=any(parameter_name.endswith(".sinks") for parameter_name, _ in module.named_parameters()),
        windows=getattr(text_config, "sliding_window", None) is not None,
    )


def _compile(module: Any, device: torch.device) -> None:
    """Have torch compile each decoder layer but its attention, which depends on the tree and stays as it is. Passes of
    any length run the same code."""
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            "train.compile", True, f"this machine has no C++ compiler {compiler!r}: install it, or give false"
        )
    compile_cache.choose()
    # Each pass has another tree: compiled with it, a layer would be compiled anew for each.
    AttentionInterface.register(ATTENTION, cast(Any, torch.compiler.disable(tree_attention)))
    for submodule in module.modules():
        if isinstance(submodule, GradientCheckpointingLayer):  # transformers' base of all decoder layers
            submodule.compile(dynamic=True)


def _hold_in(
    dtype: torch.dtype, module: nn.Module, which: Callable[[nn.Parameter], bool], trained: Train | None = None
) -> None:
    """Convert these parameters of a model, which are tied to no others. Those that are `trained` may have masters."""
    for submodule in module.modules():
        for parameter_name, parameter in list(submodule.named_parameters(recurse=False)):
            if which(parameter) and parameter.dtype != dtype:
                exact_numbers = parameter.detach()
                setattr(
                    submodule,
                    parameter_name,
                    converted := nn.Parameter(exact_numbers.to(dtype), parameter.requires_grad),
                )
                if trained is not None:
                    master_weights.give(converted, exact_numbers if trained.weights == "bfloat16" else None)


@torch.no_grad()
def _obstacle(module: Any, layers: Names) -> str | None:
    """Why a model cannot be computed over prefix trees; None if it can. Two rows that share a prefix must get the
    logits that transformers' own attention gives them; an architecture that mixes tokens in another way (recurrent
    layers, attention biases) would train on wrong numbers. The rows are several windows long: the model's windows are
    shortened during the check, so that a long one costs nothing. Afterwards it has the attention that it needs, and
    `layers` have been heard once."""
    device = next(module.parameters()).device
    # Rows of several (shortened) windows, with a branch inside of one: a wrong window, a wrong position and a leak
    # between siblings all change these logits.
    shared_length, own_length = 3 * _SHORT, 2 * _SHORT
    node_count = shared_length + 2 * own_length
    node_numbers = torch.arange(node_count, device=device)
    tokens_N = _tokens(module, node_count)
    row_paths = [
        node_numbers[: shared_length + own_length],
        torch.cat([node_numbers[:shared_length], node_numbers[shared_length + own_length :]]),
    ]
    branches = [
        Branch(0, shared_length + own_length, row_paths[0]),
        Branch(shared_length + own_length, node_count, row_paths[1]),
    ]
    depth_N = torch.cat(
        [node_numbers[: shared_length + own_length], node_numbers[shared_length : shared_length + own_length]]
    )
    module.eval()
    try:
        # First, by names: a few tokens may agree by chance where a layer's recurrent state is nearly empty still.
        _check_layers(module)
        if detect_fake_mode() is not None:  # there are no numbers to compare
            return None
        with _tightened(module), _rounded(module, torch.float32):
            tree_NV = _logits(module, tokens_N, depth_N, Paths(branches), node_numbers, layers)
            _attend(module, "eager")
            for row_path in row_paths:
                if not _close(_row(module, tokens_N[row_path]), tree_NV[row_path]):
                    raise ValueError("logits differ from those of single rows")
    # Whatever goes wrong in here, the model can still be trained row by row, by its own attention. That costs time,
    # and its numbers are right; `obstacle` says which of the two a run has.
    except (ValueError, TypeError, RuntimeError, AttributeError) as pass_error:
        _use_own_attention(module, [tokens_N[row_path] for row_path in row_paths], shared_length)
        return next(iter(str(pass_error).splitlines()), type(pass_error).__name__)
    _attend(module, ATTENTION)
    return None


def _attend(module: Any, name: str) -> None:
    """Have the model attend by the function of this name; one of an old kind only takes its masks from there."""
    if (text_config := module.config.get_text_config()) is not module.config:  # other parts go on as they do
        module.set_attn_implementation({"text_config": name})
        text_config._attn_implementation = name
        return
    module.set_attn_implementation(name)
    module.config._attn_implementation = name


def _use_own_attention(module: Any, rows: Sequence[Tensor], shared: int) -> None:
    """Set the attention of transformers' that computes this model: eager, which each model defines, or sdpa if it takes
    all that the layers pass and gives the same logits of these rows, whose first tokens are `shared`. Raises ModelError
    if these have others in another row: then a token depends on what follows it."""
    supported = getattr(module, "_supports_sdpa", False)
    _attend(module, "sdpa" if supported else "eager")
    if detect_fake_mode() is not None:
        return
    logits_by_attention: dict[str, list[Tensor]] = {}
    with _tightened(module), _rounded(module, torch.float32):
        for attention_name in ("eager", _STRICT, "sdpa") if supported else ("eager",):
            _attend(module, attention_name)
            try:
                logits_by_attention[attention_name] = [_row(module, row_T) for row_T in rows]
            except (ValueError, TypeError, RuntimeError, AttributeError):
                if attention_name == "eager":
                    return  # `_check` says why
    eager_logits = logits_by_attention["eager"]
    all_agree = all(
        _close(row_TV, exact_TV)
        for other_logits in logits_by_attention.values()
        for row_TV, exact_TV in zip(other_logits, eager_logits, strict=True)
    )
    # sdpa only if all three agree: transformers' sdpa leaves out what it does not know without a word, and the strict
    # one finds that by raising.
    _attend(module, "sdpa" if all_agree and len(logits_by_attention) == 3 else "eager")
    if not _close(eager_logits[0][:shared], eager_logits[1][:shared]):
        raise ModelError(f"{type(module).__name__} is no causal language model: a token depends on what follows it")


def _row(module: Any, tokens_T: Tensor, **options: object) -> Tensor:
    restart(module)
    return module(input_ids=tokens_T[None], use_cache=False, **options).logits[0]


def _close(logits_TV: Tensor, exact_TV: Tensor) -> bool:
    return torch.allclose(logits_TV, exact_TV, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def _check(module: Any, folder: Path, obstacle: str | None) -> tuple[OutputHead | None, Routers | None]:
    """How the model's logits are made, if we can do the same, and its routers. Raises ModelError if it computes
    nothing."""
    if detect_fake_mode() is not None:
        output_layer = module.get_output_embeddings()
        return OutputHead(output_layer) if type(output_layer) is nn.Linear else None, None
    model_class, token_count = type(module).__name__, 4 * _SHORT
    run_model = partial(module, input_ids=_tokens(module, token_count)[None], use_cache=False)
    if obstacle:
        warn(
            f"{model_class} in {str(folder)!r} is computed row by row, not over prefix trees ({obstacle}): tokens that "
            "rows share are computed once per row"
        )
    try:
        node_numbers = torch.arange(token_count, device=next(module.parameters()).device)
        if not obstacle:
            run_model = partial(run_model, layout=Paths([Branch(0, token_count, node_numbers)]))
        with _rounded(module, torch.float32):
            output_head = head_of(module, lambda: run_model(logits_to_keep=node_numbers[1:]).logits[0], token_count - 1)
            return output_head, routers(
                module, lambda routes: run_model(logits_to_keep=node_numbers[:1], routes=routes), token_count
            )
    except (ValueError, TypeError, RuntimeError) as pass_error:
        raise ModelError(f"{model_class} in {str(folder)!r} cannot be computed: {pass_error}") from pass_error


@torch.no_grad()
def _without_noise(module: Any, folder: Path) -> None:
    """Set the model to train without dropout and the like, since the engine samples without: as layers, as numbers that
    layers hand to functions, and as those of configurations. Raises ModelError if something random is left."""
    owners_by_id = {
        id(owner): owner for submodule in module.modules() for owner in (submodule, getattr(submodule, "config", None))
    }
    for owner in owners_by_id.values():
        if isinstance(owner, nn.Dropout):
            owner.p = 0.0
        for attribute_name, attribute in list(getattr(owner, "__dict__", {}).items()):
            # By the names of numbers, in modules and configurations: dropout is a layer in some families and an
            # argument of a function in others. The pass below finds what this misses.
            if isinstance(attribute, float) and any(noise_word in attribute_name for noise_word in _NOISE):
                setattr(owner, attribute_name, 0.0)
    if detect_fake_mode() is None:
        tokens_T, logits_by_mode = _tokens(module, 4 * _SHORT), list[Tensor]()
        tree_argument = {
            "layout": Paths([Branch(0, len(tokens_T), torch.arange(len(tokens_T), device=tokens_T.device))])
        }
        arguments = tree_argument if module.config.get_text_config()._attn_implementation == ATTENTION else {}
        for training in (False, True):
            module.train(training)
            with _rounded(module, torch.float32), warnings.catch_warnings():
                logits_by_mode.append(_row(module, tokens_T, **arguments))
        if not _close(*logits_by_mode):
            raise ModelError(
                f"{type(module).__name__} in {str(folder)!r} computes something else in training than the engine does "
                "when it samples: switch off what is random in its config.json"
            )
        reshard(module)
    module.train()


def _tokens(module: Any, n: int) -> Tensor:
    """So many token ids of the model's vocabulary, the same every time."""
    token_numbers = torch.arange(n, device=next(module.parameters()).device)
    # Distinct, without a period, and without a random state: two ranks must try the same tokens.
    return (7 * token_numbers + token_numbers**2 // 5 + 3) % module.config.get_text_config().vocab_size


def _check_layers(module: Any) -> None:
    """Raises ValueError for a layer of an unknown type, and for positions that depend on a row's length, even if a few
    tokens are computed right."""
    for layer_index, layer_kind in enumerate(getattr(module.config.get_text_config(), "layer_types", None) or ()):
        if layer_kind not in _LAYER_TYPES:
            raise ValueError(f"layer {layer_index} is of type {layer_kind!r}, we compute {', '.join(_LAYER_TYPES)}")
    if stretched_kinds := sorted({layer_kind for _, layer_kind in stretched(module)}):
        raise ValueError(f"its rotations are of type {stretched_kinds[0]!r}, which depends on the length of a row")


@contextmanager
def _tightened(module: Any) -> Generator[None]:
    """Inside, every window of attention is `_SHORT` tokens long, and every cap of its scores `_LOW`, in the layers and
    in their configurations: so a few tokens show whether they are computed."""
    owners_by_id = {
        id(owner): owner for submodule in module.modules() for owner in (submodule, getattr(submodule, "config", None))
    }
    changed_values = [
        (owner, attribute_name, original, tight_value)
        for owner in owners_by_id.values()
        for attribute_names, value_kinds, tight_value in ((_WINDOWS, (int,), _SHORT), (_CAPS, (int, float), _LOW))
        for attribute_name in attribute_names
        if type(original := getattr(owner, attribute_name, None)) in value_kinds and cast(float, original) > 0
    ]
    for owner, attribute_name, _, tight_value in changed_values:
        setattr(owner, attribute_name, tight_value)
    try:
        yield
    finally:
        for owner, attribute_name, original, _ in changed_values:
            setattr(owner, attribute_name, original)
