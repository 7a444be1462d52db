"""Work that other ranks than 0 do on a thread beside the next orders, and how rank 0 waits for it.

Owns a few keys in the ranks' store for each such work. Never knows what it is. No collective is entered: these are the
steps' own.
"""

# pyright: reportPrivateImportUsage=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable

from torch import distributed

from agentrl.errors import RankLost, RunFailed

_LOOK_S = 0.05


def begin(store: distributed.Store, key: str, rank: int, work: Callable[[Callable[[], object]], None]) -> None:
    """Do `work` on a thread, which is given what to call when some of it is done, and tell rank 0 how it ended."""
    threading.Thread(target=_work, args=(store, key, rank, work), name="beside", daemon=True).start()


def _work(store: distributed.Store, key: str, rank: int, work: Callable[[Callable[[], object]], None]) -> None:
    failure: tuple[int | None, str] | None = None
    try:
        work(lambda: store.add(_progress(key, rank), 1))
    except Exception as error:  # whatever it is, rank 0 must know
        failure = getattr(error, "errno", None), f"{type(error).__name__}: {error}"
    store.set(_end(key, rank), json.dumps(failure))


def settle(
    store: distributed.Store,
    key: str,
    ranks: Iterable[int],
    *,
    why_ended: Callable[[int], str | None],
    where: Callable[[int], str],
    deadline_s: float,
    progress: Callable[[], None],
) -> None:
    """On rank 0: wait until the work of each rank has ended well. `why_ended` tells why a rank has ended, if it has;
    `where` it stands, if it has not got on for `deadline_s`. `progress` is called whenever one gets on. Raises
    RankLost; OSError for one that a rank had; RunFailed for another error."""
    for rank in ranks:
        seen, since = 0, time.monotonic()
        while not store.check([_end(key, rank)]):
            if ended := why_ended(rank):
                raise RankLost(f"{ended}. It had not written its part of a checkpoint")
            if (now := _count(store, _progress(key, rank))) != seen:
                seen, since = now, time.monotonic()
                progress()
            elif time.monotonic() - since > deadline_s:
                raise RankLost(
                    f"{where(rank)}. It wrote nothing of its part of a checkpoint for {deadline_s:g} s "
                    "(train.parallel.deadline_s)"
                )
            time.sleep(_LOOK_S)
        error = json.loads(store.get(_end(key, rank)))
        for used in (_end(key, rank), _progress(key, rank)):
            store.delete_key(used)
        if error is not None:
            number, text = error
            message = f"rank {rank} could not write its part of a checkpoint: {text}"
            raise RunFailed(message) if number is None else OSError(number, message)


def _count(store: distributed.Store, key: str) -> int:
    """What has been added up there; a look that adds 0 would let the store's file grow."""
    return int(store.get(key)) if store.check([key]) else 0


def _end(key: str, rank: int) -> str:
    return f"{key}: end of rank {rank}"


def _progress(key: str, rank: int) -> str:
    return f"{key}: progress of rank {rank}"
