"""Applying patches: lists of operations, dicts with `op`, `path` and `value` or `from`."""

from copy import deepcopy

from jsonpatch.errors import PatchError, PointerError, TestFailed
from jsonpatch.pointer import Pointer, position, same


def apply(document, patch):
    """The document after all operations; the one given stays as it is. Raises PatchError, and then nothing is done."""
    document = deepcopy(document)
    for operation in patch:
        document = _apply_one(document, operation)
    return document


def _apply_one(document, operation):
    kind = _field(operation, "op")
    path = Pointer(_field(operation, "path"))
    if kind == "test":
        if not same(path.get(document), _field(operation, "value")):
            raise TestFailed(f"another value at {path.text}")
        return document
    if kind == "add":
        return add(document, path, deepcopy(_field(operation, "value")))
    if kind == "remove":
        return remove(document, path)
    if kind == "replace":
        path.get(document)
        return put(document, path, deepcopy(_field(operation, "value")))
    if kind not in ("move", "copy"):
        raise PatchError(f"unknown operation {kind}")
    origin = Pointer(_field(operation, "from"))
    value = deepcopy(origin.get(document))
    if kind == "move":
        if origin.holds(path) and origin.text != path.text:
            raise PatchError("cannot move a value into itself")
        document = remove(document, origin)
    return add(document, path, value)


def _field(operation, name):
    if name not in operation:
        raise PatchError(f"an operation lacks {name}")
    return operation[name]


def add(document, path, value):
    """Put a value where there may be none; in a list, what stands there moves on."""
    if not path.parts:
        return value
    holder = path.parent().get(document)
    if isinstance(holder, list):
        index = position(path.parts[-1], len(holder))
        if index > len(holder):
            raise PointerError(f"{path.text} lies behind the end")
        holder.insert(index, value)
    elif isinstance(holder, dict):
        holder[path.parts[-1]] = value
    else:
        raise PointerError(f"nothing can be added at {path.text}")
    return document


def remove(document, path):
    """Take a value out."""
    path.get(document)
    if not path.parts:
        return None
    holder = path.parent().get(document)
    if isinstance(holder, list):
        del holder[position(path.parts[-1], len(holder))]
    else:
        del holder[path.parts[-1]]
    return document


def put(document, path, value):
    """Put a value in the place of another."""
    if not path.parts:
        return value
    holder = path.parent().get(document)
    key = position(path.parts[-1], len(holder)) if isinstance(holder, list) else path.parts[-1]
    holder[key] = value
    return document


def invert(document, patch):
    """The patch that leads from the patched document back to `document`. Knows `add`, `remove`, `replace`, `test`."""
    steps = []
    for operation in patch:
        path = Pointer(operation["path"])
        kind = operation["op"]
        if kind == "add":
            steps.append(_undo_add(document, path))
        elif kind == "remove":
            steps.append({"op": "add", "path": path.text, "value": path.get(document)})
        elif kind == "replace":
            steps.append({"op": "replace", "path": path.text, "value": path.get(document)})
        elif kind != "test":
            raise PatchError(f"cannot invert {kind}")
        document = apply(document, [operation])
    return steps[::-1]


def _undo_add(document, path):
    if not path.parts:
        return {"op": "replace", "path": "", "value": document}
    holder = path.parent().get(document)
    if isinstance(holder, dict) and path.parts[-1] in holder:
        return {"op": "replace", "path": path.text, "value": holder[path.parts[-1]]}
    if isinstance(holder, list):
        index = position(path.parts[-1], len(holder))
        return {"op": "remove", "path": Pointer.of([*path.parts[:-1], index]).text}
    return {"op": "remove", "path": path.text}
