"""How much of the router a replay needs: ids of experts, their order, their weights; on a random mixture in bfloat16.

    agentrl bench router_weights

Engine and learner are the same weights computed in two ways. The engine's stand-in decodes token by token over a KV
cache, and adds a token's experts up in the order of its slots, as fused kernels do; it tells all that its routers said.
The learner computes whole rows, and adds experts up by their number, as transformers does. Replayed is: nothing; the
ids of the experts; these in the order of the slots; the weights that the engine's router gave them. Prints the table of
routing.md, in seconds; no real engine takes part.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

ROWS, TOKENS, VOCABULARY, SEEDS = 24, 128, 1000, (0, 1, 2)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "initializer_range": 0.1,
    "eos_token_id": None,
    "bos_token_id": None,
}
REPLAYED: dict[str, frozenset[str]] = {
    name: frozenset(name.split(", "))
    for name in ("nothing", "ids", "ids, order", "ids, weights", "ids, order, weights")
}


def by_slot(experts: Any, hidden_TH: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """The outputs of a token's experts, added up in the order of its slots."""
    total_TH = torch.zeros_like(hidden_TH)
    for index_T, weight_T in zip(index_TK.unbind(1), weight_TK.unbind(1), strict=True):
        gate_TI, up_TI = torch.einsum("th,tih->ti", hidden_TH, experts.gate_up_proj[index_T]).chunk(2, -1)
        down_THI = experts.down_proj[index_T]
        total_TH = total_TH + torch.einsum("ti,thi->th", experts.act_fn(gate_TI) * up_TI, down_THI) * weight_T[:, None]
    return total_TH


class Routed:
    """A mixture whose routers are listened to, or told what they say."""

    def __init__(self, model: Any) -> None:
        self.gates: list[Any] = [part for part in model.modules() if isinstance(part, Qwen3MoeTopKRouter)]
        self.experts: list[Any] = [part for part in model.modules() if isinstance(part, Qwen3MoeExperts)]
        self.told: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.gates]  # ids, weights

    @contextmanager
    def as_engine(self) -> Generator[None]:
        """Inside, what routers say of the newest tokens is kept."""

        def listen(at: int, hidden: Tensor) -> Any:
            found = Qwen3MoeTopKRouter.forward(self.gates[at], hidden)
            for kept, value in zip(self.told[at], (found[2], found[1]), strict=True):
                kept.append(value)
            return found

        with self._patched(listen, slots=True):
            yield

    @contextmanager
    def as_learner(self, replayed: frozenset[str]) -> Generator[None]:
        """Inside, routers say of whole rows what is replayed."""

        def say(at: int, hidden: Tensor) -> Any:
            index_TK, weight_TK = (torch.stack(kept, 1).flatten(0, 1) for kept in self.told[at])
            gate = self.gates[at]
            logits_TE = functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            scores_TE = logits_TE.float().softmax(-1)
            chosen_TK = index_TK if "ids" in replayed else scores_TE.topk(gate.top_k, -1)[1]
            own_TK = scores_TE.gather(-1, chosen_TK)
            own_TK = (own_TK / own_TK.sum(-1, keepdim=True)).to(logits_TE.dtype)
            return logits_TE, weight_TK if "weights" in replayed else own_TK, chosen_TK

        with self._patched(say, slots="order" in replayed):
            yield

    @contextmanager
    def _patched(self, router: Any, *, slots: bool) -> Generator[None]:
        for at, gate in enumerate(self.gates):
            gate.forward = lambda hidden, at=at: router(at, hidden)
        for part in self.experts if slots else ():
            part.forward = by_slot.__get__(part)
        yield
        for part in (*self.gates, *self.experts):
            part.__dict__.pop("forward", None)


@torch.no_grad()
def mismatch(seed: int) -> dict[str, tuple[float, float]]:
    """The mean and largest difference of log-probs, in nats, by what is replayed."""
    torch.manual_seed(seed)
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).to(torch.bfloat16).eval()
    routed, ids_BT, cache = Routed(model), torch.randint(0, VOCABULARY, (ROWS, TOKENS)), DynamicCache()

    def logprobs(logits_BTV: Tensor, next_BT: Tensor) -> Tensor:
        return logits_BTV.float().log_softmax(-1).gather(-1, next_BT[..., None])[..., 0]

    with routed.as_engine():
        steps = [
            logprobs(model(ids_BT[:, at : at + 1], past_key_values=cache).logits, ids_BT[:, at + 1 : at + 2])
            for at in range(TOKENS - 1)
        ]
    engine_BT = torch.cat(steps, 1)
    found: dict[str, tuple[float, float]] = {}
    for name, replayed in REPLAYED.items():
        with routed.as_learner(replayed):
            own_BT = logprobs(model(ids_BT[:, :-1], use_cache=False).logits, ids_BT[:, 1:])
        apart_BT = (own_BT - engine_BT).abs()
        found[name] = (float(apart_BT.mean()), float(apart_BT.max()))
    return found


def main() -> None:
    torch.set_num_threads(1)
    seeds = [mismatch(seed) for seed in SEEDS]
    print("| replayed | " + " | ".join(f"seed {seed}: mean | max" for seed in SEEDS) + " | of ids alone |")
    print("|---" * (2 * len(SEEDS) + 2) + "|")
    for name in REPLAYED:
        cells = [f"{value:.4f}" for one in seeds for value in one[name]]
        share = sum(one[name][0] for one in seeds) / sum(one["ids"][0] for one in seeds)
        print(f"| {name} | {' | '.join(cells)} | {share:.2f} |")


if __name__ == "__main__":
    main()
