"""What can be wrong with a configuration."""


class ConfigError(Exception):
    """A setting is missing, or its value is not what was asked for."""


class SyntaxFault(ConfigError):
    """A line cannot be read; `line` counts from 1."""

    def __init__(self, message, line):
        super().__init__(f"line {line}: {message}")
        self.line = line
