"""What a run file may name is what there is."""

import pytest

from miles_hpc.config import check
from miles_hpc.rollout import filters, generate, rewards

pytestmark = pytest.mark.unit


def test_filters_generate_functions_and_rewards_that_the_config_accepts_are_those_that_exist():
    assert set(check.BUILT_IN_FILTERS) == set(filters.BUILT_IN)
    assert all(callable(generate.generate_function(name)) for name in check.BUILT_IN_GENERATES)
    assert set(check.BUILT_IN_REWARDS) - {"remote_http"} == set(rewards.BUILT_IN)
