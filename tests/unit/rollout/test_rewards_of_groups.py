"""What a reward process is told of a sample can be written, whatever its generate function has set."""

import msgspec
import numpy as np
import pytest

from miles_hpc.rollout.rewards import _bare, checked, pack_message
from miles_hpc.rollout.sample import Sample

pytestmark = pytest.mark.unit


def test_a_sample_whose_generate_function_set_a_reward_goes_to_a_function_of_the_group():
    one = Sample(group="g", index=0, prompt_index=0, epoch=0, prompt="p", seed=1, extra={"experts": np.zeros(2)})
    one.reward = checked(0.5)
    heard = msgspec.msgpack.decode(pack_message([_bare(one)])[4:], type=list[Sample])
    assert heard[0].reward == 0.5 and heard[0].extra == {} and len(one.extra) == 1
