"""Runs cases with one trainer, one after the other, in a process of its own: `PYTHON child.py ORDER.json`.

Started by path, so that any Python can run it. In an order that says `alone`, agentrl's modules that need the standard
library alone are imported from beside this file, and nothing else of agentrl is.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
import types
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from agentrl.conformance.observation import Recorder

GROUP = "agentrl.conformance"
"""The entry points of trainers that other packages bring: a name, and `module:object` of an `Adapter`."""

UNUSABLE = 3
"""Exit code of a child that has no such trainer."""

_ABSENT = "not installed"


def _find_agentrl(folder: Path) -> None:
    """Make `agentrl.conformance` importable from its folder, without `agentrl/__init__.py` and its requirements."""
    bare_package = types.ModuleType("agentrl")
    bare_package.__path__ = [str(folder.parent)]
    sys.modules["agentrl"] = bare_package


def load(trainer: str) -> Any:
    """The adapter of a trainer: a built-in one, an entry point, or `module:object`. Raises LookupError."""
    from agentrl.conformance.adapters.adapter import BUILT_IN

    reference = BUILT_IN.get(trainer, trainer)
    if ":" not in reference:
        entry_points = {entry_point.name: entry_point.value for entry_point in metadata.entry_points(group=GROUP)}
        if trainer not in entry_points:
            known_trainers = ", ".join(sorted({*BUILT_IN, *entry_points}))
            raise LookupError(f"no trainer {trainer!r}: give one of {known_trainers}, or module:object of an adapter")
        reference = entry_points[trainer]
    module_name, _, object_name = reference.partition(":")
    return getattr(importlib.import_module(module_name), object_name)


def main(order: dict[str, Any]) -> None:
    """Play a life of the trainer in each case, and write its events."""
    from agentrl.conformance.observation import Recorder

    trainer_adapter = load(order["trainer"])
    versions = versions_of(trainer_adapter.packages)
    if missing_packages := [
        package_name for package_name, package_version in versions.items() if package_version == _ABSENT
    ]:
        correction = "give --python of an environment that has it"
        raise LookupError(f"{missing_packages[0]} is not installed for {sys.executable}: {correction}")
    for case_order in order["cases"]:
        with Path(case_order["events"]).open("w", encoding="utf-8") as events_file:
            recorder = Recorder(events_file, hold_at_step=case_order["hold_at_step"])
            recorder.versions(versions)
            try:
                _train(trainer_adapter, case_order, recorder)
            except Exception as error:  # a trainer that refuses, or fails: what it says is part of the observation
                traceback.print_exc()
                error_line = next((error_line for error_line in str(error).splitlines() if error_line.strip()), "")
                recorder.stopped(f"{type(error).__name__}: {error_line}"[:300])
            else:
                recorder.finished()


def _train(adapter: Any, case: dict[str, Any], recorder: Recorder) -> None:
    from agentrl.conformance.adapters.adapter import Setup
    from agentrl.conformance.scenario import Scenario

    for skip_outcome, reasons_by_case in (
        ("not applicable", adapter.not_applicable),
        ("not observed", adapter.not_observed),
    ):
        if case["name"] in reasons_by_case:
            recorder.skipped(skip_outcome, reasons_by_case[case["name"]])
            return
    for unseen_column, unseen_reason in adapter.unseen.items():
        recorder.unseen(unseen_column, unseen_reason)
    case_setup = Setup(model=Path(case["model"]), url=case["url"], folder=Path(case["folder"]))
    adapter.train(Scenario.read(case["scenario"]), case_setup, recorder)


def _end_with_parent() -> None:
    """End this process when its parent has ended, however that went: the pipe of its input closes."""
    # Not by `sys.stdin`: a thread that holds its lock makes the end of the interpreter a fatal error.
    while os.read(0, 1):
        pass
    os._exit(1)


def versions_of(packages: tuple[str, ...]) -> dict[str, str]:
    """The versions of distributions that are installed here."""
    package_versions: dict[str, str] = {}
    for package_name in packages:
        try:
            package_versions[package_name] = metadata.version(package_name)
        except metadata.PackageNotFoundError:
            package_versions[package_name] = _ABSENT
    return package_versions


if __name__ == "__main__":
    order_of_parent = cast("dict[str, Any]", json.loads(Path(sys.argv[1]).read_text()))
    here = Path(__file__).resolve().parent
    # The folder of a script is the first in the path: `child`, `cases` and so on would shadow other people's modules.
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != here]
    sys.path.append(str(Path.cwd()))  # where an adapter of one's own may be
    if order_of_parent["alone"]:
        _find_agentrl(here)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        main(order_of_parent)
    except (LookupError, ImportError, AttributeError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(UNUSABLE) from None
