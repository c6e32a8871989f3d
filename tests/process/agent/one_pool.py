"""The real hub, for a run of one pool: `python one_pool.py RUN_DIR ADDRESS SPEC`, SPEC being JSON.

SPEC: `program` (Python source, the ports it may use in MILES_HPC_LISTEN), and fields of CommandWorkerSpec.
"""

from __future__ import annotations

import json
import sys

import msgspec

from miles_hpc.hub import run
from miles_hpc.specs.base import CommandWorkerSpec, SchedulingSpec
from miles_hpc.wire.messages import PortInfo, Probe

if __name__ == "__main__":
    run_dir, address, text = sys.argv[1:]
    fields = json.loads(text)
    program = fields.pop("program")
    spec = CommandWorkerSpec(
        name="pool",
        category="engine",
        launch_command=lambda ctx: [sys.executable, "-c", program],
        scheduling=SchedulingSpec(num_cells=fields.pop("num_cells", 1)),
        port_infos=tuple(msgspec.convert(fields.pop("ports", []), list[PortInfo])),
        probe=msgspec.convert(fields.pop("probe", {}), Probe),
        **fields,
    )
    run.compute_specs = lambda config, run_dir: [spec]
    # On no node that has an agent: an agent keeps the hub of its own node, and this one is not its child.
    sys.exit(run.main(["--run-dir", run_dir, "--attempt", "0", "--address", address, "--node", ""]))
