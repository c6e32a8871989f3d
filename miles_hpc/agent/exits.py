"""What the exit code of an agent tells its warden."""

from __future__ import annotations

BROKEN = 70
"""The agent met an error that it did not expect (EX_SOFTWARE): a new incarnation may do better."""
