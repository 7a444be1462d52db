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
    runs = OpenedRuns([run])
    try:
        (opened,) = runs.all() or [None]
        if opened is None:
            raise UsageError(f"{run} holds no run: give a run directory")
        with opened.store() as store:
            rows = [
                row
                for purpose in store.groups.purposes()
                for row in store.search.find_episodes(
                    EpisodeFilter(purpose=purpose), by="ended", descending=True, limit=most
                )
            ]
        # The same functions answer here as under the server, so a bundle cannot show a run otherwise than its page
        # does.
        details = {each_row.id: episode_answers.detail(opened, each_row.id, {}) for each_row in rows}
        with opened.store() as store:
            pictures = {digest: store.reads.image(digest) for digest in _digests(details)}
        answers: dict[str, Any] = {
            "runs": [run_answers.line(opened)],
            "run": run_answers.summary(opened),
            "metrics": run_answers.metrics(opened, run_answers.metric_names(opened)),
            "lanes": lanes(opened),
            "health": run_answers.health(opened),
            "episodes": [episode_answers.row_of(each_row) for each_row in rows],
            **{f"episodes/{id}": detail for id, detail in details.items()},
            **{
                f"groups/{id}": episode_answers.group(opened, id, {}) for id in {each_row.group_id for each_row in rows}
            },
            **{
                f"steps/{each_row.step}": episode_answers.step(opened, each_row.step, {}) for each_row in opened.steps()
            },
        }
    finally:
        runs.close()
    _write(out, answers)
    for digest, data in pictures.items():
        (out / "data" / "images" / f"{digest}.{images.read(data).media_type.partition('/')[2]}").write_bytes(data)
    return len(rows)


def _digests(details: Mapping[int, Mapping[str, Any]]) -> set[str]:
    """The images that episodes have shown."""
    messages = (
        message
        for detail in details.values()
        for part in (detail["start"], *(turn["observation"] or () for turn in detail["turns"]))
        for message in part
    )
    return {image["digest"] for message in messages for image in message["images"]}


def _write(out: Path, answers: dict[str, Any]) -> None:
    files = page_files()
    # The page imports one module for its answers; in a bundle another file of that name stands there, which fetches
    # files. No module of the page knows which of the two it has.
    files[_API] = files.pop(_STATIC_API)
    # A file server sends no headers of ours, so the policy is in the document; `frame-ancestors` has no meaning there
    # and is cut off. Texts of a policy are data here as well.
    policy = f'<meta http-equiv="content-security-policy" content="{POLICY.partition("; frame-ancestors")[0]}">'
    index = files.pop("index.html").decode().replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n    {policy}')
    for folder in ("assets", "data/episodes", "data/groups", "data/steps", "data/images"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    (out / "index.html").write_text(index, encoding="utf-8")
    for name, content in files.items():
        (out / "assets" / name).write_bytes(content)
    for name, answer in answers.items():
        # ASCII, for the reason in `web_page`: JSON escapes hold lone surrogates, and UTF-8 does not.
        # `allow_nan=False` because a browser refuses the whole document for one NaN.
        (out / "data" / f"{name}.json").write_text(json.dumps(answer, allow_nan=False), encoding="ascii")
