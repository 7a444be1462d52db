"""Asynchronous GRPO with a loss of its own, on the blocks of agentrl: `python examples/loop.py`.

Episodes are played while the learner steps, by weights at most two steps old. It learns what `make demo` learns. Killed
at any moment, it goes on from its last checkpoint: `python examples/loop.py` again.
"""

from __future__ import annotations

from typing import Any

import torch

from agentrl.blocks import Buffer, Learner
from agentrl.blocks.sync import EngineFleet, publish, rollout

MODEL, ENV = "agentrl/tiny-coder", "agentrl/CodeRepair-v0"
TURNS = {"max_turns": 2, "max_tokens_per_turn": 48, "max_running": 128}
HELD_OUT = 1_000_000_000  # its tasks begin here, far from those of training


def clipped(tokens: Any, outputs: Any) -> torch.Tensor:
    """The loss of one pass over [K] tokens: PPO's clip, times the truncated importance weight of stale tokens."""
    advantage, ratio = tokens["advantage"], (outputs.logprobs_K - tokens["proximal"]).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    importance = (tokens["proximal"] - tokens["behaviour"]).exp().clamp(max=2.0)
    return -(tokens["weight"] * importance * gain).sum()


def success(fleet: EngineFleet, n: int) -> float:
    """The share of `n` held-out tasks that the fleet's model solves."""
    tasks, task_set = range(HELD_OUT, HELD_OUT + n), {"split": "held_out", "level": "easy"}
    played = [one for one in rollout(ENV, fleet, tasks, kwargs=task_set, settings=TURNS) if one.scored]
    return sum(bool(one.success) for one in played) / len(played)


def main(folder: str = "runs/loop", *, steps: int = 48, groups: int = 16, held_out: int = 256) -> tuple[float, float]:
    """Train for so many steps on `groups` groups of 8 episodes each; held-out success before and after."""
    fleet = EngineFleet.start(MODEL, max_context=384)
    learner = Learner(MODEL, train={"lr": 1e-3, "warmup_steps": 5})
    with fleet, learner, Buffer(folder, groups_per_step=groups, max_lag=2) as buffer:
        if (saved := buffer.resume()) is not None:
            learner.load(saved)
        publish(learner.weights(), fleet, buffer)
        before = success(fleet, held_out)
        task_set = {"split": "train", "level": "easy"}
        with rollout(ENV, fleet, group_size=8, kwargs=task_set, settings=TURNS, buffer=buffer):
            while learner.step_index < steps:
                learner.forward_backward(buffer.take(), clipped)
                report = learner.step()
                publish(learner.weights(), fleet, buffer)
                print(f"step {report.step}: success {report.success_mean}, lag {report.lag_mean}", flush=True)
                if report.step % 20 == 0 or report.step == steps:
                    buffer.checkpoint(report.step, learner.save(f"{folder}/checkpoints"))
        return before, success(fleet, held_out)


if __name__ == "__main__":
    print("held-out success: {:.3f} before, {:.3f} after".format(*main()))
