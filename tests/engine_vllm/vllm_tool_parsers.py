"""Calls as vLLM's own tool parsers read them, in vLLM's interpreter: lines `[parser, text, tools]` of JSON in, lines
`read [[name, arguments], …]` out, or `failed WHY`. It imports nothing of agentrl."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import re
import sys
from typing import Any

TAG = r"<[^<>\s=]+>|\[TOOL_CALLS\]|\[ARGS\]"
LOOKED_UP = (  # by parsers at their start, whether or not the text has them
    "<|python_tag|><think></think><tool_call></tool_call><arg_key></arg_key><arg_value></arg_value>"
    "<|tool_calls_section_begin|><|tool_calls_section_end|><|tool_call_begin|><|tool_call_end|>"
    "<|tool_call_argument_begin|>"
)


class Tokenizer:
    """Each tag of a text is a token, and each other letter of it."""

    def __init__(self, text: str) -> None:
        self.words = sorted({*re.findall(TAG, text + LOOKED_UP), *text})
        self.vocab = {word: at for at, word in enumerate(self.words)}
        self.all_special_tokens = [word for word in self.words if len(word) > 1]
        self.all_special_ids = [self.vocab[word] for word in self.all_special_tokens]

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.vocab[word] for word in re.findall(TAG + "|.", text, re.DOTALL)]

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(self.words[id] for id in token_ids)

    def convert_ids_to_tokens(self, ids: list[int], **_: Any) -> list[str]:
        return [self.words[id] for id in ids]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.vocab.get(token)


def main() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    for line in sys.stdin:
        name, text, tools = json.loads(line)
        try:
            functions = [{"type": "function", "function": tool} for tool in tools]
            asked = [{"role": "user", "content": "?"}]
            request = ChatCompletionRequest(model="m", messages=asked, tools=functions)
            parser = ToolParserManager.get_tool_parser(name)(Tokenizer(text), request.tools)
            found = parser.extract_tool_calls(text, request).tool_calls
            read = [[call.function.name, json.loads(call.function.arguments)] for call in found]
            print("read", json.dumps(read), flush=True)
        except Exception as error:
            print("failed", f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
