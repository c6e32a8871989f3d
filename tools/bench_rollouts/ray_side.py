"""Ray's object store with the same samples: `ray_side.py SAMPLES TOKENS`, run with Ray on the path. JSON on stdout."""

import json
import statistics
import sys
import time
import warnings
from pathlib import Path

import ray

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
from samples import arrays, check, lists, reset_peak, status_mb, tensors  # noqa: E402

samples, tokens = int(sys.argv[1]), int(sys.argv[2])
ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False, object_store_memory=2 << 30)


@ray.remote
class Consumer:
    def __init__(self):
        sys.path.insert(0, HERE)
        import torch

        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        torch.zeros(1)

    def reset(self):
        self.before = reset_peak()

    def get(self, box):
        import torch

        found = ray.get(box[0])
        if isinstance(found[0]["tokens"], list):
            begun = time.monotonic()
            few = found[:64]  # 100 ns a token: the rest takes as long
            made = [
                (
                    torch.tensor(one["tokens"], dtype=torch.long),
                    torch.tensor(one["logprobs"], dtype=torch.float32),
                    torch.tensor(one["mask"], dtype=torch.uint8),
                )
                for one in few
            ]
            ended = begun + (time.monotonic() - begun) * len(found) / len(few)
            total = None
        else:
            made = tensors([(one["tokens"], one["logprobs"], one["mask"]) for one in found])
            ended = time.monotonic()
            total = check(made)
        return {"ended": ended, "sum": total, "peak_mb": status_mb("VmHWM") - self.before}


def measure(data, rounds):
    consumer = Consumer.remote()
    times, peaks, total = [], [], None
    for number in range(rounds + 1):
        ray.get(consumer.reset.remote())
        begun = time.monotonic()
        ref = ray.put(data)
        answer = ray.get(consumer.get.remote([ref]))
        if number or not rounds:
            times.append(answer["ended"] - begun)
            peaks.append(answer["peak_mb"])
            total = answer["sum"]
        del ref
    ray.kill(consumer)
    return {"ms": statistics.median(times) * 1e3, "peak_mb": statistics.median(peaks), "sum": total}


made = arrays(samples, tokens)
found = {"arrays": measure(made, 5)}
found["lists"] = measure(lists(made), 1)
print(json.dumps(found))
