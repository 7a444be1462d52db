"""A configuration that was read."""

import re

from iniconf.errors import ConfigError, SyntaxFault
from iniconf.lines import settings
from iniconf.values import parse_duration, parse_value

REFERENCE = re.compile(r"\$\{([^}]*)\}")
DEEPEST = 10


class Config:
    """Values by dotted name, `section.key`, or `key` for what stands before the first section."""

    def __init__(self, values=None):
        self._values = dict(values or {})

    def __contains__(self, name):
        return name in self._values

    def names(self):
        """All names, in the order in which they were first set."""
        return list(self._values)

    def sections(self):
        """The sections that hold a value, in order."""
        found = []
        for name in self._values:
            section = name.rpartition(".")[0]
            if section not in found:
                found.append(section)
        return found

    def section(self, section):
        """The values of a section by key."""
        return {name.rpartition(".")[2]: self.get(name) for name in self._values if name.rpartition(".")[0] == section}

    def get(self, *names, default=None):
        """The value of the first of the names that is there, with its references filled in; else `default`."""
        for name in names:
            if name in self._values:
                return self._filled(self._values[name], [name])
        return default

    def require(self, name, kind=None):
        """The value of a name. Raises ConfigError if it is missing or is no `kind` (a type)."""
        if name not in self._values:
            raise ConfigError(f"{name} is missing")
        value = self.get(name)
        if kind is not None and type(value) is not kind:
            raise ConfigError(f"{name} = {value!r} is no {kind.__name__}")
        return value

    def seconds(self, name, default=None):
        """A duration in seconds; a plain number counts as seconds. Raises ConfigError."""
        value = self.get(name, default=default)
        if value is None or isinstance(value, (int, float)):
            return value
        try:
            return parse_duration(value)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error

    def merged(self, other):
        """A configuration with the values of both; those of `other` win."""
        return Config({**self._values, **other._values})

    def _filled(self, value, path):
        """`value` with `${name}` replaced. A text that is one reference only keeps the type of what it names."""
        if isinstance(value, list):
            return [self._filled(item, path) for item in value]
        if not isinstance(value, str):
            return value
        whole = REFERENCE.fullmatch(value)
        if whole:
            return self._referred(whole[1], path)
        return REFERENCE.sub(lambda found: str(self._referred(found[1], path)), value)

    def _referred(self, name, path):
        if name in path or len(path) > DEEPEST:
            raise ConfigError("references in a circle: " + " -> ".join([*path, name]))
        if name not in self._values:
            raise ConfigError(f"{path[-1]} refers to {name}, which is missing")
        return self._filled(self._values[name], [*path, name])


def loads(text):
    """The configuration in a text. A key that is set twice in a section is a fault. Raises SyntaxFault."""
    values = {}
    for section, key, raw, number in settings(text):
        name = f"{section}.{key}" if section else key
        if name in values:
            raise SyntaxFault(f"{name} is set twice", number)
        try:
            values[name] = parse_value(raw)
        except ValueError as error:
            raise SyntaxFault(str(error), number) from error
    return Config(values)
