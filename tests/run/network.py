"""Hosts of a network of their own on this machine: network namespaces, and a switch between them that delays, loses and
keeps back what they send. Nothing of it reaches another network, and all of it is gone when its processes are.

The switch is a process (`python network.py NAME=DEVICE ...`): it holds the other end of each host's TAP device, carries
Ethernet frames by their address, and takes orders on its standard input, one a line:

    delay SECONDS       of each frame, one way
    loss SHARE          of frames
    cut NAME            no frame from or to this host arrives; `mend NAME` ends it
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence

_SET_INTERFACE, _TAP, _BARE = 0x400454CA, 0x0002, 0x1000
_NET = "10.99.0"
_DEADLINE_S = 300


class Network:
    """Hosts by name, each with an address; made by `hosts`."""

    def __init__(self, holders: Mapping[str, subprocess.Popen[bytes]], switch: subprocess.Popen[bytes]) -> None:
        self._holders, self._switch = holders, switch
        self.address = {name: f"{_NET}.{at}" for at, name in enumerate(holders, 1)}

    def on(self, name: str, *command: object) -> list[str]:
        """The command line that runs a command on a host."""
        return ["nsenter", "--net", "--target", str(self._holders[name].pid), *map(str, command)]

    def enter(self, name: str) -> None:
        """From now on, connections that this thread makes are made from a host."""
        with open(f"/proc/{self._holders[name].pid}/ns/net") as namespace:  # noqa: PTH123 - a descriptor is wanted
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def order(self, *words: object) -> None:
        """Tell the switch, as the module's text says."""
        assert self._switch.stdin is not None
        self._switch.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self._switch.stdin.flush()


@contextlib.contextmanager
def hosts(*names: str) -> Generator[Network]:
    """A network of these hosts until the end of the block. Needs root."""
    devices = {name: f"ag{os.getpid() % 100_000}x{at}" for at, name in enumerate(names)}
    with contextlib.ExitStack() as stack:

        def started(*command: str) -> subprocess.Popen[bytes]:
            pipe = subprocess.PIPE
            process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe))
            stack.callback(process.kill)
            return process

        holders = {name: started("unshare", "--net", "sh", "-c", "echo; exec sleep infinity") for name in names}
        words = [f"{name}={device}" for name, device in devices.items()]
        switch = started(sys.executable, __file__, *words)
        for process in (*holders.values(), switch):
            assert process.stdout is not None and process.stdout.readline(), "a host or the switch did not start"
        network = Network(holders, switch)
        for name, device in devices.items():
            _run("ip", "link", "set", device, "netns", str(holders[name].pid))
            _run(*network.on(name, "ip", "link", "set", "lo", "up"))
            _run(*network.on(name, "ip", "address", "add", f"{network.address[name]}/24", "dev", device))
            _run(*network.on(name, "ip", "link", "set", device, "up"))
        yield network


def missing() -> str | None:
    """Why this machine can have no such network; None if it can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        with hosts("a"):
            return None
    except (OSError, AssertionError, subprocess.SubprocessError) as error:
        return f"network namespaces or TAP devices do not work here: {error}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


# --- the switch -------------------------------------------------------------------------------------------------


def _carry(devices: Mapping[str, str]) -> None:
    ends: dict[int, str] = {}
    for name, device in devices.items():
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH", device.encode(), _TAP | _BARE))
        ends[end] = name
    print("ready", flush=True)
    os.set_blocking(0, False)
    chance, places = random.Random(0), dict[bytes, int]()
    waiting: list[tuple[float, int, int, bytes]] = []
    delay_s, loss, cut, number = 0.0, 0.0, set[str](), 0
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([0, *ends], [], [], left)
        if 0 in ready:
            text = os.read(0, 1 << 12)
            if not text:
                return
            for line in text.decode().splitlines():
                order, word = line.split()
                if order == "delay":
                    delay_s = float(word)
                elif order == "loss":
                    loss = float(word)
                else:
                    (cut.add if order == "cut" else cut.discard)(word)
        for end in ready:
            if end == 0:
                continue
            frame = os.read(end, 1 << 16)
            places[frame[6:12]] = end
            to = [places[frame[:6]]] if frame[:6] in places else [other for other in ends if other != end]
            for other in to:
                if not {ends[end], ends[other]} & cut and chance.random() >= loss:
                    number += 1
                    heapq.heappush(waiting, (time.monotonic() + delay_s, number, other, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, other, frame = heapq.heappop(waiting)
            if ends[other] not in cut:
                with contextlib.suppress(OSError):  # the device is not up yet, or its queue is full
                    os.write(other, frame)


def main(arguments: Sequence[str]) -> None:
    _carry(dict(word.split("=") for word in arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
