from __future__ import annotations

from collections.abc import Generator

import pytest

from attacks.other_user import OtherUser, account


@pytest.fixture(scope="session")
def other_user() -> Generator[OtherUser]:
    """Another user of this machine; the test needs the marker `other_user`."""
    with account() as user:
        yield user
