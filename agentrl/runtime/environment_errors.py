"""What an environment's own code raises, said in one line. Knows no command."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Generator

from agentrl.env.checking import single
from agentrl.errors import EnvError, InfrastructureError, UsageError


@contextlib.contextmanager
def environment_errors(what: str) -> Generator[None]:
    """What an environment's own code raises becomes EnvError, named once."""
    try:
        yield
    except (InfrastructureError, UsageError):
        raise
    except Exception as error:
        inner = single(error)
        if isinstance(inner, InfrastructureError | UsageError):
            raise inner from error
        place = traceback.extract_tb(inner.__traceback__)[-1]
        said = " ".join(str(inner).split())
        raise EnvError(f"{what} raised {type(inner).__name__}: {said} ({place.filename}:{place.lineno})") from error
