"""The images that the policy sees: an engine gets them beside the tokens that stand in their place."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.errors import EnvError, boundary
from agentrl.rollout.journal import EpisodeJournal
from agentrl.rollout.prompts import Prompt
from agentrl.tokens import images


class ShownImages:
    """Finds the images of a prompt in the messages of its episode."""

    __slots__ = ("_any", "_journal")

    def __init__(self, journal: EpisodeJournal) -> None:
        self._journal = journal
        # Most episodes have no image. Their messages are never searched, and only new tokens are looked at.
        self._any = any(_has_images(turn.prompt_ids) for turn in journal.turns)

    def of(self, prompt: Prompt) -> tuple[images.Image, ...]:
        """The images of a prompt's context, in the order in which they begin. Raises EnvError for one that no message
        of the episode holds."""
        self._any = self._any or _has_images(prompt.prompt_ids)
        if not self._any:
            return ()
        journal = self._journal
        with boundary(EnvError, f"{journal.claim.task.env}:"):
            images_by_token = images.of_steps(journal.start, (turn.step for turn in journal.turns))
            return images.shown(prompt.context, images_by_token)


def _has_images(token_ids: Sequence[int]) -> bool:
    return max(token_ids, default=0) >= images.FIRST
