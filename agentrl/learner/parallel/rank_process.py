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
    orders: queue.SimpleQueue[BuildWorker | RankOrder[RankWorker, object]] = queue.SimpleQueue()
    # A thread, since the main one may be inside a collective for a long time: when rank 0 ends, its end of the socket
    # closes, and this thread ends the process (law 4).
    threading.Thread(target=_listen, args=(line, orders), name="orders", daemon=True).start()
    send(line, RankReply())
    try:
        where = torch.device(device)
        member = join(ledger, meeting, rank=rank, size=size, device=where, deadline_s=wait_s)
        worker: RankWorker | None = None
        while True:
            order = orders.get()
            if isinstance(order, BuildWorker):
                worker = order.build(where, member)
                send(line, RankReply())
            else:
                assert worker is not None, "rank 0 has its learner built first"
                send(line, RankReply(order.run(worker)))
    except Exception as error:  # whatever it is, rank 0 must know before this process ends
        traceback.print_exc()
        text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        send(line, RankReply(error=text, in_collective=ledger.standings()[rank].inside))
        os._exit(1)  # torch's threads may wait for ranks that have ended


def _listen(line: Connection[Any, Any], orders: queue.SimpleQueue[Any]) -> None:
    """Hand on the orders; when rank 0 has ended, so does this process, wherever it waits."""
    while True:
        try:
            orders.put(receive(line))
        except (EOFError, OSError):
            os._exit(70)


def main() -> None:
    rank, size, line, ledger, meeting, device, wait_s = sys.argv[1:]
    # Ctrl-C reaches all processes of a terminal. Rank 0 decides what it means, and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)  # as every child of a run: it writes its stacks to its log
    own_ledger = Ledger(int(ledger), int(rank), int(size))
    serve(Connection(int(line)), own_ledger, int(rank), int(size), Path(meeting), device, float(wait_s))


if __name__ == "__main__":
    main()
