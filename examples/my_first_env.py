"""The whole of a first environment: a prompt, a tool, a grade. Run it to check it and to train on it."""

import agentrl


class Guess(agentrl.ToolEnv):
    """Find a hidden number by asking."""

    limits = agentrl.EpisodeLimits(turns=8)
    replayable = True

    def prompt(self, task):
        self.secret = int(self.np_random.integers(1, 101))
        self.solved = False
        return "I think of a whole number from 1 to 100. Find it with as few guesses as you can."

    @agentrl.tool
    def guess(self, number: int) -> str:
        """Compare a number with the hidden one.

        Args:
            number: your guess, from 1 to 100
        """
        if number == self.secret:
            self.solved = True
            self.finish()
            return "found"
        return "larger" if number < self.secret else "smaller"

    def grade(self):
        return self.solved


def main() -> None:
    """Check the environment with gymnasium's checker and ours, then train the tiny model on it for ten steps."""
    from gymnasium.utils.env_checker import check_env

    from agentrl.run.reporting.live_view import LiveView

    check_env(Guess(), skip_render_check=True)
    print(agentrl.check_env(Guess))
    config = {
        "env": {"kwargs": {"parse_policy": {"structural_penalty": 0.1}}},  # a turn without a sound call costs a tenth
        "rollout": {"group_size": 4, "max_running": 32, "max_turns": 4, "max_tokens_per_turn": 24, "max_context": 512},
        "engine": {"max_batch": 32, "kv_cache_mb": 128},
        "buffer": {"groups_per_step": 4},
        "train": {"steps": 10, "lr": 1e-3},
    }
    out = "runs/my_first_env"
    trainer = agentrl.Trainer("agentrl/tiny-coder", Guess, config=config, out=out, overwrite=True)
    summary = trainer.train(LiveView())
    print(f"trained {summary['steps']} steps on {summary['episodes']} episodes in {summary['wall_s']:.0f} s; see {out}")


if __name__ == "__main__":
    main()
