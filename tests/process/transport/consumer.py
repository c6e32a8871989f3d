"""A consumer in a process of its own: reads a ParcelRef from standard input, says what it found, and waits."""

import sys

import msgspec
import numpy as np

from miles_hpc.transport.carriers import Inbox, ParcelRef
from miles_hpc.transport.parcel import read_parcel

carrier = sys.argv[1]
inbox = Inbox(carrier)
for line in sys.stdin:
    ref = msgspec.json.decode(line, type=ParcelRef)
    columns, meta = read_parcel("test", inbox.fetch(ref, 20.0))
    print(meta["number"], int(columns["values"].sum(dtype=np.int64)), columns["values"].flags.writeable, flush=True)
    inbox.release(ref)
