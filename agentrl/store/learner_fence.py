"""The fence around the learner: the process that claimed the lead last is the learner; writes of an earlier one fail.

A learner that was cut off from the store for so long that another one began may come back and go on: its steps would
count beside those of the other. Owns that fence; never knows what a learner writes. A folder that it writes elsewhere
no store refuses: so it asks right before one appears (`still_leads`). On a cluster it ends besides: Ray's seat of it
kills it once nobody has looked for `cluster.lease_s`, also if it is stopped.
"""

from __future__ import annotations

from agentrl.errors import LeaseLost
from agentrl.store.databases.database import Database
from agentrl.store.run_values import LEARNER


def check_lead(db: Database) -> None:
    """Raise LeaseLost if this handle was the learner's, and another's is by now. Inside a transaction."""
    # Inside the caller's transaction, or the check would be worth nothing: another learner could begin between it and
    # the write.
    if db.leads is not None and db.leads != LEARNER.within(db):
        raise LeaseLost(f"{db.path}: another learner has begun since, so this one ends and leaves it the run")
