"""Commands run on this machine with no wall around them: for machines without a sandbox, and for trusted policies.

Same protocol as the real backends. Bounded are wall time (SIGKILL to the process group; a process that makes a
session of its own escapes), output, and by rlimits cpu time, address space, open files, file size and core dumps. Not
bounded are the file system, the network, the number of processes, memory and disk of the whole.
"""

from __future__ import annotations

import math
from pathlib import Path

from agentrl.errors import SandboxError
from agentrl.host.platform_checks import default_sandbox, is_linux
from agentrl.host.user_warnings import warn
from agentrl.protocols import SandboxSpec
from agentrl.sandbox.wrapped_process import ProcessBackend

_WARNING = (
    "sandbox 'local-unsafe': commands of the policy run on this machine WITHOUT a sandbox; "
    f"use the backend {default_sandbox()!r}"
)


class LocalUnsafe(ProcessBackend):
    """Commands run on this machine with no wall around them; warns once a process. Of a spec, `image` must be None
    and `network` is always open."""

    name = "local-unsafe"
    _warned = False

    def check(self, spec: SandboxSpec) -> None:
        if spec.image is not None:
            raise SandboxError(f"local-unsafe has no images, got {spec.image!r}; use bubblewrap or docker")
        if not LocalUnsafe._warned:
            LocalUnsafe._warned = True
            warn(_WARNING)

    def wrap(self, command: list[bytes], spec: SandboxSpec, folder: Path) -> list[bytes]:
        limits = spec.limits
        ulimit_commands = f"ulimit -t {math.ceil(limits.cpu_s)}; ulimit -n {limits.open_files}; ulimit -c 0; "
        ulimit_commands += f"ulimit -f {limits.file_bytes // 512}; "
        if is_linux():
            ulimit_commands += f"ulimit -v {limits.memory_bytes // 1024}; "
        # A shell's `ulimit` and no `preexec_fn`: that one runs Python between fork and exec in a process with threads,
        # where a lock that another thread held stays locked for ever.
        return [b"/bin/sh", b"-c", f'{ulimit_commands}exec "$@"'.encode(), b"sandbox", *command]
