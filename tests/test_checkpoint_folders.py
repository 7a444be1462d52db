"""Which checkpoint is the newest: one answer for the learner, the supervisor, the evaluation and the audit."""

from __future__ import annotations

from pathlib import Path

from agentrl.learner.checkpoints.folders import complete, name_of, newest, step_of


def checkpoint(root: Path, name: str, state: str | None = "{}") -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    if state is not None:
        (folder / "state.json").write_text(state)
    return folder


def test_the_newest_checkpoint_is_the_complete_one_of_the_highest_step(tmp_path: Path) -> None:
    assert newest(tmp_path / "missing") is None
    assert newest(tmp_path) is None
    late, early = checkpoint(tmp_path, name_of(123_456_789)), checkpoint(tmp_path, name_of(20))
    checkpoint(tmp_path, name_of(1_000_000_000), state=None)
    checkpoint(tmp_path, ".draft-00000021")
    (tmp_path / "step-00000022").write_text("no folder")
    assert complete(tmp_path) == [early, late]
    assert newest(tmp_path) == late
    assert (early.name, step_of(early), step_of(late)) == ("step-00000020", 20, 123_456_789)


def test_a_checkpoint_that_somebody_moved_aside_is_none(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path, name_of(2))
    for name in ("step-00000003.bak", "old-step-00000004", "step-three", "step-5"):
        checkpoint(tmp_path, name)
    assert newest(tmp_path) == kept
