"""Orders from rank 0 to the other ranks, and their replies.

Every rank has a worker (`agentrl.learner.rank_worker`). Rank 0 calls `run` with an order for each rank: all carry out
theirs at the same time and meet in its collectives; rank 0 gets what each returned. Between two orders the others wait,
without any deadline. Within one, each collective has a deadline: if a rank is dead, stopped or late, rank 0 raises
`RankLost` which names it, and the ranks end. Nothing is left to fix: whoever owns rank 0 starts it again, with
new ranks.

An order and a reply are pickled over a socket, whose end is also the lifeline of the other rank: it ends when rank 0
has ended, however that ended. Work beside the next orders runs on a thread of the other ranks, enters no collective,
and reports by a few keys of the ranks' store (`begin_work`, `settle_work`).
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import debug

from agentrl.config.train import ParallelPlan
from agentrl.errors import AgentRLError, RankLost, RunFailed
from agentrl.host.child_environment import SECRETS
from agentrl.host.janitor import OwnedFolder
from agentrl.host.platform_checks import is_stopped, loopback
from agentrl.learner.data.prefix_trees import Pack
from agentrl.learner.parallel import collectives
from agentrl.learner.parallel.collectives import Ledger, Meshes, Teams, table, teams
from agentrl.learner.parallel.fsdp import shard, spread
from agentrl.learner.parallel.pass_shards import Portion, Span, portion


@dataclass(frozen=True, slots=True)
class RankReply:
    """A rank's result or error. `in_collective`: it failed inside a collective, perhaps only because another rank
    failed."""

    value: object = None
    error: str | None = None
    in_collective: bool = False


def send(line: Connection[Any, Any], what: object) -> None:
    """Send an object by value: torch would have tensors shared between the processes, by files."""
    # Pickle is safe here: the socket is a pair that only these two processes have. The store in `join` lies in a file
    # for the same reason.
    line.send_bytes(pickle.dumps(what))


def receive(line: Connection[Any, Any]) -> Any:
    return pickle.loads(line.recv_bytes())


# pyright: reportPrivateImportUsage=false
# (torch leaves parts of its signatures untyped)


_PROGRESS_LOOK_S = 0.05


def begin_work(store: distributed.Store, key: str, rank: int, work: Callable[[Callable[[], object]], None]) -> None:
    """Do `work` on a thread, and report to rank 0 how it ended. `work` calls its argument when some of it is done."""
    threading.Thread(target=_work, args=(store, key, rank, work), name="beside", daemon=True).start()


def _work(store: distributed.Store, key: str, rank: int, work: Callable[[Callable[[], object]], None]) -> None:
    failure: tuple[int | None, str] | None = None
    try:
        work(lambda: store.add(_progress(key, rank), 1))
    except Exception as work_error:  # whatever it is, rank 0 must know
        failure = getattr(work_error, "errno", None), f"{type(work_error).__name__}: {work_error}"
    store.set(_end(key, rank), json.dumps(failure))


def settle_work(
    store: distributed.Store,
    key: str,
    ranks: Iterable[int],
    *,
    why_ended: Callable[[int], str | None],
    where: Callable[[int], str],
    deadline_s: float,
    progress: Callable[[], None],
) -> None:
    """Wait on rank 0 until the work of each rank has ended well. `why_ended` says why a rank has ended, if it has;
    `where` it stands, if it has not got on for `deadline_s`. `progress` is called whenever one gets on. Raises
    RankLost; OSError for one that a rank had; RunFailed for another error."""
    for rank in ranks:
        seen_count, last_progress = 0, time.monotonic()
        while not store.check([_end(key, rank)]):
            if end_reason := why_ended(rank):
                raise RankLost(f"{end_reason}. It had not written its part of a checkpoint")
            if (progress_count := _count(store, _progress(key, rank))) != seen_count:
                seen_count, last_progress = progress_count, time.monotonic()
                progress()
            elif time.monotonic() - last_progress > deadline_s:
                raise RankLost(
                    f"{where(rank)}. It wrote nothing of its part of a checkpoint for {deadline_s:g} s "
                    "(half of train.progress_deadline_s)"
                )
            time.sleep(_PROGRESS_LOOK_S)
        work_failure = json.loads(store.get(_end(key, rank)))
        for used_key in (_end(key, rank), _progress(key, rank)):
            store.delete_key(used_key)
        if work_failure is not None:
            error_number, error_line = work_failure
            message = f"rank {rank} could not write its part of a checkpoint: {error_line}"
            raise RunFailed(message) if error_number is None else OSError(error_number, message)


def _count(store: distributed.Store, key: str) -> int:
    """Read the counter `key`; a look that adds 0 would let the store's file grow."""
    return int(store.get(key)) if store.check([key]) else 0


