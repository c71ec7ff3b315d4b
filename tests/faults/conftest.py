"""The figures of the long form go into the docs."""

from __future__ import annotations

import faulty
import pytest


def pytest_sessionfinish(session: pytest.Session) -> None:
    if faulty.LONG and not session.testsfailed:
        faulty.write_figures()
