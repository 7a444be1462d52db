"""Four ranks that compute passes together: log-probs and gradients are those of one rank."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from agentrl.errors import ConfigError
from agentrl.learner.data.prefix_trees import Pack, packs
from agentrl.learner.model.policy import PolicyModel
from agentrl.learner.parallel.ranks import ALONE, Alone
from tests.closeness import assert_gradients_alike

from .making import VOCAB, mixture, tiny_llama
from .test_attention import forked_rows
from .test_packing import row
from .test_ranks import stepped, way, with_sets
from .test_ranks_reshard import started
from .test_traffic import process


def long_row() -> Pack:
    rng = random.Random(0)
    (pack,) = packs([[row([rng.randrange(VOCAB) for _ in range(700)], range(300, 700))]], 1 << 20)
    return pack


def forks() -> Pack:
    """Of two groups, every token is scored."""
    known = [[[token % VOCAB for token in one.token_ids] for one in rows] for rows in forked_rows(2)]
    (pack,) = packs([[row(ids, range(1, len(ids))) for ids in rows] for rows in known], 1 << 20)
    return pack


@pytest.mark.slow
def test_four_ranks_that_compute_passes_together_do_what_one_does(qwen3_dir: Path, tmp_path: Path) -> None:
    by_two = {"context": 2, "tensor": 2}
    mixed, of_experts = mixture(tmp_path / "mixture", layers=2, kv_heads=2), {**by_two, "expert": 4}
    cases = [
        (qwen3_dir, long_row(), [{"context": 4}, by_two]),
        (tiny_llama(tmp_path / "llama"), forks(), [{"context": 4}, {"context": 2}, by_two]),
        (mixed, with_sets(60), [{"context": 4}, of_experts]),
    ]
    with process() as apart:
        counted = apart({"ranks": 4, **by_two}, qwen3_dir, 20, gradient_checkpointing=True)
        tokens = [one.name for one in apart({"ranks": 4, **of_experts}, mixed, 20) if one.kind == "all-to-all"]
    with started(4) as four:
        for folder, pack, plans in cases:
            logprobs_K, weights = stepped(pack, folder, ALONE)
            for plan in plans:
                parallel, recomputed = {"ranks": 4, **plan}, plan is by_two
                found_K, others = stepped(pack, folder, four, parallel=parallel, gradient_checkpointing=recomputed)
                torch.testing.assert_close(found_K, logprobs_K, atol=5e-5, rtol=0)
                assert_gradients_alike(others, weights, norm=way(weights, folder))
                if folder == qwen3_dir and plan is by_two:
                    assert "\n".join(one.name for one in counted) in "\n".join(four.ledger.names(0))
        entered = [name for name in four.ledger.names(0) if name.startswith(("counts ", "tokens ", "answers "))]
        assert entered[-len(tokens) :] == tokens
        assert len({tuple(four.ledger.names(rank)) for rank in range(4)}) == 1
        assert "keys and values of layer 0, backward" in four.ledger.names(0)


class Team(Alone):
    """As one of two ranks has it that share the tokens of a pass."""

    team = 2


def test_a_model_without_trees_is_not_divided_by_its_tokens(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 1}
    MambaForCausalLM(MambaConfig(vocab_size=VOCAB, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"train.parallel.context = 2: the model is computed row by row \(.*: give 1"):
        PolicyModel(tmp_path, ranks=Team())
