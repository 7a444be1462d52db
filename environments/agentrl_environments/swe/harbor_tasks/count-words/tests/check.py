import json
from pathlib import Path

EXPECTED = {
    "the": 7, "wind": 2, "has": 2, "a": 2, "word": 4, "for": 2, "sea": 3, "and": 2, "but": 1, "of": 1, "is": 1,
    "stay": 1, "wind's": 1, "go": 3,
}  # fmt: skip

assert json.loads(Path("/app/counts.json").read_text("utf-8")) == EXPECTED
