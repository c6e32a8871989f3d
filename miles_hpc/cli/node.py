"""`miles-hpc agent RUN_FILE… --run-dir DIR`: one node of a Slurm job. srun starts it on every node of the job.

Node 0 prepares the attempt; the others wait for it. Then this process becomes the node's warden (execve), so that the
warden is the Slurm task itself.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from miles_hpc.cli.exits import BAD_INPUT, DRAINED, FAILED, one_line
from miles_hpc.cli.parsing import Parser, add_files
from miles_hpc.config.errors import ConfigError
from miles_hpc.launch.allocation import JobKey, NotInAllocation, Task
from miles_hpc.launch.attempts import AttemptError
from miles_hpc.launch.job_files import write_exit_code
from miles_hpc.launch.preparation import (
    FIRST_SIGN_S,
    PREPARED_WITHIN_S,
    FirstNodeGone,
    PreparationTimeout,
    Prepared,
    listening_path,
    say_prepared,
    wait_prepared,
    wait_shared,
)
from miles_hpc.wire.program import setup_logging

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What Slurm, a user or an end of the allocation sends; the warden has its own ways with them."""


class Signalled(BaseException):
    """A signal came before this process is a warden. Not an Exception: nothing on the way may take it for its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Become one node of the run. Returns only when that fails."""
    setup_logging()
    arguments = parser().parse_args(argv)
    try:
        task = Task.from_environ()
    except NotInAllocation as error:
        return _refuse(str(error))
    run_dir = Path(arguments.run_dir).expanduser().absolute()
    if arguments.join:
        return join(run_dir, task)
    _raise_on_signals()
    if task.index == 0:
        prepared = _prepare_and_say(arguments, run_dir, task)
    else:
        try:
            wait_shared(run_dir)
            prepared = wait_prepared(run_dir, task.job, task.step, arguments.prepare_timeout)
            _hold_signals()
        except PreparationTimeout as error:
            return _fail(str(error))
        except FirstNodeGone as error:
            # In its place: nobody else says what the batch script ends with.
            with contextlib.suppress(OSError):
                write_exit_code(run_dir, task.job, FAILED)
            return _fail(str(error))
        except Signalled as error:
            return _drained(f"{error} came to {task.host} while it waited for the first node to prepare the run")
    if prepared.error:
        # Node 0 has said why; the others only end with the same code.
        return prepared.exit_code
    try:
        become_warden(run_dir, task, prepared, task.index)
    except (ConfigError, OSError) as error:
        return _fail(f"{task.host}: the agent could not be started: {error}")


def parser() -> argparse.ArgumentParser:
    """The command line of a node."""
    found = Parser(prog="miles-hpc agent", description="One node of a run in a Slurm job; started by srun.")
    add_files(found)
    found.add_argument("--run-dir", metavar="DIR", required=True, help="on a file system that all nodes share")
    found.add_argument("--resume", action="store_true", help="continue the run in --run-dir (a requeue implies it)")
    found.add_argument("--join", action="store_true", help="be more nodes for the run in --run-dir, which goes on")
    found.add_argument(
        "--prepare-timeout",
        type=float,
        metavar="S",
        help="how long the other nodes wait for the first one to begin, check the files and build the model "
        f"(default: {FIRST_SIGN_S:g} for its begin, {PREPARED_WITHIN_S:g} in all)",
    )
    return found


def join(run_dir: Path, task: Task) -> int:
    """Become one more node of a run that another job began. Returns only when that fails."""
    from miles_hpc.launch.joining import attempt_to_join, claim_place

    try:
        attempt = attempt_to_join(run_dir)
        index = claim_place(run_dir, attempt, task)
        become_warden(run_dir, task, Prepared(run_id=attempt.run_id, attempt=attempt.number), index, guest=True)
    except AttemptError as error:
        return _refuse(str(error))
    except (ConfigError, OSError) as error:
        return _fail(f"{task.host}: the agent could not be started: {error}")


def _prepare_and_say(arguments: argparse.Namespace, run_dir: Path, task: Task) -> Prepared:
    # Until its word is published: the others take a first node that listens no more for one that has said all.
    with contextlib.ExitStack() as listens:
        prepared = _prepared(arguments, run_dir, task, listens)
        try:
            say_prepared(run_dir, task.job, task.step, prepared)
            if prepared.error:
                # srun gives the highest code of all tasks; the script takes the one in this file.
                write_exit_code(run_dir, task.job, prepared.exit_code)
        except OSError as error:
            _fail(f"{run_dir} cannot be written on {task.host}: {error.strerror}")
            return msgspec.structs.replace(prepared, error=prepared.error or str(error), exit_code=FAILED)
        return prepared


def _prepared(arguments: argparse.Namespace, run_dir: Path, task: Task, listens: contextlib.ExitStack) -> Prepared:
    """What to tell the others, to whom this node listens from now on."""
    from miles_hpc.launch.first_node import listening

    try:
        try:
            listens.enter_context(listening(listening_path(run_dir, task.job, task.step), task.nodes))
            return prepare(arguments, run_dir, task)
        finally:
            _hold_signals()
    except Signalled as error:
        text = f"{error} came while {task.host} prepared the run: no process of it was started"
        return Prepared(error=text, exit_code=_drained(text))
    except (ConfigError, AttemptError) as error:
        return Prepared(error=one_line(error), exit_code=_refuse(str(error)))
    except (OSError, RuntimeError) as error:
        text = f"{run_dir} could not be prepared: {one_line(error)}"
        return Prepared(error=text, exit_code=_fail(text))
    except Exception as error:  # whatever it is, the other nodes must not wait for this one
        traceback.print_exc()
        text = f"{run_dir} could not be prepared: {type(error).__name__}: {one_line(error)}"
        return Prepared(error=text, exit_code=_fail(text))


