import os
import re
import threading
import time

import pytest

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.rendezvous import (
    EpochTaken,
    Rendezvous,
    RendezvousError,
    RendezvousTimeout,
    epochs,
    newest,
    newest_attempt,
    publish,
    read,
    rendezvous_dir,
    wait_for_rendezvous,
)

pytestmark = pytest.mark.unit


def a_hub(epoch=1, attempt=1, run_id="r1", **changes):
    values = {"addresses": ["10.0.0.1", "::1"], "port": 4000, "public_key": "k", "digest": "d", **changes}
    return Rendezvous(run_id=run_id, attempt=attempt, epoch=epoch, **values)


def test_what_is_published_is_read_back(tmp_path):
    publish(tmp_path, a_hub())
    assert newest(tmp_path, 1, "r1") == a_hub()
    assert a_hub().endpoints == [HostAndPort("10.0.0.1", 4000), HostAndPort("::1", 4000)]


def test_nothing_is_left_beside_the_published_file(tmp_path):
    publish(tmp_path, a_hub())
    with pytest.raises(EpochTaken):
        publish(tmp_path, a_hub())
    assert [path.name for path in rendezvous_dir(tmp_path, 1).iterdir()] == ["epoch-00001.json"]


def test_an_epoch_has_one_winner_among_many(tmp_path):
    start, won = threading.Barrier(8), []

    def claim(index):
        start.wait()
        try:
            publish(tmp_path, a_hub(port=4000 + index))
        except EpochTaken:
            return
        won.append(4000 + index)

    threads = [threading.Thread(target=claim, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [newest(tmp_path, 1).port] == won


def test_a_lower_epoch_than_the_newest_cannot_be_claimed(tmp_path):
    publish(tmp_path, a_hub(epoch=3))
    with pytest.raises(EpochTaken, match="epoch 3"):
        publish(tmp_path, a_hub(epoch=2))
    assert epochs(tmp_path, 1) == [3]


def test_the_newest_epoch_and_attempt_are_found(tmp_path):
    assert newest_attempt(tmp_path) is None
    assert newest(tmp_path, 1) is None
    for epoch, attempt in [(1, 1), (2, 1), (1, 10), (9, 9)]:
        publish(tmp_path, a_hub(epoch, attempt))
    (tmp_path / "rendezvous" / "11").mkdir()
    assert newest(tmp_path, 1).epoch == 2
    assert newest_attempt(tmp_path) == 10


def test_a_file_of_another_run_is_refused_with_both_names(tmp_path):
    publish(tmp_path, a_hub(run_id="other"))
    with pytest.raises(RendezvousError, match=r"of run 'other'.*expected run 'mine'"):
        newest(tmp_path, 1, "mine")


def test_a_file_that_was_copied_from_another_attempt_is_refused(tmp_path):
    path = publish(tmp_path, a_hub())
    target = rendezvous_dir(tmp_path, 2)
    target.mkdir()
    (target / path.name).write_bytes(path.read_bytes())
    with pytest.raises(RendezvousError, match="attempt 1 epoch 1, expected run 'r1' attempt 2"):
        newest(tmp_path, 2)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run_id": "r1"}'])
def test_a_broken_file_is_named(tmp_path, content):
    publish(tmp_path, a_hub()).write_bytes(content)
    with pytest.raises(RendezvousError, match=r"epoch-00001\.json is no rendezvous file"):
        read(tmp_path, 1, 1)


def test_a_file_without_addresses_is_refused(tmp_path):
    path = publish(tmp_path, a_hub())
    path.write_text(path.read_text().replace('"10.0.0.1",', "").replace('"::1"', ""))
    with pytest.raises(RendezvousError, match="must not be empty"):
        read(tmp_path, 1, 1)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077, 0o177, 0o277])
def test_only_its_user_reads_the_file_and_nobody_else_writes_beside_it(tmp_path, umask):
    before = os.umask(umask)
    try:
        path = publish(tmp_path, a_hub())
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o022 == path.parent.parent.stat().st_mode & 0o022 == 0
    assert read(tmp_path, 1, 1) == a_hub()


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o664, 0o666])
def test_a_file_that_others_may_change_is_refused(tmp_path, mode):
    path = publish(tmp_path, a_hub())
    path.chmod(mode)
    remedy = re.escape(f"`chmod 600 {path}`")
    with pytest.raises(RendezvousError, match=rf"{re.escape(str(path))} has mode 0{mode:o}: others may .* {remedy}"):
        read(tmp_path, 1, 1)


def test_a_field_of_a_newer_version_is_ignored(tmp_path):
    path = publish(tmp_path, a_hub())
    path.write_text(path.read_text().replace('"port"', '"lease": 1, "port"'))
    assert read(tmp_path, 1, 1) == a_hub()


def test_waiting_ends_with_the_wanted_epoch(tmp_path):
    publish(tmp_path, a_hub(epoch=1))
    timer = threading.Timer(0.1, publish, (tmp_path, a_hub(epoch=2)))
    timer.start()
    assert wait_for_rendezvous(tmp_path, 1, time.monotonic() + 20, min_epoch=2).epoch == 2
    timer.join()


def test_waiting_ends_at_the_deadline_and_names_the_place(tmp_path):
    started = time.monotonic()
    with pytest.raises(RendezvousTimeout, match=r"no hub of epoch 1 or higher in .*rendezvous/1"):
        wait_for_rendezvous(tmp_path, 1, started + 0.1)
    assert time.monotonic() - started < 5


def test_waiting_can_be_stopped(tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(RendezvousTimeout):
        wait_for_rendezvous(tmp_path, 1, time.monotonic() + 60, stop=stop)
