"""Real engines behind the real router under our controller: windows, versions in the tokens, losses that cost nothing."""

import asyncio

import pytest

from miles_hpc.inference.client import ControllerClient
from miles_hpc.inference.generate import GenerateClient, SamplingParams
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.service import router_url_in
from miles_hpc.inference.weights import update_from_disk
from miles_hpc.train.make_model import make_model

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


def weights(fleet, version):
    path = fleet.run_dir / "weights" / str(version)
    return str(path if path.exists() else make_model(fleet.config_make, version, path))


def test_first_window(pair):
    fleet = pair
    from miles_hpc.config.schema import MakeModelConfig

    fleet.config_make = MakeModelConfig()

    async def body():
        async with open_http(fleet.key) as http, ControllerClient(fleet) as controller:
            generate = GenerateClient(lambda: router_url_in(fleet.pools), http, 300, published_only=True)
            window = await controller.start_update_weights(60)
            path = weights(fleet, 1)
            result = await update_from_disk(window.engines, path, 1, "retract", http=http)
            ended = await controller.end_update_weights(window.window_id, 1, path, result.failed)
            print(result, ended)
            status = await controller.wait_serving(2, 30)
            print(status)
            calls = [
                generate.generate([10, 20, 30 + i], SamplingParams(max_new_tokens=40, seed=5), deadline_s=40)
                for i in range(16)
            ]
            drawn = await asyncio.gather(*calls)
            print({one.weight_versions[0] for one in drawn}, generate.retries)

    asyncio.run(asyncio.wait_for(body(), 200))
