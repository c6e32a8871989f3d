"""SHA-256 and BLAKE2 as hashlib has them, without OpenSSL, which would be a tenth of an agent's or a hub's memory.

The interpreter's own modules are tried first, as its `random` does; they are not promised, so hashlib is the other way.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hashlib import blake2b, sha256
else:
    try:
        from _blake2 import blake2b
    except ImportError:
        from hashlib import blake2b
    try:
        from _sha2 import sha256
    except ImportError:
        try:
            from _sha256 import sha256
        except ImportError:
            from hashlib import sha256

__all__ = ["blake2b", "sha256"]
