"""Configuration files with sections and typed values."""

from iniconf.config import Config, loads
from iniconf.errors import ConfigError, SyntaxFault
from iniconf.values import parse_value
from iniconf.writer import dumps

__all__ = ["Config", "ConfigError", "SyntaxFault", "dumps", "loads", "parse_value"]
