"""Property tests have no deadline: a test that takes long on a busy machine has not failed."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
