"""The process of every rank but rank 0, which `ranks.Leader` starts: `python -m agentrl.learner.parallel.rank_process`.

It joins the process group, makes a worker when rank 0 orders one, and carries out the orders of rank 0 on it. An error
goes to rank 0, and ends it. It ends at once when rank 0 has ended.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentrl.host.quick_imports import quick_imports

with quick_imports():
    import torch

    from agentrl.learner.parallel.collectives import Ledger
    from agentrl.learner.parallel.ranks import RankOrder, RankReply, join, receive, send
    from agentrl.learner.rank_orders import BuildWorker
    from agentrl.learner.rank_worker import RankWorker


def serve(
    line: Connection[Any, Any], ledger: Ledger, rank: int, size: int, meeting: Path, device: str, wait_s: float
) -> None:
    """Do what rank 0 says on `line`, until it ends the process."""
    order_queue: queue.SimpleQueue[BuildWorker | RankOrder[RankWorker, object]] = queue.SimpleQueue()
    # A thread, since the main one may be inside a collective for a long time: when rank 0 ends, its end of the socket
    # closes, and this thread ends the process (law 4).
    threading.Thread(target=_listen, args=(line, order_queue), name="orders", daemon=True).start()
    send(line, RankReply())
    try:
        torch_device = torch.device(device)
        rank_member = join(ledger, meeting, rank=rank, size=size, device=torch_device, deadline_s=wait_s)
        rank_worker: RankWorker | None = None
        while True:
            next_order = order_queue.get()
            if isinstance(next_order, BuildWorker):
                rank_worker = next_order.build(torch_device, rank_member)
                send(line, RankReply())
            else:
                assert rank_worker is not None, "rank 0 has its learner built first"
                send(line, RankReply(next_order.run(rank_worker)))
    except Exception as order_error:  # whatever it is, rank 0 must know before this process ends
        traceback.print_exc()
        error_line = f"{type(order_error).__name__}: {next(iter(str(order_error).splitlines()), '')}"
        send(line, RankReply(error=error_line, in_collective=ledger.standings()[rank].inside))
        os._exit(1)  # torch's threads may wait for ranks that have ended


def _listen(line: Connection[Any, Any], orders: queue.SimpleQueue[Any]) -> None:
    """Hand on the orders; when rank 0 has ended, so does this process, wherever it waits."""
    while True:
        try:
            orders.put(receive(line))
        except (EOFError, OSError):
            os._exit(70)


def main() -> None:
    rank, rank_count, line_descriptor, ledger_descriptor, meeting_path, device_name, wait_s = sys.argv[1:]
    # Ctrl-C reaches all processes of a terminal. Rank 0 decides what it means, and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)  # as every child of a run: it writes its stacks to its log
    own_ledger = Ledger(int(ledger_descriptor), int(rank), int(rank_count))
    serve(
        Connection(int(line_descriptor)),
        own_ledger,
        int(rank),
        int(rank_count),
        Path(meeting_path),
        device_name,
        float(wait_s),
    )


if __name__ == "__main__":
    main()