def prepare(arguments: argparse.Namespace, run_dir: Path, task: Task) -> Prepared:
    """All that comes before the first process of the run: what `miles-hpc run` does, for a job.

    Raises:
        ConfigError, AttemptError: bad input, in one line.
        OSError, RuntimeError: the run directory cannot be written, or the model not be built.
    """
    from miles_hpc.cli.apart import apart
    from miles_hpc.cli.environment import write_environment
    from miles_hpc.cli.preflight import claim_run_dir, preflight
    from miles_hpc.cli.run import loaded_files, make_model_in, with_model
    from miles_hpc.config.load import write_resolved
    from miles_hpc.config.node import RESOLVED
    from miles_hpc.launch.attempts import claim_attempt, register
    from miles_hpc.wire.security import create_secrets

    requeued = is_requeued(run_dir, task.job)
    arguments.resume = resume = arguments.resume or requeued
    if requeued and (run_dir / RESOLVED).is_file():
        # What the first attempt has read, however the user's files look by now.
        arguments.files, arguments.sets = [], []
    arguments.sets.append(f"slurm.nodes={task.nodes}")
    loaded = loaded_files(arguments)
    notes = apart(preflight, loaded)
    claim_run_dir(run_dir, resume=resume)
    config = with_model(loaded.config, run_dir)
    if config.model.make is not None:
        apart(make_model_in, config, run_dir)
    attempt = claim_attempt(run_dir, resume=resume, nodes=task.nodes)
    register(run_dir, attempt)
    create_secrets(run_dir, attempt.number)
    write_resolved(config, run_dir)
    write_environment(run_dir, sys.argv)
    for note in notes:
        log.info("note: %s", note)
    log.info(
        "run %s, attempt %d, job %s, %d nodes, in %s", attempt.run_id, attempt.number, task.job, task.nodes, run_dir
    )
    return Prepared(run_id=attempt.run_id, attempt=attempt.number)


def is_requeued(run_dir: Path, job: JobKey) -> bool:
    """Whether an earlier start of this very job has begun an attempt there, which this one is to continue.

    Attempts of other jobs do not count: a start that was lost before it began one is made up for as it was ordered.
    """
    from miles_hpc.launch.attempts import read_attempts

    return job.restart > 0 and any(attempt.job_id == job.job_id for attempt in read_attempts(run_dir))


def become_warden(run_dir: Path, task: Task, prepared: Prepared, index: int, *, guest: bool = False) -> NoReturn:
    """Turn this process into the warden of this node, which has place `index` in the run.

    Raises:
        ConfigError: when the resolved config cannot be read.
        NoAddress, OSError: when this node has no usable address, or the program cannot be executed.
    """
    from miles_hpc.agent import procfs
    from miles_hpc.config.load import read_resolved
    from miles_hpc.launch.local import WARDEN
    from miles_hpc.launch.node_address import NoAddress, choose_address, other_addresses
    from miles_hpc.wire.ids import node_id

    config = read_resolved(run_dir)
    network = config.network
    peers = [host for index, host in enumerate(task.hosts) if index != task.index][:2]
    try:
        address = choose_address(network.interface, network.subnet, peers)
    except NoAddress as error:
        raise ConfigError(str(error)) from error
    node = node_id(index)
    agent = [sys.executable, "-m", "miles_hpc.agent.run", "--run-dir", str(run_dir), "--run-id", prepared.run_id]
    agent += ["--attempt", str(prepared.attempt), "--node-index", str(index), "--address", address, "--slurm"]
    for other in other_addresses(address, network.interface, network.subnet):
        agent += ["--also", other]
    agent += ["--granted-cpus", str(task.cpus), "--granted-memory", str(task.memory_bytes)]
    agent += ["--granted-gpus", str(task.gpus)]
    if guest:
        agent.append("--guest")
    elif index == 0:
        agent.append("--hub")
    argv = [sys.executable, "-I", "-S", str(WARDEN), "--run-id", prepared.run_id, "--run-dir", str(run_dir)]
    # Without the daemon that started this task, Slurm neither ends it nor knows of its end.
    argv += ["--attempt", str(prepared.attempt), "--node", node, "--die-with", str(os.getppid())]
    argv += ["--stop-grace", f"{config.timing.drain + config.timing.stop_grace:g}", "--", *agent]
    env = procfs.worker_environ(os.environ)
    env[procfs.MARK] = f"{prepared.run_id}/{prepared.attempt}/{node}/0/warden/g0-0"
    env[procfs.RUN_DIR] = str(run_dir)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], argv, env)


def _raise_on_signals() -> None:
    """Have a signal end what is being done, with a word about it, where it would end this process without one."""

    def on_signal(number: int, _: object) -> None:
        _hold_signals()  # one is enough: what is said and written now must not be cut short
        raise Signalled(signal.Signals(number).name)

    for number in _SIGNALS:
        signal.signal(number, on_signal)
    # Slurm signals every process of the step; of the function that runs apart, this process makes an end.
    os.register_at_fork(after_in_child=_ignore_signals)


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _hold_signals() -> None:
    """Leave signals to the warden that this process becomes: what is pending stays so over execve."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _drained(text: str) -> int:
    print(f"miles-hpc: drained: {one_line(text)}", file=sys.stderr, flush=True)
    return DRAINED


def _refuse(text: str) -> int:
    print(f"miles-hpc: {one_line(text)}", file=sys.stderr, flush=True)
    return BAD_INPUT


def _fail(text: str) -> int:
    print(f"miles-hpc: failed: {one_line(text)}", file=sys.stderr, flush=True)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
