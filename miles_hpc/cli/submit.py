"""`miles-hpc submit` and `miles_hpc.submit`: a run as a Slurm job."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.cli.exits import BY_OUTCOME, FAILED, FINISHED, one_line, refuse
from miles_hpc.cli.preflight import claim_run_dir, preflight, resolve
from miles_hpc.cli.run import default_run_dir, loaded_files, with_model
from miles_hpc.cli.slurm_verbs import SUBMIT_OPTIONS
from miles_hpc.config.check import check
from miles_hpc.config.errors import ConfigError
from miles_hpc.config.load import Loaded
from miles_hpc.config.schema import Config, SlurmConfig
from miles_hpc.launch.attempts import AttemptError, read_attempts, who_runs
from miles_hpc.launch.run import Run
from miles_hpc.launch.submission import check_site, script, submit_run


def submit_verb(arguments: argparse.Namespace) -> int:
    """Submit, or say why not. Returns 0 once the job is in the queue, or with --wait the exit code of the outcome."""
    try:
        arguments.sets += _slurm_sets(arguments)
        loaded = loaded_files(arguments)
        run_dir = default_run_dir(arguments.run_dir, loaded.config)
        if arguments.dry_run:
            for line in _dry_run(loaded, run_dir):
                print(line)
            return FINISHED
        run, notes = _submit(loaded, run_dir, arguments.resume)
    except ConfigError as error:
        return refuse(str(error))
    except BrokenPipeError:
        raise  # of --dry-run's output, which main takes care of
    except OSError as error:
        return refuse(f"{error.filename or 'the run directory'}: {error.strerror}")
    if arguments.json:
        print(json.dumps({"job_id": run.job_id, "run_dir": str(run.run_dir)}), flush=True)
    else:
        for note in notes:
            print(f"note: {note}")
        print(f"job {run.job_id}, run directory {run.run_dir}")
        print(f"next: miles-hpc status {run.run_dir}", flush=True)
    if not arguments.wait:
        return FINISHED
    summary = run.wait()
    print(f"{summary['outcome']}{': ' if summary['reason'] else ''}{one_line(summary['reason'])}")
    return BY_OUTCOME.get(summary["outcome"], FAILED)


def submit(
    config: str | Path | Sequence[str | Path] | Config,
    *,
    run_dir: str | Path = "",
    resume: bool = False,
    sets: Sequence[str] = (),
    slurm_additional_parameters: dict[str, Any] | None = None,
    **slurm: Any,
) -> Run:
    """Submit a run and return at once.

    Args:
        config: a recipe's name, a run file, several of them (later ones win), or a Config.
        run_dir: default: `runs/<name>-<time>` in the current directory; on a file system that all nodes share.
        resume: go on with the run that `run_dir` holds.
        sets: overrides such as `"rollout.batch_size=64"`.
        slurm_additional_parameters: more options of sbatch, by their long names.
        slurm: keys of `[slurm]`: partition, account, qos, nodes, gpus_per_node, cpus_per_node, memory, time,
            constraint, exclude, reservation, setup, requeue …

    Raises:
        ConfigError: bad input, or Slurm does not take the job; in one line, and nothing is left in the queue.
        TypeError: for an unknown keyword; the text lists the good ones with their defaults.
    """
    known = {field.name: field for field in msgspec.structs.fields(SlurmConfig)}
    unknown = sorted(set(slurm) - set(known))
    if unknown:
        good = ", ".join(f"{name}={field.default!r}" for name, field in known.items())
        raise TypeError(f"submit() got unknown keywords {unknown}; those of Slurm are: {good}")
    if isinstance(config, Config):
        if sets:
            raise ConfigError("submit(): sets are for run files: a Config is taken as it is, so set them in it")
        loaded = Loaded(config, {"": "the given Config"})
    else:
        files = [config] if isinstance(config, str | Path) else list(config)
        loaded = resolve([str(file) for file in files], list(sets))
    more = {**loaded.config.slurm.additional, **(slurm_additional_parameters or {}), **slurm.pop("additional", {})}
    changed = {**msgspec.to_builtins(loaded.config.slurm), **msgspec.to_builtins(slurm), "additional": more}
    try:
        table = msgspec.convert(changed, SlurmConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"submit(): slurm: {error}") from error
    loaded = Loaded(msgspec.structs.replace(loaded.config, slurm=table), loaded.origins)
    check(loaded.config)
    return _submit(loaded, default_run_dir(str(run_dir), loaded.config), resume)[0]


def _submit(loaded: Loaded, run_dir: Path, resume: bool) -> tuple[Run, list[str]]:
    check_site(run_dir)
    _check_places(loaded, run_dir)
    notes = preflight(loaded, elsewhere=True)
    made = claim_run_dir(run_dir, resume=resume)
    try:
        attempts = read_attempts(run_dir)
    except AttemptError as error:
        raise ConfigError(f"--run-dir {str(run_dir)!r}: {error}") from error
    if attempts and (reason := who_runs(run_dir, attempts[-1])):
        raise ConfigError(f"--run-dir {str(run_dir)!r}: is in use: {reason}; wait for it, or stop it first")
    try:
        submit_run(loaded.config, run_dir, resume=resume)
    except BaseException:
        if made:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise
    return Run(run_dir), notes


def _check_places(loaded: Loaded, run_dir: Path) -> None:
    """Refuse a run whose cells do not fit the nodes that it asks for."""
    from miles_hpc.cli.dry_run import NotPlaceable, PaperNodes, plan

    try:
        plan(with_model(loaded.config, run_dir), run_dir, PaperNodes.of_job(loaded.config))
    except NotPlaceable as error:
        where = loaded.origin(["slurm.nodes", "slurm.gpus_per_node", "inference.gpus_per_engine"])
        raise ConfigError(f"{where}: slurm.nodes, slurm.gpus_per_node: {error}") from error


def _dry_run(loaded: Loaded, run_dir: Path) -> Iterator[str]:
    from miles_hpc.cli.dry_run import NotPlaceable, PaperNodes, show

    notes = preflight(loaded, elsewhere=True)
    yield "# batch script"
    yield script(loaded.config, run_dir)
    try:
        yield from show(with_model(loaded.config, run_dir), run_dir, PaperNodes.of_job(loaded.config))
    except NotPlaceable as error:
        raise ConfigError(f"slurm.nodes, slurm.gpus_per_node: {error}") from error
    yield from (f"# note: {note}" for note in notes)


def _slurm_sets(arguments: argparse.Namespace) -> list[str]:
    """The verb's own options as `--set`."""
    found = []
    for key in SUBMIT_OPTIONS:
        value = getattr(arguments, key)
        if value is not None:
            found.append(f"slurm.{key}={value if isinstance(value, int) else json.dumps(value)}")
    return found
