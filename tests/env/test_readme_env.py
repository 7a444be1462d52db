"""The environment of the README: played to its end on both sides, passed by the checkers, and trained on."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env

from agentrl import registry
from agentrl.store import RunStore
from agentrl.store.audit import audit

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_first_env.py"
Guess = registry.load_reference(f"{EXAMPLE}:Guess")


def said(number: int) -> str:
    return f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {number}}}}}\n</tool_call>'


async def test_bisection_finds_the_number_within_seven_guesses():
    for seed in range(20):
        async with Guess() as env:
            observation, _ = await env.areset(seed=seed)
            assert observation[0]["role"] == "user"
            low, high = 1, 100
            for _ in range(7):
                middle = (low + high) // 2
                observation, reward, terminated, truncated, info = await env.astep(said(middle))
                assert (reward, truncated) == (0.0, False)
                if terminated:
                    break
                if observation[0]["content"] == "larger":
                    low = middle + 1
                else:
                    high = middle - 1
            assert observation[0]["content"] == "found" and middle == env.secret
            assert info["success"] is True and info["outcome"] == 1.0 and info["stop_reason"] == "done"


def test_the_eighth_wrong_guess_is_the_last():
    env = Guess()
    env.reset(seed=1)
    for turn in range(8):
        _, _, terminated, truncated, info = env.step(said(101))
        assert not terminated and truncated == (turn == 7)
    assert info == {"stop_reason": "turn_limit", "outcome": 0.0, "success": False}
    env.close()


def test_passes_gymnasiums_checker_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*render modes.*")
        env = Guess()
        check_env(env)
        env.close()


@pytest.mark.slow
def test_run_as_a_script_it_is_checked_and_trained_on_for_ten_steps(tmp_path):
    argv = [sys.executable, str(EXAMPLE)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "Guess: 12 checks, 0 findings" in done.stdout
    assert "trained 10 steps on 160 episodes" in done.stdout
    with RunStore.open(tmp_path / "runs" / "my_first_env" / "store.sqlite") as store:
        assert audit(store).violations == []
        assert any(row.values["updated"] for row in store.metrics.values("step")), "there was something to learn from"
