"""The page on adapters: each run that it shows is made and played, with the real packages and a clueless policy."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from each_case import each_case
from serving import serving

import agentrl
from agentrl import config
from agentrl.env.adapters import openenv_env
from agentrl.env.core import as_messages

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "how-to" / "adapters.md").read_text()
RUNS = [tomllib.loads(body) for body in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)]

pytestmark = pytest.mark.adapters


def test_every_adapter_has_its_run() -> None:
    documented = {run["env"]["id"] for run in RUNS} | set(re.findall(r"`(agentrl/\w+-v0)`", PAGE))
    from agentrl import registry

    adapters = {
        id
        for id in registry.ids("environments")
        if registry.resolve("environments", id).__module__.startswith(
            ("agentrl.env.adapters.", "agentrl.env.agent_programs.")
        )
    }
    assert adapters <= documented


@pytest.mark.medium
@each_case("run", RUNS)
def test_a_documented_run_is_played(run: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # where vf_sums lies
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    env = config.parse({"model": "m", **run}).env
    if "base_url" not in env.kwargs:
        play(env.id, env.kwargs)
        return
    with serving(openenv_env.serve(lambda: agentrl.make("agentrl/Calculator-v0"))) as address:
        play(env.id, {**env.kwargs, "base_url": address})


def play(id: str, kwargs: dict) -> None:
    """Up to three turns of a policy that says only hello: it reads a prompt, and what it does is answered."""
    env = agentrl.make(id, **kwargs)
    try:
        opening, _ = env.reset(seed=1)
        assert any(message["content"] for message in as_messages(opening))
        for _ in range(3):
            _, _, terminated, truncated, _ = env.step("hello")
            if terminated or truncated:
                break
    finally:
        env.close()
