"""What the tables of the schema are made of."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta


def describe(text: str) -> Meta:
    """What a key means."""
    return Meta(description=text)


def path(text: str) -> Meta:
    """A path of the file system: relative to the file that sets it, absolute in a resolved config."""
    return Meta(description=text, extra={"path": True})


def program(text: str) -> Meta:
    """A path like the others, or a bare name that is looked up in PATH."""
    return Meta(description=text, extra={"path": True, "program": True})


PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
