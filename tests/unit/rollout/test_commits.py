import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.rollout import commits
from miles_hpc.rollout.commits import (
    ChainBroken,
    CheckpointManifest,
    CommitError,
    CommitLog,
    ManifestFile,
    Superseded,
    commit_path,
    link_once,
    newest_commit,
    read_chain,
)

pytestmark = pytest.mark.unit


def log(run_dir, attempt=1, generation="1-1"):
    return CommitLog(run_dir, attempt=attempt, epoch=1, generation=generation)


def step(driver, n, groups=("a",)):
    checkpoint = CheckpointManifest(
        path=f"checkpoints/{n}", step=n, files=[ManifestFile(file="x", size=1, sha256="0" * 64)]
    )
    return driver.append(
        step=n,
        weight_version=n + 1,
        checkpoint=checkpoint,
        data_state={"epoch": 0, "offset": n},
        counts={"committed": n},
        ledger=[{"step": n, "group": group} for group in groups],
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_fresh_run_opens_with_nothing_done(tmp_path):
    commit = log(tmp_path).open()
    assert (commit.n, commit.kind, commit.incarnation, commit.step, commit.data_state) == (1, "open", 1, 0, None)
    assert (tmp_path / "ledger.jsonl").read_text() == ""


def test_a_resumed_driver_goes_on_from_the_last_step_in_a_new_incarnation(tmp_path):
    first = log(tmp_path)
    first.open()
    step(first, 5)
    resumed = log(tmp_path, attempt=2)
    opened = resumed.open()
    assert (opened.n, opened.incarnation, opened.step, opened.weight_version) == (3, 2, 5, 6)
    assert opened.data_state == {"epoch": 0, "offset": 5}
    assert opened.checkpoint is not None and opened.checkpoint.path == "checkpoints/5"
    step(resumed, 10, groups=("b", "c"))
    assert lines(tmp_path / "ledger.jsonl") == [
        {"step": 5, "group": "a"},
        {"step": 10, "group": "b"},
        {"step": 10, "group": "c"},
    ]
    assert [commit.n for commit in read_chain(tmp_path)] == [1, 2, 3, 4]


def test_an_older_driver_loses_once_a_newer_one_has_opened_and_its_lines_are_rolled_back(tmp_path):
    old = log(tmp_path, generation="1-1")
    old.open()
    new = log(tmp_path, generation="2-1")
    new.open()
    with pytest.raises(Superseded, match="generation 2-1"):
        step(old, 1, groups=("lost",))
    step(new, 1, groups=("kept",))
    assert lines(tmp_path / "ledger.jsonl") == [{"step": 1, "group": "kept"}]
    assert lines(tmp_path / "ledger.rolled-back.jsonl") == [{"step": 1, "group": "lost"}]


def test_a_commit_that_was_linked_before_the_open_is_kept(tmp_path):
    old = log(tmp_path)
    old.open()
    step(old, 1)
    new = log(tmp_path, generation="1-2")
    assert new.open().step == 1


def test_a_lost_reply_of_link_is_a_success(tmp_path, monkeypatch):
    real = os.link

    def link_and_lose_the_reply(source, target):
        real(source, target)
        raise FileExistsError(target)

    monkeypatch.setattr(commits.os, "link", link_and_lose_the_reply)
    driver = log(tmp_path)
    driver.open()
    assert step(driver, 1).n == 2


def test_link_once_has_one_winner_and_leaves_no_temporary_file(tmp_path):
    assert link_once(tmp_path / "x", b"1")
    assert not link_once(tmp_path / "x", b"2")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"1"


def test_a_changed_commit_is_found_by_its_successor(tmp_path):
    driver = log(tmp_path)
    driver.open()
    step(driver, 1)
    path = commit_path(tmp_path, 1)
    path.write_text(path.read_text().replace('"step": 0', '"step": 3'))
    with pytest.raises(ChainBroken, match=r"00002\.json"):
        read_chain(tmp_path)
    with pytest.raises(ChainBroken):
        log(tmp_path, attempt=2).open()


def test_a_file_that_is_no_commit_is_named(tmp_path):
    (tmp_path / "commits").mkdir()
    commit_path(tmp_path, 1).write_text("{")
    with pytest.raises(CommitError, match=r"00001\.json: not a commit"):
        log(tmp_path).open()


def test_a_missing_ledger_segment_is_named(tmp_path):
    driver = log(tmp_path)
    driver.open()
    committed = step(driver, 1)
    (tmp_path / committed.ledger.path).unlink()
    with pytest.raises(CommitError, match=r"00002\.g1-1\.ledger\.jsonl"):
        log(tmp_path, attempt=2).open()


def test_steps_and_versions_never_go_backwards(tmp_path):
    driver = log(tmp_path)
    driver.open()
    step(driver, 5)
    with pytest.raises(CommitError, match="backwards"):
        step(driver, 4)


def test_appending_before_open_is_refused(tmp_path):
    with pytest.raises(CommitError, match="not open"):
        step(log(tmp_path), 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["open", "step"])), max_size=20))
def test_whatever_drivers_do_the_chain_stays_whole_and_the_ledger_is_its_segments(tmp_path_factory, moves):
    run_dir = tmp_path_factory.mktemp("run")
    drivers = {}
    count = 0
    expected = []
    for driver_id, move in moves:
        driver = drivers.get(driver_id)
        if move == "open" and driver is None:
            drivers[driver_id] = log(run_dir, generation=f"{driver_id + 1}-1")
            drivers[driver_id].open()
        elif move == "step" and driver is not None:
            count += 1
            try:
                step(driver, driver.newest.step + 1, groups=(f"g{count}",))
            except Superseded:
                del drivers[driver_id]  # a program exits here; the next one opens as a newer driver
            else:
                expected.append(f"g{count}")
    chain = read_chain(run_dir)
    incarnations = [commit.incarnation for commit in chain]
    assert incarnations == sorted(incarnations)
    assert (newest_commit(run_dir) is None) == (not chain)
    if chain:
        assert [line["group"] for line in lines(run_dir / "ledger.jsonl")] == expected