def _end(key: str, rank: int) -> str:
    return f"{key}: end of rank {rank}"


def _progress(key: str, rank: int) -> str:
    return f"{key}: progress of rank {rank}"


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false
# (torch leaves parts of its signatures untyped)


_LOOK_S = 0.5
_EVIDENCE_S = 2.0  # in which a rank that died, or failed, is seen to have
_PATIENCE = timedelta(days=1)  # of other ranks than 0, which end with it
_GRACE_S = 15.0  # by which a call that no deadline of torch's ends may be late


W = TypeVar("W")
W_contra = TypeVar("W_contra", contravariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class RankOrder(Protocol[W_contra, T_co]):
    """Something for one rank to do, as plain data: it is pickled. Its kinds are in `agentrl.learner.rank_orders`."""

    def run(self, worker: W_contra, /) -> T_co:
        """Carry it out on the worker of this rank."""
        ...


class Ranks(Protocol):
    """The learner's view of the ranks; `rank` is its own. On others than rank 0, `building` and `close` do nothing, and
    nobody calls `run`. `team` of them, neighbours, compute each pass together; of each layer a rank has one of `tensor`
    parts."""

    rank: int
    size: int

    @property
    def tensor(self) -> int: ...

    @property
    def team(self) -> int: ...

    def building(self, order: object) -> AbstractContextManager[None]:
        """Inside, each other rank makes its worker, as `order` says, and this one its own."""
        ...

    def arrange(self, plan: ParallelPlan) -> None:
        """Cut models as a run file says, from now on. All ranks call it together."""
        ...

    def portion(self, pack: Pack, span: Span | None = None) -> Portion:
        """This rank's share of a pass of its team, or of its stem, or of all nodes after that."""
        ...

    def spread(self, module: nn.Module) -> None:
        """Make the tensors that this rank's shards of a model on the meta device are to be read into."""
        ...

    def cut(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        """Leave this rank only its shard of a model, spread or whole, whose passes compute in `dtype`. All ranks leave
        it together."""
        ...

    def run(self, worker: W, orders: Sequence[RankOrder[W, T]]) -> list[T]:
        """Have each rank carry out its order, this one on `worker`. Returns the results by rank."""
        ...

    def beside(self, key: str, work: Callable[[Callable[[], object]], None]) -> None:
        """Do `work` on a thread of another rank than 0, while orders go on; it calls its argument as it gets on."""
        ...

    def settle(self, key: str, progress: Callable[[], None]) -> None:
        """Wait on rank 0, on any thread, until each other rank has done its work `key`: see `settle_work`."""
        ...

    def close(self) -> None: ...


class Alone:
    """One rank: nothing is cut, nothing is sent."""

    rank, size, tensor, team = 0, 1, 1, 1

    def building(self, order: object) -> AbstractContextManager[None]:
        return nullcontext()

    def arrange(self, plan: ParallelPlan) -> None: ...
    def spread(self, module: nn.Module) -> None: ...
    def cut(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None: ...
    def beside(self, key: str, work: Callable[[Callable[[], object]], None]) -> None: ...
    def settle(self, key: str, progress: Callable[[], None]) -> None: ...
    def close(self) -> None: ...

    def portion(self, pack: Pack, span: Span | None = None) -> Portion:
        return Portion.whole(pack, span)

    def run(self, worker: W, orders: Sequence[RankOrder[W, T]]) -> list[T]:
        return [orders[0].run(worker)]


ALONE = Alone()


@dataclass(slots=True)
class RankMember:
    """A rank's own end of the process group."""

    rank: int
    size: int
    timeout: timedelta
    meshes: Meshes
    store: distributed.Store
    cuts: int = 0
    tables: dict[tuple[str, int], DeviceMesh] = field(default_factory=dict[tuple[str, int], DeviceMesh])
    teams: dict[tuple[int, int], Teams] = field(default_factory=dict[tuple[int, int], Teams])

    @property
    def tensor(self) -> int:
        return 1 if self.meshes.tensor is None else self.meshes.tensor.size(1)

    @property
    def team(self) -> int:
        return 1 if self.meshes.team is None else distributed.get_world_size(self.meshes.team)

    def building(self, order: object) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None: ...

    def arrange(self, plan: ParallelPlan) -> None:
        tensor_mesh = self._table("data", "tensor", plan.tensor)
        expert_mesh = self._table("copies", "expert", plan.expert)
        context_group, team_group = None, None if tensor_mesh is None else tensor_mesh.get_group("tensor")
        if plan.context > 1:
            team_shape = plan.context, plan.tensor
            if team_shape not in self.teams:
                self.teams[team_shape] = teams(self.rank, self.size, *team_shape, self.timeout)
            context_group, team_group = self.teams[team_shape]
        self.meshes = replace(
            self.meshes, tensor=tensor_mesh, expert=expert_mesh, context=context_group, team=team_group
        )

    def _table(self, column: str, row: str, width: int) -> DeviceMesh | None:
        if width == 1:
            return None
        if (row, width) not in self.tables:
            device_type = self.meshes.ranks.device_type
            self.tables[row, width] = table((column, row), self.rank, self.size, width, self.timeout, device_type)
        return self.tables[row, width]

    def portion(self, pack: Pack, span: Span | None = None) -> Portion:
        return portion(pack, self.meshes, span)

    def spread(self, module: nn.Module) -> None:
        spread(module, self.meshes)

    def cut(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        shard(module, self.meshes, dtype)
        self.store.wait([self.arrive()], _PATIENCE)

    def arrive(self) -> str:
        """This rank has cut another model. The key that the store has when all have: one may read for much longer than
        another, and a collective has a deadline."""
        self.cuts += 1
        store_key = f"all have cut model {self.cuts}"
        if self.store.add(f"ranks that have cut model {self.cuts}", 1) == self.size:
            self.store.set(store_key, "")
        return store_key

    def beside(self, key: str, work: Callable[[Callable[[], object]], None]) -> None:
        begin_work(self.store, key, self.rank, work)

    def settle(self, key: str, progress: Callable[[], None]) -> None: ...

    def run(self, worker: W, orders: Sequence[RankOrder[W, T]]) -> list[T]:
        raise RuntimeError("only rank 0 gives orders")


def join(ledger: Ledger, meeting: Path, *, rank: int, size: int, device: torch.device, deadline_s: float) -> RankMember:
    """Become rank `rank` of the process group whose store is the file `meeting`, which only this user can open: a store
    of torch's that listens on a port takes orders from everybody."""
    collectives.keep(ledger)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())  # else gloo listens where the host's name leads
    is_on_gpu = device.type == "cuda"
    if is_on_gpu:
        torch.cuda.set_device(device)
    file_store = distributed.FileStore(str(meeting), size)
    file_store.set_timeout(timedelta(seconds=deadline_s))
    # NCCL's own watchdog would end the process without a word on who is missing: ours comes before it.
    timeout = timedelta(seconds=2 * (deadline_s + _GRACE_S) if is_on_gpu else deadline_s)
    backend = "cpu:gloo,cuda:nccl" if is_on_gpu else "gloo"
    with collectives.named("meeting"):
        distributed.init_process_group(backend, store=file_store, rank=rank, world_size=size, timeout=timeout)
        return RankMember(rank, size, timeout, Meshes(init_device_mesh(device.type, (size,))), file_store)


@dataclass(slots=True)
class OtherRank:
    """Another rank, as rank 0 sees it."""

    process: subprocess.Popen[bytes]
    line: Connection[Any, Any]
    failed: RankReply | None = None

    def read(self) -> object:
        """Read a reply. Raises RuntimeError for an error of that rank."""
        rank_reply: RankReply = receive(self.line)
        if rank_reply.error is not None:
            self.failed = rank_reply
            raise RuntimeError(rank_reply.error)
        return rank_reply.value


class RankWatch:
    """Sees on rank 0 whether the ranks get on, and finds out which of them is lost."""

    def __init__(
        self,
        ledger: Ledger,
        others: Sequence[OtherRank],
        *,
        deadline_s: float,
        progress: Callable[[], None],
        ends: Callable[[str], None] | None,
    ) -> None:
        """The arguments are those of `Leader`."""
        self._ledger, self._others, self._deadline_s = ledger, others, deadline_s
        self._progress, self._ends, self._size = progress, ends, len(others) + 1
        self._seen, self._seen_at, self._is_busy = [0] * self._size, time.monotonic(), False

    @contextmanager
    def busy(self) -> Generator[None]:
        """Inside, ranks are expected to get on."""
        self._seen_at, self._is_busy = time.monotonic(), True
        try:
            yield
        finally:
            self._is_busy = False

    def advanced(self) -> bool:
        """Whether some rank has entered a collective since the last call."""
        collective_counts = [standing.count for standing in self._ledger.standings()]
        if collective_counts == self._seen:
            return False
        self._seen, self._seen_at = collective_counts, time.monotonic()
        self._progress()
        return True

    def run(self, closed: threading.Event) -> None:
        """Note that ranks get on while this one waits; end the process if torch does not come back."""
        while not closed.wait(_LOOK_S):
            if not self._is_busy or self.advanced() or time.monotonic() - self._seen_at < self._deadline_s + _GRACE_S:
                continue
            standings = self._ledger.standings()
            # Time alone proves nothing: rank 0 may compute for long between two collectives, with all ranks at the same
            # one.
            if standings[0].inside or len({standing.count for standing in standings}) > 1:
                rank_lost = self.lost(TimeoutError())
                if self._ends is not None:
                    self._ends(str(rank_lost))
                return

    def lost(self, error: BaseException) -> RankLost | None:
        """Explain a failed collective by the strongest evidence that the next moments bring; None if no rank is to
        blame."""
        evidence_until = time.monotonic() + _EVIDENCE_S
        while True:
            for other_rank in self._others:
                with suppress(RuntimeError, OSError, EOFError):
                    while other_rank.failed is None and other_rank.line.poll():
                        other_rank.read()
            # A rank that died makes others fail in their collective. Its own end is the cause, and their failures
            # are no reasons here.
            possible_reasons = [self.why_ended(rank) for rank in range(1, self._size)]
            standings = self._ledger.standings()
            furthest_count = max(standing.count for standing in standings)
            if end_reasons := [end_reason for end_reason in possible_reasons if end_reason]:
                return RankLost("; ".join(end_reasons))
            if time.monotonic() > evidence_until:
                break
            time.sleep(0.05)
        if not (standings[0].inside or isinstance(error, EOFError | TimeoutError | BlockingIOError | ConnectionError)):
            return None  # its own: a full disk, say
        missing_ranks = [rank for rank, standing in enumerate(standings) if standing.count < furthest_count]
        furthest = next(standing for standing in standings if standing.count == furthest_count)
        late_ranks = "; ".join(self.where(rank) for rank in missing_ranks or range(1, self._size))
        return RankLost(
            f"{late_ranks}. It did not come to {furthest.name!r}, collective {furthest_count}, within "
            f"{self._deadline_s:g} s (half of train.progress_deadline_s): {_first_line(error)}"
        )

    def why_ended(self, rank: int) -> str | None:
        """Why a rank ended, if it did by itself."""
        other_rank = self._others[rank - 1]
        if other_rank.failed is not None:
            return None if other_rank.failed.in_collective else f"rank {rank} failed: {other_rank.failed.error}"
        exit_status = other_rank.process.poll()
        if exit_status is None:
            return None
        end_cause = signal.Signals(-exit_status).name if exit_status < 0 else f"exit status {exit_status}"
        standing = self._ledger.standings()[rank]
        return (
            f"rank {rank} of {self._size} ended by {end_cause} {'in' if standing.inside else 'after'} {standing.name!r}"
        )

    def where(self, rank: int) -> str:
        """The last collective of a rank."""
        standing = self._ledger.standings()[rank]
        process_id = os.getpid() if rank == 0 else self._others[rank - 1].process.pid
        stopped_note = " is stopped" if is_stopped(process_id) else ""
        return (
            f"rank {rank} of {self._size} (process {process_id}){stopped_note}, last in {standing.name!r}, "
            f"collective {standing.count}"
        )


# Why rank 0 gives orders, and why no rank is replaced in the middle of a step.
#
# The usual way is one program that all ranks run: each reads its data, makes its decisions and meets the others in
# collectives. That works as long as all decide alike. A learner here takes groups from a store that changes while it
# reads, waits for some of them, judges, skips and saves. If each rank did so by itself, two ranks could see two states
# of the store. One would take a group that the other leaves out, and they would wait for each other in different
# collectives. A group could also enter the loss on one rank only (law 2).
#
# So one process decides, and it is the learner as it would be without ranks. Each order is plain data with everything
# that a rank needs for it. All ranks get theirs and carry them out at the same time; between two orders they know
# nothing and decide nothing. The price is that rank 0 packs and sends what the others compute on, and that they are
# idle while it thinks.
#
# A rank that died could be replaced, and the step could go on. But nobody can tell how far the others have come: one
# may have added up a gradient or changed a weight that another one has not. So every error inside of an order ends all
# ranks, and whoever owns rank 0 starts it again from its checkpoint, the last point at which all ranks were known to
# agree (law 2). The price is the work since then.
#
# A wait in a collective looks alike for every cause. `_lost` therefore collects evidence for a moment before it raises:
# an exit status, an error that a rank has sent, then the ledger, which shows who has entered which collective. The
# error names the rank (law 4). `tests/learner/test_ranks.py` compares two ranks with one,
# `tests/learner/test_ranks_lost.py` stops and kills one of them, and `tests/attacks/test_ranks.py` tries to give orders
# as another user.
class Leader:
    """Rank 0's end: starts the others, and ends them. At most one in a process."""

    rank = 0

    def __init__(
        self,
        devices: Sequence[torch.device],
        *,
        deadline_s: float,
        start_s: float,
        progress: Callable[[], None] = lambda: None,
        ends: Callable[[str], None] | None = None,
    ) -> None:
        """Rank i is on `devices[i]`. `deadline_s` bounds a collective, `start_s` the start of a process and the loading
        of its models. `progress` is called as long as some rank makes progress. A rank may be lost while this process
        is inside a call of torch that does not return, so that RankLost cannot be raised: then `ends` is called, on a
        thread, with the reason, and has to end the process. Raises RankLost."""
        self.size, self._deadline_s, self._start_s = len(devices), deadline_s, start_s
        self._progress, self._closed = progress, threading.Event()
        meeting_folder = OwnedFolder()
        weakref.finalize(self, meeting_folder.close)  # not in `close`: another thread may still ask the store
        store_path = meeting_folder.path / "store"
        with tempfile.TemporaryFile() as ledger_file:
            self.ledger = Ledger(ledger_file.fileno(), 0, self.size)
            self._others = [
                self._start(rank, ledger_file.fileno(), (store_path, str(device)))
                for rank, device in enumerate(devices)
                if rank
            ]
        self._watch = RankWatch(self.ledger, self._others, deadline_s=deadline_s, progress=progress, ends=ends)
        try:
            with self._working():
                for rank in range(1, self.size):
                    self._reply(rank, start_s)  # they have loaded torch
                own_device = devices[0]
                self._member = join(
                    self.ledger, store_path, rank=0, size=self.size, device=own_device, deadline_s=deadline_s
                )
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch.run, args=(self._closed,), name="ranks", daemon=True).start()

    def _start(self, rank: int, ledger: int, arguments: tuple[Path, str]) -> OtherRank:
        own_socket, rank_socket = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a rank that is stopped takes and gives nothing
            # A timeout of the kernel's: `send_bytes` of a large order blocks inside a system call that no Python
            # deadline reaches.
            own_socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(self._deadline_s) + 1, 0))
        arguments_of_rank = [rank, self.size, rank_socket.fileno(), ledger, *arguments, self._deadline_s]
        with rank_socket:
            rank_process = subprocess.Popen(
                [sys.executable, "-m", "agentrl.learner.parallel.rank_process", *map(str, arguments_of_rank)],
                stdin=subprocess.DEVNULL,
                pass_fds=(rank_socket.fileno(), ledger),
                env={
                    # A rank computes; it needs no key of an engine or a store, and its environment can be read by the
                    # user's other processes.
                    **SECRETS.without(os.environ),
                    "PYTHONPATH": os.pathsep.join(path_entry for path_entry in sys.path if path_entry),
                },
            )
        return OtherRank(rank_process, Connection(own_socket.detach()))

    @property
    def processes(self) -> list[int]:
        """The ids of the other ranks' processes, rank 1 first."""
        return [other_rank.process.pid for other_rank in self._others]

    # --- orders ---------------------------------------------------------------------------------------------------

    @contextmanager
    def building(self, order: object) -> Generator[None]:
        with self._working():
            self._order([order] * self.size)
            yield
            for rank in range(1, self.size):
                self._reply(rank, self._start_s)

    @property
    def tensor(self) -> int:
        return self._member.tensor

    @property
    def team(self) -> int:
        return self._member.team

    def arrange(self, plan: ParallelPlan) -> None:
        self._member.arrange(plan)

    def portion(self, pack: Pack, span: Span | None = None) -> Portion:
        return self._member.portion(pack, span)

    def spread(self, module: nn.Module) -> None:
        self._member.spread(module)

    def cut(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        shard(module, self._member.meshes, dtype)
        store_key, start_time = self._member.arrive(), time.monotonic()
        while not self._member.store.check([store_key]):
            # Polled by hand, since a wait of the store would go on for `start_s` after a rank has died while it read
            # its weights.
            if any(other_rank.process.poll() is not None for other_rank in self._others):
                raise EOFError
            if time.monotonic() - start_time > self._start_s:
                raise TimeoutError(f"the ranks have not read their weights within {self._start_s:g} s")
            self._progress()
            time.sleep(_LOOK_S / 10)

    def run(self, worker: W, orders: Sequence[RankOrder[W, T]]) -> list[T]:
        """Raises RankLost, also for what an order raises on another rank, and what it raises on this one."""
        with self._working():
            self._order(orders)
            # Rank 0 works as well, in this thread, after all others have their orders: they meet in its collectives.
            own_result = orders[0].run(worker)
            return [own_result, *[cast(T, self._reply(rank, self._deadline_s)) for rank in range(1, self.size)]]

    def beside(self, key: str, work: Callable[[Callable[[], object]], None]) -> None: ...

    def settle(self, key: str, progress: Callable[[], None]) -> None:
        settle_work(
            self._member.store,
            key,
            range(1, self.size),
            why_ended=self._watch.why_ended,
            where=self._watch.where,
            deadline_s=self._deadline_s,
            progress=progress,
        )

    def close(self) -> None:
        """End the other ranks. Safe at any time."""
        self._closed.set()
        for other_rank in self._others:
            other_rank.line.close()
            # At once: a rank has nothing to finish. What it has written counts only once rank 0 has settled it.
            other_rank.process.kill()
            other_rank.process.wait()
        collectives.keep(None)
        if distributed.is_initialized():
            distributed.destroy_process_group()
            debug._clear_sharding_prop_cache()  # pyright: ignore[reportPrivateUsage]  # it answers with dead meshes

    @contextmanager
    def _working(self) -> Generator[None]:
        """Inside, ranks meet in collectives. An error leaves no rank behind: nobody knows where it stands."""
        with self._watch.busy():
            try:
                yield
            except AgentRLError:
                self.close()
                raise
            except collectives.OutOfStep as torch_error:
                self.close()
                raise RankLost(str(torch_error)) from torch_error
            except (RuntimeError, OSError, EOFError) as torch_error:  # torch's for a collective, and that of a socket
                rank_lost = self._watch.lost(torch_error)
                self.close()
                if rank_lost is None:
                    raise
                raise rank_lost from torch_error
            except BaseException:
                self.close()
                raise

    def _order(self, orders: Sequence[object]) -> None:
        if self._closed.is_set():
            raise RankLost("the ranks have ended: start the learner again")
        for other_rank, rank_order in zip(self._others, orders[1:], strict=True):
            send(other_rank.line, rank_order)

    def _reply(self, rank: int, deadline_s: float) -> object:
        other_rank, last_progress = self._others[rank - 1], time.monotonic()
        while not other_rank.line.poll(_LOOK_S):
            if other_rank.process.poll() is not None and not other_rank.line.poll():
                raise EOFError
            if self._watch.advanced():
                last_progress = time.monotonic()
            if time.monotonic() - last_progress > deadline_s:
                raise TimeoutError
        return other_rank.read()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
