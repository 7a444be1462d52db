"""The patch that leads from one document to another."""

from jsonpatch.pointer import Pointer, same


def diff(before, after):
    """A patch of `add`, `remove` and `replace` operations that makes `after` of `before`; empty if they are the same.
    Dicts are compared by name, lists by position."""
    patch = []
    _diff(before, after, [], patch)
    return patch


def _diff(before, after, parts, patch):
    if same(before, after):
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before:
            if name in after:
                _diff(before[name], after[name], [*parts, name], patch)
            else:
                patch.append({"op": "remove", "path": Pointer.of([*parts, name]).text})
        for name in after:
            if name not in before:
                patch.append({"op": "add", "path": Pointer.of([*parts, name]).text, "value": after[name]})
    elif isinstance(before, list) and isinstance(after, list):
        _diff_lists(before, after, parts, patch)
    else:
        patch.append({"op": "replace", "path": Pointer.of(parts).text, "value": after})


def _diff_lists(before, after, parts, patch):
    """What both ends have in common stays; of the middle, values are replaced pair by pair, then removed or added."""
    start = 0
    while start < min(len(before), len(after)) and same(before[start], after[start]):
        start += 1
    end = 0
    shorter = min(len(before), len(after)) - start
    while end < shorter and same(before[-1 - end], after[-1 - end]):
        end += 1
    old = before[start : len(before) - end]
    new = after[start : len(after) - end]
    for index in range(min(len(old), len(new))):
        _diff(old[index], new[index], [*parts, start + index], patch)
    for index in range(len(old) - 1, len(new) - 1, -1):
        patch.append({"op": "remove", "path": Pointer.of([*parts, start + index]).text})
    for index in range(len(old), len(new)):
        patch.append({"op": "add", "path": Pointer.of([*parts, start + index]).text, "value": new[index]})


def summary(patch):
    """How many operations of each kind a patch has, and the names at the top of the document that it touches."""
    counts = {}
    touched = []
    for operation in patch:
        counts[operation["op"]] = counts.get(operation["op"], 0) + 1
        top = Pointer(operation["path"]).parts[:1]
        if top and top[0] not in touched:
            touched.append(top[0])
    return {"counts": counts, "touched": sorted(touched)}
