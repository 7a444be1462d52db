"""Requests of a run's page: `agentrl pause`, `resume`, `set` and `requeue`, from JSON. Knows no HTTP.

A run under way is steered, no other: settings that a run takes up at its next start may name programs, and belong to
whoever starts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from agentrl.config import changes
from agentrl.errors import UsageError
from agentrl.run import steering
from agentrl.run.run_folder import RunDir
from agentrl.store.run_values import PAUSED, REQUESTED_SETTINGS
from agentrl.view.opened_runs import OpenedRun

Json = dict[str, Any]
_MOST: Final = 32  # settings at once
_CHARS: Final = 500  # of one


def pause(run: RunDir, body: Any) -> Json:
    """Pause a run; with `now` in the request's document, its turns under way stop too. Returns the line to show to the
    user. Raises UsageError for another document, and as `steering.pause`."""
    pauses_now = _document(body, "now").get("now")
    if not isinstance(pauses_now, bool):
        raise UsageError(f"now = {pauses_now!r}: give true or false")
    return {"told": steering.pause(run, now=pauses_now)}


def resume(run: RunDir, body: Any) -> Json:
    """Let a paused run go on. Raises UsageError as `steering.resume`."""
    _document(body)
    return {"told": steering.resume(run)}


def change(run: RunDir, body: Any) -> Json:
    """Change the `settings` of a run that is under way; the request's document has them as texts of the form
    `section.key=value`. Raises UsageError for another document, and as `steering.change_under_way`."""
    setting_texts = _document(body, "settings").get("settings")
    if not isinstance(setting_texts, list) or not 0 < len(cast("list[Any]", setting_texts)) <= _MOST:
        raise UsageError(f"settings are a list of 1 to {_MOST} texts: train.lr=1e-6")
    for setting_text in cast("list[Any]", setting_texts):
        if not isinstance(setting_text, str) or len(setting_text) > _CHARS:
            raise UsageError(f"settings has {str(setting_text)[:50]!r}: give a text of {_CHARS} characters at most")
    return {"told": steering.change_under_way(run, cast("list[str]", setting_texts))}


def requeue(run: RunDir, body: Any) -> Json:
    """Play again what failed because of infrastructure, and what the run no longer retries, in all groups or in one
    `group`. Raises UsageError as `steering.requeue`, and for a run that is not under way."""
    is_one_group = isinstance(body, dict) and "group" in body
    document, group_ids, cli_option = _document(body, *["group"] * is_one_group), None, "--failed"
    if is_one_group:
        group_id = document["group"]
        # A bool is an int in Python: `true` would be group 1.
        if not isinstance(group_id, int) or isinstance(group_id, bool) or not 0 < group_id < 1 << 63:
            raise UsageError(f"group = {str(group_id)[:50]!r}: give the number of a group")
        group_ids, cli_option = [group_id], f"--group {group_id}"
    # The command line may requeue in a run that stands still; a page may not, since what a run takes up when it
    # starts belongs to whoever starts it.
    # `tests/view/test_page_steering.py::test_a_run_that_is_not_under_way_is_changed_by_who_starts_it`.
    if not steering.under_way(run):
        raise UsageError(f"{run.path} is not under way: agentrl requeue {run.path} {cli_option}, before it goes on")
    return {"told": "; ".join(steering.requeued_lines(run, steering.requeue(run, group_ids)))}


def steered(opened: OpenedRun) -> Json:
    """How it is paused, the requested settings that no step has yet, and those that may change, with the values that
    they have now."""
    with opened.store() as run_store:
        paused, requests = PAUSED.of(run_store.meta), REQUESTED_SETTINGS.of(run_store.meta)
    current_settings = changes.values(opened.config)
    return {
        "paused": paused or None,
        "wanted": {key: value for wish in requests for key, value in wish["settings"].items()},
        "settings": {key: value for key, value in current_settings.items() if changes.in_flight(key)},
    }


def _document(body: Any, *fields: str) -> Mapping[str, Any]:
    # Exactly these fields: a misspelt one would otherwise be ignored, and a pause with `nwo` would be an ordinary
    # pause.
    if not isinstance(body, dict) or set(cast("Json", body)) != {*fields}:
        raise UsageError(f"give {{{', '.join(f'{field!r}: …' for field in fields)}}} as JSON".replace("'", '"'))
    return cast("Json", body)
