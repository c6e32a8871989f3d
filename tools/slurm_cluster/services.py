"""What runs on the host itself: munge, the bridge, accounting, the controller."""

from __future__ import annotations

import os
import shutil
import subprocess

from processes import BASE, SUBNET, adopt, record, recorded, run, wait_for

BRIDGE = "mhslurm0"


def start_munge() -> None:
    if recorded("munged"):
        return
    state = BASE / "run"
    key = state / "munge.key"
    if not key.exists():
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(128))
    # A munged of our own, on a socket of our own, as root: --force accepts both.
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munged.seed"}
    options = [f"--{option}={state}/{name}" for option, name in files.items()]
    run("munged", "--force", "--num-threads=10", f"--log-file={BASE}/log/munged.log", *options)
    adopt("munged", state / "munged.pid")


def start_network() -> None:
    if run("ip", "link", "show", BRIDGE, check=False).returncode == 0:
        return
    run("ip", "link", "add", BRIDGE, "type", "bridge", "forward_delay", "0")
    run("ip", "addr", "add", f"{SUBNET}.1/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


def start_accounting() -> None:
    state, log = BASE / "run", BASE / "log"
    data = state / "mysql"
    mariadb = ["--no-defaults", "--user=mysql", f"--datadir={data}"]
    if not recorded("mariadbd"):
        if not (data / "mysql").exists():
            data.mkdir(exist_ok=True)
            shutil.chown(data, "mysql", "mysql")
            run("mariadb-install-db", *mariadb, "--skip-test-db", "--auth-root-authentication-method=normal")
        small = "--innodb-buffer-pool-size=32M --innodb-log-file-size=16M --performance-schema=OFF --skip-log-bin"
        quick = "--innodb-flush-log-at-trx-commit=0 --innodb-lock-wait-timeout=900 --skip-name-resolve"
        reach = f"--socket={data}/m.sock --bind-address=127.0.0.1 --port=3398 --skip-grant-tables"
        with (log / "mariadb.log").open("ab") as output:
            argv = ["mariadbd", *mariadb, *f"{small} {quick} {reach}".split()]
            database = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        record("mariadbd", database.pid)
        ping = ["mariadb-admin", "--no-defaults", f"--socket={data}/m.sock", "ping"]
        wait_for("mariadbd", lambda: run(*ping, check=False).returncode == 0, 30)
    if not recorded("slurmdbd"):
        (state / "slurmdbd.pid").unlink(missing_ok=True)
        run("slurmdbd", env={**os.environ, "SLURM_CONF": str(BASE / "etc" / "slurm.conf")})
        adopt("slurmdbd", state / "slurmdbd.pid")
        wait_for("slurmdbd", lambda: run("sacctmgr", "-n", "-i", "show", "cluster", check=False).returncode == 0, 30)
        if "mileshpc" not in run("sacctmgr", "-n", "show", "cluster", "format=cluster").stdout:
            run("sacctmgr", "-i", "-Q", "add", "cluster", "mileshpc", check=False)


def start_controller() -> None:
    if recorded("slurmctld"):
        return
    pid_file = BASE / "run" / "slurmctld.pid"
    pid_file.unlink(missing_ok=True)
    run("slurmctld", "-f", BASE / "etc" / "slurm.conf")
    adopt("slurmctld", pid_file)
    # `scontrol ping` ends with 0 either way.
    wait_for("slurmctld", lambda: "is UP" in run("scontrol", "ping", check=False, timeout=30).stdout, 30)
