"""An engine whose policy says given texts, one a turn; the last one again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.engine.rendering.renderer import Renderer
from agentrl.protocols import GenerateRequest
from tests.parts.fake_engine import FakeEngine


def saying(renderer: Renderer, *texts: str, **settings: Any) -> FakeEngine:
    """A `FakeEngine` with these turns; `settings` are its own."""
    left = list(texts)

    def script(request: GenerateRequest) -> Sequence[int]:
        text = left.pop(0) if len(left) > 1 else left[0]
        return renderer.start([{"role": "user", "content": text}])[6:-13] + request.sampling.stop_token_ids[:1]

    return FakeEngine(script, version=1, **settings)
