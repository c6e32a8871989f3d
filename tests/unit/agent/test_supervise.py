"""Who may start workers."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from miles_hpc.agent.supervise import Supervisor
from miles_hpc.wire.ids import Generation

pytestmark = pytest.mark.unit


def test_no_thread_but_the_main_one_starts_a_worker_that_would_die_with_it():
    supervisor, refused = Supervisor("run/0/node-00000/i/", "/run"), []

    def spawn() -> None:
        with pytest.raises(
            RuntimeError, match="by the main thread only: PDEATHSIG fires when its thread ends"
        ) as error:
            supervisor.spawn("w", Generation(1, 1), [sys.executable, "-c", ""], dict(os.environ), 2)
        refused.append(error.value)

    thread = threading.Thread(target=spawn)
    thread.start()
    thread.join(20)
    assert len(refused) == 1 and supervisor.workers == {}
