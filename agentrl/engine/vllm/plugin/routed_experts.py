"""The experts chosen per token, on CPU: what `--enable-return-routed-experts` does on a GPU (it needs Triton).

A hook in every mixture's router writes the chosen experts into a table with one row per slot of the KV cache, beside
the keys and values they made: a prompt that hits the prefix cache brings its rows with it. When a request has sampled,
the rows its tokens were computed with go out with the token, and reach the client in the field `routed_experts` of the
last chunk, as on a GPU: an array [tokens - 1, layers, experts per token], the last token never having been computed.
After an update with recomputed KV a sampled token keeps the row it was sampled with.

Needs the worker in the engine core's process (executor `uni`), which is how `launch` starts a CPU server.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_installed = False


@dataclass(slots=True)
class _Taken:
    """Rows of one running request by the position after them: those of the whole prompt, then one a token."""

    prompt: int
    start: int  # the client needs no rows of so many first prompt tokens
    rows: dict[int, Any] = field(default_factory=dict)
    sampled: int = 0


_running: dict[str, _Taken] = {}


def install() -> None:
    """Hook this process's model runner and scheduler. Safe to call again."""
    global _installed
    if _installed:
        return
    _installed = True
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    make_cache, original_execute, original_finish = (
        CPUModelRunner.initialize_kv_cache,
        CPUModelRunner.execute_model,
        Scheduler.update_from_output,
    )

    @functools.wraps(make_cache)
    def hooked_make_cache(self, kv_cache_config, *args, **kwargs):
        make_cache(self, kv_cache_config, *args, **kwargs)
        self.agentrl_routing = Routing(self, kv_cache_config.num_blocks)

    @functools.wraps(original_execute)
    def hooked_execute(self, scheduler_output, *args, **kwargs):
        output = original_execute(self, scheduler_output, *args, **kwargs)
        self.agentrl_routing.after_step(self, scheduler_output)
        return output

    @functools.wraps(original_finish)
    def hooked_finish(self, scheduler_output, model_runner_output):
        client_outputs = original_finish(self, scheduler_output, model_runner_output)
        for client_output in client_outputs.values():
            for request_output in client_output.outputs:
                request_output.routed_experts = _take(request_output)
        return client_outputs

    CPUModelRunner.initialize_kv_cache = hooked_make_cache
    CPUModelRunner.execute_model = hooked_execute
    Scheduler.update_from_output = hooked_finish


# Rows lie by slot of the KV cache, and not by request: a prompt that hits the prefix cache is not computed again, so
# its routers are never called for it. What they chose the first time is still in the slots that it hits.
class Routing:
    """The table [slots, layers, experts per token] of one model, filled by its routers."""

    def __init__(self, runner: Any, num_blocks: int) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            _get_routed_experts_shape,
            bind_routed_experts_capturer,
        )

        layer_count, expert_count, per_token = _get_routed_experts_shape(runner.vllm_config)
        self._block = runner.input_batch.block_table[0].block_size
        dtype = np.uint8 if expert_count <= 256 else np.uint16
        self._table = np.zeros((num_blocks * self._block, layer_count, per_token), dtype=dtype)
        bind_routed_experts_capturer(runner.get_model(), self)

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        """Called by a router inside the forward pass: `topk_ids` [tokens, experts per token]."""
        from vllm.forward_context import get_forward_context

        mappings = get_forward_context().slot_mapping
        if not mappings:  # a run without requests
            return
        slot_numbers = next(iter(mappings.values())).numpy()
        # Padding has slot -1, which would write into the table's last row.
        is_real_row = slot_numbers >= 0
        self._table[slot_numbers[is_real_row], layer_id] = topk_ids[: len(slot_numbers)].numpy()[is_real_row]

    def after_step(self, runner: Any, scheduler_output: Any) -> None:
        """Keep the rows of every request that may have sampled in this step."""
        for finished_id in scheduler_output.finished_req_ids:
            _running.pop(finished_id, None)
        input_batch = runner.input_batch
        for request_id, token_count in scheduler_output.num_scheduled_tokens.items():
            batch_row = input_batch.req_id_to_index[request_id]
            end_position = int(input_batch.num_computed_tokens_cpu[batch_row]) + token_count
            request_state = runner.requests[request_id]
            taken = _running.get(request_id)
            if taken is None:
                start = getattr(request_state.sampling_params, "routed_experts_prompt_start", 0)
                taken = _running[request_id] = _Taken(request_state.num_prompt_tokens, start)
            if end_position >= taken.prompt:
                first_position = taken.start if end_position == taken.prompt else end_position - 1
                # Copied out now: an update with recomputed keys, or the next owner of the slot, overwrites these rows
                # before the client has them.
                taken.rows[end_position] = self._rows(input_batch, batch_row, first_position, end_position)

    def _rows(self, batch: Any, index: int, first: int, end: int) -> Any:
        block_numbers = batch.block_table[0].block_table.np[index]
        positions = np.arange(first, end)
        return self._table[block_numbers[positions // self._block] * self._block + positions % self._block]


def _take(output: Any) -> Any:
    """The rows that made this output's tokens, of a request still known; None if it sampled nothing."""
    taken = _running.get(output.request_id)
    if taken is None or not output.new_token_ids:
        return None
    end_positions = range(taken.prompt + taken.sampled, taken.prompt + taken.sampled + len(output.new_token_ids))
    taken.sampled += len(output.new_token_ids)
    expert_rows = [taken.rows.pop(end, None) for end in end_positions]
    # A row that is missing shortens the array, and the client refuses it; an exception here would end the engine.
    return None if any(row is None for row in expert_rows) else np.concatenate(expert_rows)
