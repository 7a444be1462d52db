"""The part of agentrl inside vLLM's processes: `register` is the entry point of the group `vllm.general_plugins`.

vLLM calls it in each of its processes (HTTP front end, engine core, workers), possibly more than once. It adds

- `shm`, a weight-transfer backend that loads safetensors files (`transfer`), with the CPU build's silent bugs fixed;
- a swap of weights that were staged while the engine generates (`staging`), in one call between two passes (`publish`);
- weight versions in every chunk of a stream, and prefix caches salted by version (`versions`);
- walls around the files that a request may name (`reading`);
- the experts chosen per token on CPU, where vLLM itself has no such thing (`routing`);
- the set that each token was drawn from on CPU, likewise (`sets`).

Importing this package loads neither vllm nor torch.
"""

from __future__ import annotations

import os

BACKEND = "shm"
EXTENSION = "agentrl.engine.vllm.plugin.worker_extension.WorkerExtension"
GUARD = "agentrl.engine.auth.Guard"

CPU_FIXES_VARIABLE = "AGENTRL_VLLM_CPU_FIXES"
ROUTING_VARIABLE = "AGENTRL_VLLM_ROUTING"
HOST_VARIABLE = "AGENTRL_VLLM_HOST"
SOURCES_VARIABLE = "AGENTRL_VLLM_WEIGHTS_FROM"
INBOX_VARIABLE = "AGENTRL_VLLM_INBOX"


def register() -> None:
    """Add everything to this process. Safe to call again."""
    # Imported here, and not above: vLLM calls `register` in its front end too, where torch must not be loaded for it,
    # and the client of this project reads the constants above without vLLM.
    from agentrl.engine.vllm.plugin import (
        file_transfer,
        read_weights,
        routed_experts,
        sampling_masks,
        swap_weights,
        version_stamps,
    )

    # First: whatever fails below, no process of a dead server stays behind with a GPU.
    _die_with_parent()
    read_weights.decide()
    read_weights.install()
    file_transfer.register()
    version_stamps.install()
    swap_weights.install()
    sampling_masks.allow()
    if os.environ.get(ROUTING_VARIABLE) == "1":
        routed_experts.install()


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, if a `host` of ours started the server (law 4).

    The host itself lives by its lifeline; the processes that vLLM starts from it live by this."""
    host_pid = os.environ.get(HOST_VARIABLE)
    if host_pid is None or host_pid == str(os.getpid()):
        return
    import ctypes
    import multiprocessing
    import signal

    pr_set_pdeathsig = 1
    # The kernel's promise, and not a thread that polls: a worker that hangs inside a collective runs no Python, and
    # would hold its GPU for ever.
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()  # None for a program that vLLM started otherwise
    if os.getppid() == 1 if parent is None else os.getppid() != parent.pid:  # it died before this call
        os.kill(os.getpid(), signal.SIGKILL)
