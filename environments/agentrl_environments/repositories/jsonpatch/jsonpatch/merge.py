"""Merge patches: documents in which null means `remove`."""

from jsonpatch.pointer import same


def merge(document, patch):
    """The document with a merge patch applied; the one given stays as it is."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(document) if isinstance(document, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged


def make_merge(before, after):
    """The merge patch that makes `after` of `before`, both dicts. Raises ValueError if `after` holds a null that would
    have to be written."""
    patch = {}
    for name in before:
        if name not in after:
            patch[name] = None
    for name, value in after.items():
        if name in before and same(before[name], value):
            continue
        if _holds_null(value):
            raise ValueError(f"{name} holds a null, which a merge patch cannot write")
        both = isinstance(value, dict) and isinstance(before.get(name), dict)
        patch[name] = make_merge(before[name], value) if both else value
    return patch


def _holds_null(value):
    if isinstance(value, dict):
        return any(_holds_null(inner) for inner in value.values())
    return value is None
