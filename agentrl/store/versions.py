"""Weight versions: minted once, never reused, each with the optimizer step that made it. Knows no group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import StoreError
from agentrl.records import WeightVersion
from agentrl.store.databases.database import Database, StorePart, retried
from agentrl.store.learner_fence import check_lead
from agentrl.store.run_values import ATTEMPT_SQL


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """A version that engines serve, or served, since `confirmed_s`; it was minted at `minted_s`. Unix times."""

    version: int
    step: int
    minted_s: float
    confirmed_s: float


class Versions(StorePart):
    """Mint and confirm weight versions. A version is confirmed when an engine serves it."""

    def __init__(self, db: Database) -> None:
        super().__init__(db)
        self._step_of: dict[int, int] = {}  # a version's step never changes, so a copy is never stale

    @retried
    def mint_version(self, step: int, path: str | Path | None = None) -> WeightVersion:
        """A new version for the weights that optimizer step `step` made (0: the weights a run starts from). Waits for
        the disk: an engine elsewhere may still serve it after a loss of power."""
        # Durable, although it is one row that a restart could mint again: it would mint the same number for other
        # weights, and an engine that outlived the loss of power would serve the old ones under it (law 1).
        # AUTOINCREMENT alone remembers only what reached the disk.
        with self._db.write(durable=True):
            check_lead(self._db)
            version_number = self._db.insert(
                f"INSERT INTO versions (step, path, attempt, minted_s) VALUES (?, ?, {ATTEMPT_SQL}, ?)",
                (step, None if path is None else str(path), self._db.clock()),
            )
        return WeightVersion(version=version_number, step=step)

    @retried
    def note_version(self, version: int) -> None:
        """Take in a version that an engine of somebody else's serves: its number is that engine's, and so is its step.
        For a store in which no learner mints any."""
        with self._db.write():
            self._db.execute(
                "INSERT INTO versions (version, step, attempt, minted_s, confirmed_s)"
                f" VALUES (?1, ?1, {ATTEMPT_SQL}, ?2, ?2) ON CONFLICT (version) DO NOTHING",
                (version, self._db.clock()),
            )

    @retried
    def confirm_version(self, version: WeightVersion | int) -> None:
        """An engine serves it: admission counts from its step from now on. Raises StoreError if it was never minted."""
        version_number = version if isinstance(version, int) else version.version
        with self._db.write():
            check_lead(self._db)
            version_update = self._db.execute(
                # The first engine counts: from then on tokens of this version may come, and admission must reckon with
                # its step. Later engines confirm too and change nothing.
                "UPDATE versions SET confirmed_s = COALESCE(confirmed_s, ?) WHERE version = ?",
                (self._db.clock(), version_number),
            )
            if version_update.rowcount == 0:
                raise StoreError(f"weight version {version_number} was never minted")

    @retried
    def current_version(self) -> WeightVersion:
        """The latest confirmed version. Raises StoreError while no engine serves any."""
        with self._db.read():
            latest_version = latest_confirmed(self._db)
        if latest_version is None:
            raise StoreError("no weight version is confirmed yet: no engine serves any")
        return latest_version

    @retried
    def served_versions(self, after: int = 0) -> list[ServedVersion]:
        """The confirmed versions above `after` that no rollback undid, by their number."""
        with self._db.read():
            version_rows = self._db.rows(
                "SELECT version, step, minted_s, confirmed_s FROM versions"
                " WHERE version > ? AND confirmed_s IS NOT NULL AND undone_attempt IS NULL ORDER BY version",
                (after,),
            )
        return [
            ServedVersion(version=version, step=step, minted_s=minted_s, confirmed_s=confirmed_s)
            for version, step, minted_s, confirmed_s in version_rows
        ]

    @retried
    def knows_version(self, version: int) -> bool:
        """Whether it was ever minted here; the version of an engine that somebody else started was not."""
        return self._made_at(version) is not None

    @retried
    def step_of(self, version: int) -> int:
        """The optimizer step that made a version. Raises StoreError if it was never minted."""
        if (made_step := self._made_at(version)) is None:
            raise StoreError(f"weight version {version} was never minted")
        return made_step

    def _made_at(self, version: int) -> int | None:
        if version not in self._step_of:
            with self._db.read():
                version_row = self._db.row("SELECT step FROM versions WHERE version = ?", (version,))
            if version_row is None:
                return None
            self._step_of[version] = version_row[0]
        return self._step_of[version]

    @retried
    def is_undone(self, version: int) -> bool:
        """Whether a rollback undid the step of a version; then its step says nothing about its age."""
        with self._db.read():
            version_row = self._db.row("SELECT undone_attempt FROM versions WHERE version = ?", (version,))
        return version_row is not None and version_row[0] is not None

    @retried
    def version_at(self, step: int) -> WeightVersion | None:
        """The latest version of a step that no rollback undid; None if there is none."""
        with self._db.read():
            # A step may have several versions: a resumed run sends the weights that it went back to under a new number,
            # so that engines which serve an undone version take them.
            version_row = self._db.row(
                "SELECT MAX(version) FROM versions WHERE step = ? AND undone_attempt IS NULL", (step,)
            )
        return (
            None if version_row is None or version_row[0] is None else WeightVersion(version=version_row[0], step=step)
        )

    @retried
    def weights_path(self, version: int) -> Path | None:
        """The file a version was minted with; None if it has none or was never minted."""
        with self._db.read():
            version_row = self._db.row("SELECT path FROM versions WHERE version = ?", (version,))
        return None if version_row is None or version_row[0] is None else Path(version_row[0])


LATEST_CONFIRMED = (
    "SELECT version, step FROM versions WHERE confirmed_s IS NOT NULL AND undone_attempt IS NULL"
    " ORDER BY version DESC LIMIT 1"
)


def latest_confirmed(db: Database) -> WeightVersion | None:
    """The latest confirmed version that no rollback undid. Inside a transaction."""
    version_row = db.row(LATEST_CONFIRMED)
    return None if version_row is None else WeightVersion(version=version_row[0], step=version_row[1])
