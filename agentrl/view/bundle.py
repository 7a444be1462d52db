"""A run's page as static files, for any web server: `agentrl view RUN --bundle DIR`. Its answers are files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError
from agentrl.store.episode_search import EpisodeFilter
from agentrl.tokens import images
from agentrl.view import episode_answers, run_answers
from agentrl.view.lanes import lanes
from agentrl.view.opened_runs import OpenedRuns
from agentrl.view.web_page import POLICY, page_files

_API, _STATIC_API = "api.js", "static_api.js"


def write_bundle(run: Path, out: Path, *, most: int) -> int:
    """Write the page of a run to a new folder, with its newest `most` episodes of each purpose; how many there are.
    Raises UsageError for a folder that has something in it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--bundle {out}: it is not empty; name a new folder")
    opened_runs = OpenedRuns([run])
    try:
        (opened_run,) = opened_runs.all() or [None]
        if opened_run is None:
            raise UsageError(f"{run} holds no run: give a run directory")
        with opened_run.store() as run_store:
            episode_rows = [
                episode_row
                for purpose in run_store.groups.purposes()
                for episode_row in run_store.search.find_episodes(
                    EpisodeFilter(purpose=purpose), by="ended", descending=True, limit=most
                )
            ]
        # The same functions answer here as under the server, so a bundle cannot show a run otherwise than its page
        # does.
        details = {each_row.id: episode_answers.detail(opened_run, each_row.id, {}) for each_row in episode_rows}
        with opened_run.store() as run_store:
            pictures = {digest: run_store.reads.image(digest) for digest in _digests(details)}
        answers: dict[str, Any] = {
            "runs": [run_answers.line(opened_run)],
            "run": run_answers.summary(opened_run),
            "metrics": run_answers.metrics(opened_run, run_answers.metric_names(opened_run)),
            "lanes": lanes(opened_run),
            "health": run_answers.health(opened_run),
            "episodes": [episode_answers.row_of(each_row) for each_row in episode_rows],
            **{f"episodes/{entry_id}": detail for entry_id, detail in details.items()},
            **{
                f"groups/{entry_id}": episode_answers.group(opened_run, entry_id, {})
                for entry_id in {each_row.group_id for each_row in episode_rows}
            },
            **{
                f"steps/{each_row.step}": episode_answers.step(opened_run, each_row.step, {})
                for each_row in opened_run.steps()
            },
        }
    finally:
        opened_runs.close()
    _write(out, answers)
    for digest, image_bytes in pictures.items():
        extension = images.read(image_bytes).media_type.partition("/")[2]
        (out / "data" / "images" / f"{digest}.{extension}").write_bytes(image_bytes)
    return len(episode_rows)


def _digests(details: Mapping[int, Mapping[str, Any]]) -> set[str]:
    """The images that episodes have shown."""
    messages = (
        message
        for detail in details.values()
        for message_list in (detail["start"], *(turn["observation"] or () for turn in detail["turns"]))
        for message in message_list
    )
    return {image["digest"] for message in messages for image in message["images"]}


def _write(out: Path, answers: dict[str, Any]) -> None:
    page_assets = page_files()
    # The page imports one module for its answers; in a bundle another file of that name stands there, which fetches
    # files. No module of the page knows which of the two it has.
    page_assets[_API] = page_assets.pop(_STATIC_API)
    # A file server sends no headers of ours, so the policy is in the document; `frame-ancestors` has no meaning there
    # and is cut off. Texts of a policy are data here as well.
    policy = f'<meta http-equiv="content-security-policy" content="{POLICY.partition("; frame-ancestors")[0]}">'
    charset = '<meta charset="utf-8">'
    index_page = page_assets.pop("index.html").decode().replace(charset, f"{charset}\n    {policy}")
    for folder_name in ("assets", "data/episodes", "data/groups", "data/steps", "data/images"):
        (out / folder_name).mkdir(parents=True, exist_ok=True)
    (out / "index.html").write_text(index_page, encoding="utf-8")
    for file_name, file_bytes in page_assets.items():
        (out / "assets" / file_name).write_bytes(file_bytes)
    for file_name, document in answers.items():
        # ASCII, for the reason in `web_page`: JSON escapes hold lone surrogates, and UTF-8 does not.
        # `allow_nan=False` because a browser refuses the whole document for one NaN.
        (out / "data" / f"{file_name}.json").write_text(json.dumps(document, allow_nan=False), encoding="ascii")
