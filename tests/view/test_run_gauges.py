"""`agentrl metrics`: what Prometheus's client library reads, and what the real server scrapes and answers."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.errors import UsageError
from agentrl.host.ports import free_port
from agentrl.run.children.engine_metrics import EngineFigures
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.view.run_gauges import FAMILIES, exported

from .made_run import make_run

pytestmark = pytest.mark.adapters
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
DEADLINE_S = 60.0


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "runs" / "made")
    with RunStore.open(run.store_path) as store:
        store.metrics.record("fleet", 3, {"state": ["ready", "broken"], "running": [5, 0]})
    return tmp_path / "runs"


def families(address: str) -> dict[str, dict[tuple[str, ...], float]]:
    """By sample name: values by the values of the labels but `run`, which is the run's everywhere."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(httpx.get(address, timeout=DEADLINE_S).text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "made"
            found.setdefault(sample.name, {})[tuple(labels[name] for name in sorted(labels))] = sample.value
    return found


def test_the_figures_are_those_of_the_store(runs: Path) -> None:
    with exported([runs], port=0) as address:
        found = families(address)
    assert list(found["agentrl_up"].values()) == [0.0]
    assert found["agentrl_step_total"] == {(): 3.0} and found["agentrl_steps_wanted"] == {(): 4.0}
    metrics = {name: value for (name,), value in found["agentrl_step_metric"].items()}
    assert metrics["loss"] == pytest.approx(1 / 3) and metrics["outcome_mean"] == 0.75
    assert metrics["by_lag/0/tokens"] == 30.0
    assert found["agentrl_episodes_total"] == {("done",): 2.0, ("env_failed",): 1.0}
    assert found["agentrl_groups"][("trained",)] == 1.0
    assert found["agentrl_engine_ready"] == {("0", "ready"): 1.0, ("1", "broken"): 0.0}
    assert found["agentrl_engine_requests"] == {("0",): 5.0, ("1",): 0.0}


OF_AN_ENGINE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 4
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{model_name="m",engine="0"} %d
# TYPE agentrl_step gauge
agentrl_step 99
"""


def test_what_engines_say_of_themselves_is_relayed_while_it_is_fresh(runs: Path) -> None:
    told = {
        "engine-0": EngineFigures("engine-0", time.time(), scrapes=3, text=OF_AN_ENGINE % 70),
        "engine-1": EngineFigures("engine-1", time.time(), scrapes=3, failed=1, text=OF_AN_ENGINE % 80),
        "hung": EngineFigures("hung", time.time(), scrapes=3, failed=3),
        "odd": EngineFigures("odd", time.time(), scrapes=1, text="this is {no metric"),
        "left": EngineFigures("left", time.time() - 61, scrapes=9, text=OF_AN_ENGINE % 90),
    }
    folder = RunDir(runs / "made").engine_figures
    folder.mkdir()
    for name, one in told.items():
        (folder / f"{name}.json").write_text(json.dumps(one.document()))
    with exported([runs], port=0) as address:
        found = families(address)
    labels = [("engine-0", "0", "m"), ("engine-1", "0", "m")]  # engine, exported_engine, model_name
    assert found["vllm:num_requests_running"] == dict.fromkeys(labels, 4.0)
    assert found["vllm:generation_tokens_total"] == dict(zip(labels, (70.0, 80.0), strict=True))
    assert found["agentrl_step_total"] == {(): 3.0} and "agentrl_step" not in found
    assert found["agentrl_engine_scrapes_total"] == {(name,): float(one.scrapes) for name, one in told.items()}
    assert found["agentrl_engine_scrapes_failed_total"][("hung",)] == 3.0
    assert found["agentrl_episodes_total"], "and the run's own figures are there"


def test_a_run_that_cannot_be_read_does_not_hide_the_others(runs: Path) -> None:
    (runs / "broken").mkdir()
    (runs / "broken" / "store.sqlite").write_text("no store")
    with exported([runs], port=0) as address:
        assert families(address)["agentrl_step_total"] == {(): 3.0}


def test_a_port_that_is_taken_is_one_line(runs: Path) -> None:
    with (
        exported([runs], port=0) as address,
        pytest.raises(UsageError, match="choose another --port"),
        exported([runs], port=int(address.split(":")[2].split("/")[0])),
    ):
        pass


def test_the_dashboard_asks_for_figures_that_there_are() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    served = {name + "_total" * (kind == "counter") for name, (kind, _) in FAMILIES.items()}
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(asked) >= 8
    for expression in asked:
        words = {word for word in expression.replace("(", " ").replace("{", " ").split() if word.startswith("agentrl_")}
        assert words and words <= served, expression


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("prometheus"), reason="no Prometheus server (apt-get install prometheus)")
def test_the_real_server_scrapes_a_run(runs: Path, tmp_path: Path) -> None:
    port = free_port()
    with exported([runs], port=0) as address:
        job = {"job_name": "agentrl", "static_configs": [{"targets": [address.split("/")[2]]}]}
        settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
        (tmp_path / "prometheus.yml").write_text(json.dumps(settings))  # YAML has all of JSON
        words = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        server = subprocess.Popen(["prometheus", *words, f"--web.listen-address=127.0.0.1:{port}"])
        try:
            found = _query(port, 'agentrl_step_metric{metric="loss"}')
            everything = {row["metric"]["__name__"] for row in _query(port, '{run="made"}')}
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(DEADLINE_S)
    assert float(found[0]["value"][1]) == pytest.approx(1 / 3) and found[0]["metric"]["run"] == "made"
    assert {"agentrl_step_total", "agentrl_episodes_total", "agentrl_engine_ready"} <= everything


def _query(port: int, expression: str) -> list[dict[str, Any]]:
    """What the server answers, once it has scraped."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        try:
            url = f"http://127.0.0.1:{port}/api/v1/query"
            answer = httpx.get(url, params={"query": expression}, timeout=DEADLINE_S)
            if answer.status_code == 200 and (found := answer.json()["data"]["result"]):
                return found
        except httpx.TransportError:
            continue
    raise AssertionError(f"no answer to {expression} within {DEADLINE_S:.0f} s")
