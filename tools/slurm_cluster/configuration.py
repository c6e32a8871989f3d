"""What the cluster consists of: Debian packages, slurm.conf and the files beside it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path

from processes import BASE, SUBNET, die, run, say

SLURM_CONF = Path("/etc/slurm/slurm.conf")
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
ACCOUNTING_PACKAGES = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}


class Shape(argparse.Namespace):
    nodes: int
    gpus: int
    cpus: int
    memory: int
    accounting: bool
    conf: list[str]

    def key(self) -> str:
        return json.dumps([self.nodes, self.gpus, self.cpus, self.memory, self.accounting, sorted(self.conf)])


def node_names(shape: Shape) -> list[str]:
    return [f"node{index}" for index in range(1, shape.nodes + 1)]


def address(node: str) -> str:
    return f"{SUBNET}.{10 + int(node.removeprefix('node'))}"


def host_name() -> str:
    return os.uname().nodename.split(".")[0]


def install(shape: Shape) -> None:
    wanted = dict(PACKAGES) | (ACCOUNTING_PACKAGES if shape.accounting else {})
    missing = sorted({package for program, package in wanted.items() if shutil.which(program) is None})
    if not missing:
        return
    if shutil.which("apt-get") is None:
        die(f"missing {', '.join(missing)}: install them with your package manager (apt-get was not found)")
    say(f"apt-get install {' '.join(missing)}")
    # Debian starts daemons at installation; this file is its documented way to say no.
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", "-qq", env=environment)
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing, env=environment)
    finally:
        if ours:
            policy.unlink()


def settings(shape: Shape) -> dict[str, str]:
    etc, log, state = BASE / "etc", BASE / "log", BASE / "run"
    values = {
        "ClusterName": "mileshpc",
        # A rebuilt cluster must not hand out ids again: submitit names its folders after them.
        "FirstJobId": (BASE / "run" / "first-job-id").read_text(),
        "SlurmctldHost": f"{host_name()}({SUBNET}.1)",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        # cred_expire is also how long a requeued job waits before it may start again; Slurm's default is 120 s.
        "AuthInfo": f"socket={state}/munge.socket,cred_expire=5",
        "StateSaveLocation": f"{state}/slurmctld",
        "SlurmdSpoolDir": f"{state}/%n/spool",
        "SlurmctldPidFile": f"{state}/slurmctld.pid",
        "SlurmdPidFile": f"{state}/%n/slurmd.pid",
        "SlurmctldLogFile": f"{log}/slurmctld.log",
        "SlurmdLogFile": f"{log}/%n.log",
        "SlurmctldPort": "6827",
        "SlurmdPort": "6828",
        # The worst case for orphans: it only follows parent pids.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "ReturnToService": "2",
        "SlurmdTimeout": "10",
        "SlurmctldTimeout": "30",
        "MessageTimeout": "10",
        "TCPTimeout": "2",
        # Shorter than Slurm's 30 s, and long enough for a commit: runs drain inside it.
        "KillWait": "12",
        "MinJobAge": "600",
        "JobRequeue": "1",
        "UnkillableStepTimeout": "30",
        "PropagateResourceLimits": "NONE",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "bf_interval=1,sched_interval=5,batch_sched_delay=0,sched_min_interval=0",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_Memory",
        "DefMemPerCPU": "1000",
        # The nodes claim more CPUs than the machine has.
        "SlurmdParameters": "config_overrides",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": "5",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "SlurmctldParameters": "preempt_send_user_signal",
        "EnforcePartLimits": "ALL",
    }
    if shape.gpus:
        values["GresTypes"] = "gpu"
    if shape.accounting:
        values |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            # A job for an account that does not exist is refused, as on most sites.
            "AccountingStorageEnforce": "associations",
            "AccountingStorageHost": f"{SUBNET}.1",
            "AccountingStoragePort": "6829",
            # With munge this names the socket, for slurmctld and sacctmgr alike.
            "AccountingStoragePass": f"{state}/munge.socket",
        }
    else:
        values["AccountingStorageType"] = "accounting_storage/none"
    for setting in shape.conf:
        key, equals, value = setting.partition("=")
        if not equals:
            die(f"--conf {setting}: expected KEY=VALUE as in slurm.conf")
        values[key] = value
    etc.mkdir(parents=True, exist_ok=True)
    return values


def configure(shape: Shape) -> None:
    for part in ("etc", "log", "run", "run/slurmctld", "dev"):
        (BASE / part).mkdir(parents=True, exist_ok=True)
    # Job ids of a rebuilt cluster go on above those of the last one: files of old jobs must not be taken for new ones.
    first = BASE / "run" / "first-job-id"
    if not first.exists():
        first.write_text(str(int(time.time()) % 60_000_000 + 1000))
    gres = f" Gres=gpu:{shape.gpus}" if shape.gpus else ""
    lines = [f"{key}={value}" for key, value in settings(shape).items()]
    lines += [
        f"NodeName={node} NodeAddr={address(node)} CPUs={shape.cpus} RealMemory={shape.memory}{gres} State=UNKNOWN"
        for node in node_names(shape)
    ]
    lines += [
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP "
        "PriorityTier=10 PreemptMode=REQUEUE GraceTime=20",
        "PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=20 PreemptMode=OFF",
    ]
    etc = BASE / "etc"
    (etc / "slurm.conf").write_text("\n".join(lines) + "\n")
    (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    hosts = ["127.0.0.1 localhost", f"{SUBNET}.1 {host_name()}"]
    hosts += [f"{address(node)} {node}" for node in node_names(shape)]
    (etc / "hosts").write_text("\n".join(hosts) + "\n")
    gres_lines = []
    for index in range(shape.gpus):
        device = BASE / "dev" / f"nvidia{index}"
        if not device.exists():
            run("mknod", "-m", "666", device, "c", "1", "3")
    if shape.gpus:
        gres_lines = [f"NodeName=node[1-{shape.nodes}] Name=gpu File={BASE}/dev/nvidia[0-{shape.gpus - 1}]"]
    (etc / "gres.conf").write_text("\n".join(gres_lines) + "\n")
    if shape.accounting:
        dbd = [
            "AuthType=auth/munge",
            f"AuthInfo=socket={BASE}/run/munge.socket",
            f"DbdHost={host_name()}",
            f"DbdAddr={SUBNET}.1",
            "DbdPort=6829",
            "SlurmUser=root",
            f"LogFile={BASE}/log/slurmdbd.log",
            f"PidFile={BASE}/run/slurmdbd.pid",
            "StorageType=accounting_storage/mysql",
            "StorageHost=127.0.0.1",
            "StoragePort=3398",
            "StorageUser=root",
            "StoragePass=none",
            "StorageLoc=slurm_acct_db",
        ]
        (etc / "slurmdbd.conf").touch(mode=0o600)
        (etc / "slurmdbd.conf").chmod(0o600)
        (etc / "slurmdbd.conf").write_text("\n".join(dbd) + "\n")
    claim_slurm_conf()


def claim_slurm_conf() -> None:
    """Plain `sbatch` must find the cluster, so /etc/slurm/slurm.conf points to ours, unless the machine has its own."""
    ours = BASE / "etc" / "slurm.conf"
    if SLURM_CONF.is_symlink() and not SLURM_CONF.exists():
        SLURM_CONF.unlink()
    if SLURM_CONF.exists() and SLURM_CONF.resolve() != ours.resolve():
        die(f"{SLURM_CONF} belongs to another cluster: this tool is for machines without a Slurm of their own")
    if not SLURM_CONF.exists():
        SLURM_CONF.parent.mkdir(exist_ok=True)
        SLURM_CONF.symlink_to(ours)
