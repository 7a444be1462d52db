"""Adds weight versions where vLLM leaves them out: in each chunk of a stream, and in the keys of the prefix cache.

vLLM 0.32 stamps tokens in its engine core but reports the spans with the last chunk only: tokens of a stream that
broke would come without a version. And with KV kept over an update (`clear_cache=false`) its prefix cache would serve
keys and values of the old weights to new requests. Small wrappers fix both; what cannot be wrapped is listed
in `missing` and logged, and the probe sees it.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("vllm.agentrl")

missing: list[str] = []
_installed = False


def install() -> None:
    """Wrap this process's vLLM. Safe to call again."""
    global _installed
    if _installed:
        return
    _installed = True
    for wrapper in (_stamp_every_chunk, _salt_prefix_cache):
        try:
            wrapper()
        # A vLLM that lacks these names is not broken for others: it serves, and `missing` makes the run's probe
        # refuse it with one line.
        except (ImportError, AttributeError) as error:
            missing.append(wrapper.__name__.strip("_"))
            logger.warning("agentrl: this vLLM does not allow %s: %s", missing[-1], error)


def _stamp_every_chunk() -> None:
    """Each output carries the spans of all tokens so far, as the final one does in plain vLLM."""
    from vllm.v1.engine.output_processor import RequestState

    original = RequestState._new_completion_output
    spans_of = RequestState._weight_version_spans

    @functools.wraps(original)
    def stamped(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        if output.weight_versions is None:
            output.weight_versions = spans_of(self)
        return output

    RequestState._new_completion_output = stamped


def _salt_prefix_cache() -> None:
    """Salt the prefix cache: only requests of the weight version that computed a block hit it.

    A request is salted when it is first hashed (in the input thread), again when it enters the scheduler if an update
    came between, and again at an update if nothing of it is computed: new, or sent back for its KV to be recomputed."""
    from vllm.v1.engine.core import EngineCore

    preprocess, add_request, set_version = (
        EngineCore.preprocess_add_request,
        EngineCore.add_request,
        EngineCore.set_weight_version,
    )

    @functools.wraps(preprocess)
    def salted_preprocess(self, request):
        request.cache_salt = _salt(self, request.cache_salt)
        return preprocess(self, request)

    @functools.wraps(add_request)
    def salted_add(self, request, *args, **kwargs):
        _resalt(self, request)
        return add_request(self, request, *args, **kwargs)

    @functools.wraps(set_version)
    def salted_set_version(self, weight_version):
        set_version(self, weight_version)
        for request in self.scheduler.requests.values():
            if request.num_computed_tokens == 0:
                _resalt(self, request)

    EngineCore.preprocess_add_request = salted_preprocess
    EngineCore.add_request = salted_add
    EngineCore.set_weight_version = salted_set_version


def _salt(core, own: str | None) -> str:
    # The client's own salt stays a part of it: it separates tenants, and ours separates versions.
    return f"{core._weight_version}/{own or ''}"


def _resalt(core, request) -> None:
    _, _, own_salt = (request.cache_salt or "/").partition("/")
    current_salt = _salt(core, own_salt)
    if request.cache_salt != current_salt:
        request.cache_salt = current_salt
        # The hashes were made with the older salt, in the input thread, before the update reached the scheduler.
        request.block_hashes.clear()
        request.update_block_hashes()
