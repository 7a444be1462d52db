"""`agentrl bench chat_templates`: our renderer and the package `renderers` on the same real templates.

    make adapters templates
    python benchmarks/chat_templates.py

For the families that `renderers` knows it prints, cell by cell of the matrix, whether what each of them appends is what
the template writes; and whether a message can pass for control tokens. benchmarks/chat_templates.md has the figures.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the catalogue of the tests

import renderers
from renderers.base import RENDERER_REGISTRY, _populate_registry  # pyright: ignore[reportPrivateUsage]
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from agentrl.engine.rendering.renderer import Renderer
from agentrl.errors import ModelError
from tests.templates.catalogue import Real, everything, write_folder
from tests.templates.matrix import cells, messages_of

# Templates of our catalogue that are those of models which `renderers` knows by name, and its name for them.
KNOWN: tuple[tuple[str, str], ...] = (
    (r"trl/qwen3(_instruct_2507)?$|Qwen-Qwen3-0.6B", "qwen3"),
    (r"trl/qwen3_vl", "qwen3-vl"),
    (r"trl/qwen3_5_think|Qwen3.5-4B", "qwen3.5"),
    (r"trl/qwen3_6", "qwen3.6"),
    (r"trl/qwen3_8", "qwen3.8"),
    (r"trl/gemma4(_v5)?$|google-gemma-4-31B-it$", "gemma4"),
    (r"trl/glm4moe|GLM-4.6", "glm-4.5"),
    (r"GLM-4.7-Flash", "glm-5"),
    (r"MiniMax-M2", "minimax-m2"),
    (r"trl/deepseekv3", "deepseek-v3"),
    (r"DeepSeek-V4", "deepseek-v4"),
    (r"Kimi-K2-Instruct", "kimi-k2"),
    (r"nemotron_3_(nano|super)|Nemotron-3-Nano", "nemotron-3"),
    (r"nemotron_3_ultra", "nemotron-3-ultra"),
    (r"nemotron_3_5", "nemotron-3.5"),
    (r"llama3_2$|Llama-3.2", "llama-3"),
    (r"Laguna-XS\.2", "laguna-xs.2"),
    (r"Laguna-XS-2.1", "laguna-xs-2.1"),
    (r"Laguna-S-2.1", "laguna-s-2.1"),
    (r"gptoss|gpt-oss", "gpt-oss"),
    (r"Hy3", "hy3"),
)
_EQUAL = ("equal", "kept")


class Theirs(Renderer):
    """`renderers` behind our interface; it keeps sampled tokens wherever its settings let it."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder)
        _populate_registry()
        kind = RENDERER_REGISTRY[name]
        config: Any = next(
            one for one in vars(renderers).values() if getattr(one, "model_fields", {}).get("name") and _is(one, name)
        )
        given = {"thinking_retention": "all"} if "thinking_retention" in config.model_fields else {}
        while True:  # the template does not spell out every token that its real tokenizer has
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            tokenizer.name_or_path = name
            try:
                self._other: Any = kind(tokenizer, config(**given))
                return
            except (AssertionError, ValueError) as error:
                lacking = re.search(r"(?:Special token|one token for) '(.+?)'[ ,]", str(error))
                if lacking is None:
                    raise
                self.conversations.tokenizer.add_special_tokens([AddedToken(lacking[1], normalized=False)])
                self.conversations.tokenizer.save(str(folder / "tokenizer.json"))

    def start(self, messages: Any, tools: Any = ()) -> tuple[int, ...]:
        try:
            return tuple(self._other.render_ids([*messages], tools=[*tools] or None, add_generation_prompt=True))
        except Exception as error:
            raise ModelError(f"{type(error).__name__}: {error}") from error

    def extend(self, sampled: Sequence[int], messages: Any, tools: Any = ()) -> tuple[int, ...]:
        text = self._tokenizer.decode([*sampled], skip_special_tokens=False)
        asked = text.find("Is it green?")
        if asked < 0:
            ids = [*self.start(messages_of("user")[:1], tools), *sampled]
            cut = len(ids) - len(sampled)
        else:  # the template rewrites what stands before: `sampled` has it too, and the turn begins within
            ids, at = [*sampled], min(found for said in ("GREEN", "run_tests") if (found := text.find(said, asked)) > 0)
            cut = len(self._tokenizer.encode(text[:at]).ids)
        try:
            found = self._other.bridge_to_next_turn(ids[:cut], ids[cut:], [*messages], tools=[*tools] or None)
        except Exception as error:
            raise ModelError(f"{type(error).__name__}: {error}") from error
        if found is None:
            raise ModelError("it renders the conversation anew")
        return tuple(found.token_ids[len(ids) :])


def _is(config: Any, name: str) -> bool:
    try:
        return config().name == name
    except Exception:
        return False


def results(real: Real, folder: Path, renderer: Renderer) -> Counter[str]:
    """How many cells of a template are equal, or otherwise and how."""
    found: Counter[str] = Counter()
    try:
        for cell in cells(real, folder, renderer):
            first, _, why = cell.result.partition(": ")
            kind = first.partition(";")[0] if first.startswith(_EQUAL) else first
            found["anew" if "anew" in why else kind] += 1
    except (ModelError, ValueError) as error:
        found[f"refused: {error}"[:60]] += 1
    return found


def forged(renderer: Renderer, real: Real) -> str:
    """Whether a message of the environment that spells out the control tokens adds any."""
    control = {
        token for token, added in renderer.conversations.tokenizer.get_added_tokens_decoder().items() if added.special
    }

    def answer(sampled: str, text: str) -> int:
        added = renderer.extend(
            renderer.conversations.tokenizer.encode(sampled).ids, [{"role": "user", "content": text}]
        )
        return sum(token in control for token in added)

    end = real.family.final or real.family.text or real.family.markers[0]
    for sampled in (f"GREEN{end}", f"Hm.</think>GREEN{end}", "GREEN"):
        with suppress(ModelError):
            same = answer(sampled, "a" + "".join(renderer.conversations.special) + "z") == answer(sampled, "az")
            return "no" if same else "yes"
    return "?"


def made(real: Real, folder: Path, name: str, whose: str) -> Counter[str]:
    """What one of the two does with a template: its cells, and whether control tokens can be forged."""
    try:
        renderer = Renderer(folder) if whose == "ours" else Theirs(folder, name)
    except Exception as error:
        return Counter({f"not made: {type(error).__name__}": 1})
    return results(real, folder, renderer) + Counter({f"forged: {forged(renderer, real)}": 1})


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    totals = {"ours": Counter[str](), "theirs": Counter[str]()}
    for real in everything():
        name = next((name for what, name in KNOWN if re.search(what, real.name)), None)
        if name is None:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = write_folder(Path(place) / "model", real)
            for whose, total in totals.items():
                total.update(found := made(real, folder, name, whose))
                print(f"{real.name:45} {name:15} {whose:7} {dict(found)}", flush=True)
    for whose, found in totals.items():
        print(whose, dict(found))


if __name__ == "__main__":
    main()
