"""Where the weights of each policy go: a role with a model of its own has engines of its own.

Owns the publishers of all policies, and the places of their weight files. Policy `None` is that of all roles without a
model of their own. All policies of a step have one version number: it counts as sent when engines of each have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import trio

from agentrl.config import EngineSettings
from agentrl.engine.weight_sync.object_store import ObjectFolder
from agentrl.engine.weight_sync.publisher import WeightPublisher
from agentrl.engine.weight_sync.transport import MemoryParcel, Parcel, WeightSender
from agentrl.engine.weight_sync.weight_lock import WeightLock
from agentrl.errors import RunFailed, matters
from agentrl.store.run_values import CREATED_S, ENGINE_URLS, ROLE_URLS

_SUMS = frozenset({"engines_behind", "sync_bytes"})  # over policies; of all other costs the worst counts


def urls_of(meta: Callable[[str], str | None], role: str | None) -> list[str]:
    """The engines of a role with a model of its own (None: of all others), as the store names them."""
    if role is None:
        return ENGINE_URLS.of(meta)
    return ROLE_URLS.of(meta).get(role, [])


def file_of(path: Path, role: str | None) -> Path:
    """The weight file of a role with a model of its own (None: of all others) in the version whose file is `path`."""
    return path if role is None else path.parent.with_name(f"{path.parent.name}-{role}") / path.name


def objects_of(
    engine: EngineSettings, name: str, meta: Callable[[str], str | None], role: str | None
) -> ObjectFolder | None:
    """Where in the object store the weights of a policy of the run `name` go; None if they go by files."""
    if engine.weights_url is None:
        return None
    folder_name = f"{name}-{meta(CREATED_S.key)}"  # another run at the same URL was made at another time
    policy_url = "/".join(filter(None, [engine.weights_url.rstrip("/"), folder_name, role]))
    return ObjectFolder(policy_url, deadline_s=engine.admin_deadline_s)


class Publishers:
    """Delivers a version of the run `name` to the engines of all policies: those of `roles` with a model of their own,
    and the one of all others. `meta` says where they are: it reads the store. The rest is as for `WeightPublisher`."""

    def __init__(
        self,
        engine: EngineSettings,
        sync: str,
        meta: Callable[[str], str | None],
        sender: WeightSender | None = None,
        *,
        name: str = "run",
        roles: Sequence[str] = (),
        locks: Path,
    ) -> None:
        self._meta, self._has_ended = meta, False

        def publisher(role: str | None, sender: WeightSender | None) -> WeightPublisher:
            object_folder = objects_of(engine, name, meta, role)
            return WeightPublisher(engine, sync, sender, locks=locks, store=object_folder)

        self._of = {None: publisher(None, sender)} | {role_name: publisher(role_name, None) for role_name in roles}

    def urls(self, role: str | None = None) -> list[str]:
        """Where the engines of a policy serve now. Raises RunFailed after `end`."""
        if self._has_ended:
            raise RunFailed("the learner ends")
        return urls_of(self._meta, role)

    def end(self) -> None:
        """Begin no other attempt to deliver: the learner ends, and nobody would wait for it."""
        self._has_ended = True

    async def behind(self, version: int) -> bool:
        """Whether some engine of any policy serves another version: see `WeightPublisher.behind`."""
        return any(
            [await publisher.behind(await self._urls(role_name), version) for role_name, publisher in self._of.items()]
        )

    async def deliver(
        self, parcels: Mapping[str | None, Parcel | MemoryParcel], held: WeightLock | None = None
    ) -> dict[str, float]:
        """Have the engines of each policy serve its parcel, all at once. Returns the cost as metrics. `held`, and what
        is raised, are as for `WeightPublisher.deliver`."""
        policy_costs: list[dict[str, float]] = []

        async def push_role(role: str | None, parcel: Parcel | MemoryParcel) -> None:
            policy_costs.append(await self._of[role].deliver(lambda: self.urls(role), parcel, held))

        try:
            async with trio.open_nursery() as nursery:
                for role_name, parcel in parcels.items():
                    nursery.start_soon(push_role, role_name, parcel)
        except BaseExceptionGroup as group:
            raise matters(group) from None
        # Policies are pushed at the same time, so the slowest decides how long a push took; bytes and engines add up.
        return {
            cost_name: (sum if cost_name in _SUMS else max)(policy_cost[cost_name] for policy_cost in policy_costs)
            for cost_name in policy_costs[0]
        }

    async def tidy(self) -> None:
        """See `WeightPublisher.tidy`."""
        for role_name, publisher in self._of.items():
            await publisher.tidy(await self._urls(role_name))

    async def _urls(self, role: str | None) -> list[str]:
        return await trio.to_thread.run_sync(self.urls, role)
