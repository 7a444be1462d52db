"""Pointers into JSON documents, patches, differences."""

from jsonpatch.diff import diff, summary
from jsonpatch.errors import PatchError, PointerError, TestFailed
from jsonpatch.merge import make_merge, merge
from jsonpatch.patch import apply, invert
from jsonpatch.pointer import Pointer, find

__all__ = [
    "PatchError",
    "Pointer",
    "PointerError",
    "TestFailed",
    "apply",
    "diff",
    "find",
    "invert",
    "make_merge",
    "merge",
    "summary",
]
