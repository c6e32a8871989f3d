"""Consumer of `handover`: fetches each ParcelRef from standard input, and answers with times, peak memory and a sum."""

import json
import sys
import time
import warnings

import msgspec
import torch
from samples import check, reset_peak, status_mb

from miles_hpc.transport.batch import RolloutBatch
from miles_hpc.transport.carriers import Inbox, ParcelRef

warnings.simplefilter("ignore")  # the arrays are read-only on purpose
torch.set_num_threads(1)
inbox = Inbox(sys.argv[1])
torch.zeros(1)
print("{}", flush=True)
before = reset_peak()
for line in sys.stdin:
    received = time.monotonic()
    reset_peak()
    begun, cpu = time.monotonic(), time.process_time()
    ref = msgspec.json.decode(line, type=ParcelRef)
    batch = RolloutBatch.from_parcel(inbox.fetch(ref, 60))
    ids = torch.from_numpy(batch.token_ids)
    logprobs, mask = torch.from_numpy(batch.logprobs), torch.from_numpy(batch.loss_mask)
    sizes = batch.lengths.tolist()
    found = list(zip(ids.split(sizes), logprobs.split(sizes), mask.split(sizes), strict=True))
    ended, cpu = time.monotonic(), time.process_time() - cpu
    answer = {"ended": ended - (begun - received), "cpu_ms": cpu * 1e3, "sum": check(found)}
    answer["peak_mb"] = status_mb("VmHWM") - before
    inbox.release(ref)
    del batch, ids, logprobs, mask, found
    print(json.dumps(answer), flush=True)
