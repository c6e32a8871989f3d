"""`async with timeout(seconds)`: asyncio's own, which makes no task of its body as `asyncio.wait_for` does."""

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["timeout"]
