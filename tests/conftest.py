"""For every layer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Time on the wall says nothing about an example: a machine that also runs other things would make them fail by chance.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


def unaccounted(place: Path) -> list[tuple[str, dict[str, Any]]]:
    """Runs below a directory whose groups do not add up."""
    found = []
    for pattern in ("summary.json", "*/summary.json", "*/*/summary.json"):
        for path in place.glob(pattern):
            groups = json.loads(path.read_text()).get("groups")
            if not groups or "dispatched" not in groups:
                continue
            ends = groups["committed"] + groups["returned"] + sum(groups["dropped"].values())
            if groups["dispatched"] != ends:
                found.append((str(path), groups))
    return found


@pytest.fixture(autouse=True)
def whole_runs_add_up(request: pytest.FixtureRequest) -> Iterator[None]:
    """dispatched = committed + returned + dropped, in the summary of every run that a test has made."""
    if request.node.get_closest_marker("unit") or "tmp_path" not in request.fixturenames:
        yield
        return
    place = request.getfixturevalue("tmp_path")
    yield
    assert unaccounted(place) == []
