"""SGLang's own message types, for `test_sglang_contract.py`: run with `build/wheels/sglang`, which has the
wheel of sglang and not the hundred packages that it depends on. Those are stubs here.

Reads {"built": [[module, type, arguments], …], "parsed": [[type, document], …]} from standard input. Each is given to
that type, and checked as the server does; prints {"errors": […], "stream": […]}, where the stream is a turn over two
weight versions as their own code writes it.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import types
from pathlib import Path

_REAL = {"msgspec", "numpy", "pydantic", "pydantic_core", "typing_extensions", "annotated_types", "typing_inspection"}
_OPTIONAL = {"org"}  # asked for by `copy`, and absent
_HEAVY = ("beam_search", "managers.schedule_batch", "managers.embed_types", "multimodal", "sampling.sampling_mask")
_OPENED = ("utils", "lora", "sampling")  # packages whose modules are real, and whose `__init__` is not


class Stub(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})
        setattr(self, name, made)
        return made


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        root = fullname.partition(".")[0]
        ours = root == "sglang" and not fullname.startswith(tuple(f"sglang.srt.{name}" for name in _HEAVY))
        if ours or root in _REAL | _OPTIONAL or root in sys.stdlib_module_names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        made = Stub(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module):
        pass


def open_package() -> None:
    folder = Path(next(place for place in sys.path if Path(place, "sglang").is_dir())) / "sglang"
    for name in ("", "srt", "srt.managers", "api", "api.v1", *(f"srt.{name}" for name in _OPENED)):
        kind = Stub if name.removeprefix("srt.") in _OPENED else types.ModuleType
        full = f"sglang.{name}".rstrip(".")
        module = sys.modules[full] = kind(full)
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
    sys.meta_path.insert(0, Stubs())


def stream() -> list[dict]:
    """A turn of three tokens under version 4 and two under 5, in three events."""
    from sglang.api.v1 import api_types as api
    from sglang.srt.utils.weight_versions import (
        WeightVersionEvent,
        add_weight_versions_to_meta_info,
        compute_weight_version_spans,
    )

    def event(tokens, total, version, finish=None):
        entries = [api.LogprobEntry(logprob=-token / 16, token_id=token) for token in tokens]
        meta = api.GenerateMetaInfo(
            id="turn$", prompt_tokens=2, completion_tokens=total, output_token_logprobs=entries, finish_reason=finish
        )
        meta = meta.to_json_value() | {"weight_version": version}
        return api.GenerateResponse(output_ids=tokens).to_json_value() | {"meta_info": meta}

    stop = api.GenerateMetaInfo(finish_reason=api.FinishStop(matched=14)).finish_reason
    # The second event left the server after the update: it names 5, though its token is of 4.
    events = [event([10, 11], 2, "4"), event([12], 3, "5"), event([13, 14], 5, "5", stop)]
    spans = compute_weight_version_spans([WeightVersionEvent("4", 3)], current_version="5", num_output_tokens=5)
    add_weight_versions_to_meta_info(events[-1]["meta_info"], spans, 5)
    return events


def main() -> None:
    asked = json.load(sys.stdin)
    open_package()
    import msgspec
    from sglang.api.v1 import api_types

    errors = []
    for module, name, arguments in asked["built"]:
        try:
            kind = getattr(importlib.import_module(module), name)
            made = kind(**arguments)
            if issubclass(kind, msgspec.Struct):
                msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=kind)
            if hasattr(made, "verify"):
                made.verify(96)
        except Exception as error:
            errors.append(f"{name} {arguments}: {error!r}")
    for name, document in asked["parsed"]:
        try:
            getattr(api_types, name).from_json_value(document)
        except Exception as error:
            errors.append(f"{name} {document}: {error!r}")
    print(json.dumps({"errors": errors, "stream": stream()}))


main()
