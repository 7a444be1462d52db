"""Find the red square of a grid that is drawn as a picture: the smallest task that cannot be solved without eyes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agentrl.env import Env, spaces
from agentrl.env.checks.oracles import Oracle, say, script
from agentrl.env.image_parts import image_part
from agentrl.errors import UsageError

_LIGHT: Final = ((235, 235, 235), (205, 205, 205))
_RED: Final = (220, 30, 30)
_LARGEST: Final = 26  # columns have letters

Cell = tuple[int, int]


class PictureGrid(Env):
    """`agentrl/PictureGrid-v0`: `rounds` pictures of a grid of `size` x `size` squares, each `pixels` wide, one of them
    red. The policy names the red one by column and row, such as B2, one picture a turn.

    Process reward of a turn: 1 if it is right. Outcome: the share of right answers; success if all are. Reset option
    `cells`: column and row of each picture's red square, from 0."""

    observation_space = spaces.Messages(max_images=1)
    replayable = True
    blocking = False

    def __init__(self, *, size: int = 3, rounds: int = 2, pixels: int = 8) -> None:
        if not 2 <= size <= _LARGEST or rounds < 1 or not 1 <= pixels <= 128:
            correction = f"give size 2 to {_LARGEST}, rounds from 1, pixels 1 to 128"
            raise UsageError(f"size = {size}, rounds = {rounds}, pixels = {pixels}: {correction}")
        self._size, self._rounds, self._pixels = size, rounds, pixels

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        random_cells = self.np_random.integers(0, self._size, size=(self._rounds, 2)).tolist()
        cell_pairs = (options or {}).get("cells", random_cells)
        self._cells: list[Cell] = [(int(column_index), int(row_index)) for column_index, row_index in cell_pairs]
        if len(self._cells) != self._rounds or not all(
            0 <= coordinate < self._size for cell in self._cells for coordinate in cell
        ):
            raise UsageError(f"cells = {cell_pairs}: give {self._rounds} pairs of numbers from 0 to {self._size - 1}")
        self._right, self._at = 0, 0
        return self._shown("Which square is red? Columns are A, B, … from the left, rows 1, 2, … from the top. "), {}

    def step(self, action: str) -> Any:
        is_right = action.strip().upper() == name(self._cells[self._at])
        self._right, self._at = self._right + is_right, self._at + 1
        if self._at < self._rounds:
            return self._shown("And here? "), float(is_right), False, False, {}
        right_share = self._right / self._rounds
        return (), float(is_right), True, False, {"outcome": right_share, "success": right_share == 1.0}

    def _shown(self, text: str) -> tuple[dict[str, Any], ...]:
        picture = image_part(draw(self._size, self._cells[self._at], self._pixels))
        return ({"role": "user", "content": [{"type": "text", "text": text}, picture]},)

    def oracles(self) -> list[Oracle]:
        right_names = [name(cell) for cell in self._cells]
        return [
            Oracle("gold", 1.0, script(*right_names)),
            Oracle("the last one wrong", (self._rounds - 1) / self._rounds, script(*right_names[:-1], "none")),
            Oracle("no-op", 0.0, say("")),
        ]


def name(cell: Cell) -> str:
    """A square's name, such as B2."""
    column_index, row_index = cell
    return f"{chr(ord('A') + column_index)}{row_index + 1}"


def draw(size: int, red: Cell, pixels: int) -> NDArray[np.uint8]:
    """A chessboard of greys with one red square [size * pixels, size * pixels, 3]."""
    squares = np.array(_LIGHT, dtype=np.uint8)[np.indices((size, size)).sum(0) % 2]
    squares[red[1], red[0]] = _RED
    return squares.repeat(pixels, 0).repeat(pixels, 1)
