"""Ray's object store with the same samples: `ray_side.py SAMPLES TOKENS`, run with Ray on the path.

Answers each line of standard input, `arrays` or `lists`, with one hand-over as JSON.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path

import ray

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
from samples import arrays, check, lists, reset_peak, status_mb, tensors  # noqa: E402

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever else is printed
samples, tokens = int(sys.argv[1]), int(sys.argv[2])
for left in (3, 2, 1, 0):
    # Its node has 30 s to start and its agent 15, which are too few on a busy machine.
    try:
        ray.init(
            num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False, object_store_memory=2 << 30
        )
        break
    except Exception:
        if not left:
            raise
        ray.shutdown()


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

        cpu = time.process_time()
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
            total = cpu = None
        else:
            made = tensors([(one["tokens"], one["logprobs"], one["mask"]) for one in found])
            ended, cpu = time.monotonic(), time.process_time() - cpu
            total = check(made)
        return {"ended": ended, "cpu": cpu, "sum": total, "peak_mb": status_mb("VmHWM") - self.before}


def once(data, consumer):
    ray.get(consumer.reset.remote())
    begun, cpu = time.monotonic(), time.process_time()
    ref = ray.put(data)
    answer = ray.get(consumer.get.remote([ref]))
    cpu = answer["cpu"] and (time.process_time() - cpu + answer["cpu"]) * 1e3
    return {
        "ms": (answer["ended"] - begun) * 1e3,
        "cpu_ms": cpu,
        "peak_mb": answer["peak_mb"],
        "sum": answer["sum"],
    }


data = {"arrays": arrays(samples, tokens)}
consumers = {kind: Consumer.remote() for kind in ("arrays", "lists")}
for consumer in consumers.values():
    ray.get(consumer.reset.remote())
print("{}", file=answers, flush=True)
for line in sys.stdin:
    kind = line.strip()
    if kind not in data:
        data[kind] = lists(data["arrays"])
    print(json.dumps(once(data[kind], consumers[kind])), file=answers, flush=True)
