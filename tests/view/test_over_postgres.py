"""A run's page says the same over PostgreSQL as over the file that its store was copied from."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from store.server import running

from agentrl.store import RunStore
from agentrl.store.copy_database import move
from agentrl.view.opened_runs import OpenedRuns
from agentrl.view.web_page import Visitors, web_page

from .made_run import make_run

TOKEN = "secret-of-the-test"
ASKED = (
    *("", "/metrics?names=loss,kl_k3,by_lag.0.tokens", "/lanes", "/health", "/groups/1", "/steps/1"),
    *(f"/episodes/{id}?whole=yes" for id in range(1, 9)),
    *("/episodes", "/episodes?sort=ended&order=asc", "/episodes?success=yes", "/episodes?min=0.5&max=1"),
    *(
        "/episodes?purpose=all&sort=tokens",
        "/episodes?stop=env_failed",
        "/episodes?state=running",
        "/episodes?late=yes",
    ),
    *("/episodes?dropped=yes", "/episodes?min_turns=2", "/episodes?role=policy", "/episodes?role=critic"),
    *("/episodes?from_weights=0&to_weights=0", "/episodes?step=1", "/episodes?env=test/Env-v0", "/episodes?q=onerror="),
    *("/episodes?q=ONERROR&purpose=all", "/episodes?group=1&sort=seconds", "/episodes?offset=2&limit=2"),
)


@pytest.mark.medium
@pytest.mark.postgres
def test_the_answers_over_postgresql_are_those_over_the_file(tmp_path: Path) -> None:
    made = make_run(tmp_path / "file" / "made")
    with RunStore.open(made.store_path) as store:
        store.groups.fork(2, turn=1, k=2)
        assert store.lineage.retain(1, keep_steps=0, keep_sample=0.0)
    shutil.copytree(made.path, tmp_path / "postgres" / "made")
    with tempfile.TemporaryDirectory(prefix="agentrl-pg-") as folder, running(Path(folder)) as server:
        kept, _ = move(tmp_path / "postgres" / "made", server.url, time.time)
        kept.unlink()
        told = [_answers(tmp_path / place) for place in ("file", "postgres")]
    for path, one, other in zip(ASKED, *told, strict=True):
        assert one == other, path
    assert told[0][ASKED.index("/episodes?q=onerror=")]["total"] == 1, "they are no empty lists"


def _answers(folder: Path) -> list[Any]:
    runs = OpenedRuns([folder])
    page = TestClient(web_page(runs, Visitors(TOKEN)), headers={"authorization": f"Bearer {TOKEN}"})
    found: list[Any] = []
    for path in ASKED:
        answer = page.get(f"/api/runs/made{path}")
        assert answer.status_code == 200, (path, answer.text)
        found.append(answer.json())
    found[0].pop("path")
    found[0]["status"].pop("run")
    found[0]["status"].pop("last_step_ago_s")
    runs.close()
    return found
