"""Large packages load sooner, and bring no package that nobody needs.

For the entry points of our own commands and processes, around their first import of torch or transformers. Whoever
imports agentrl as a library keeps the interpreter as it is.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

_UNASKED = ("torchao",)
"""What transformers imports wherever it is installed, though only a model that it quantised needs it. It takes a third
of a second, and writes warnings of its own to the terminal. Whoever means it (`train.optimizer = "adamw8bit"`) imports
it later."""


@contextmanager
def quick_imports() -> Generator[None]:
    """Inside, collect no garbage, and let nobody find the packages of `_UNASKED`.

    Modules stay for good, yet the collector looks through all of them time and again while they load: a fifth of the
    time. Modules that loaded here are frozen, so that it leaves them alone."""
    was_collecting = gc.isenabled()
    gc.disable()
    loaded_modules = cast("dict[str, object]", sys.modules)
    hidden_names = [hidden_name for hidden_name in _UNASKED if hidden_name not in loaded_modules]
    loaded_modules.update(dict.fromkeys(hidden_names))  # None: this is how Python says that there is no such module
    try:
        yield
    finally:
        for hidden_name in hidden_names:
            del loaded_modules[hidden_name]
        gc.freeze()
        if was_collecting:
            gc.enable()
