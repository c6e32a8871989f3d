"""What is kept of a worker's environment, and what is not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from miles_hpc.agent.environs import MASK, EnvironFiles, without_secrets

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "OPENAI_APIKEY",
        "HF_TOKEN",
        "AWS_SESSION_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "MYSQL_PWD",
        "PGPASSWORD",
        "SLURM_JWT",
        "GITHUB_PAT",
        "client_secret",
        "GOOGLE_CREDENTIALS",
        "HTTP_AUTH",
        "SSHPASS",
        "HF_TOKENS",
        "BEARER",
        "OTEL_EXPORTER_OTLP_HEADERS",
    ],
)
def test_what_its_name_calls_a_secret_is_masked(name):
    assert without_secrets({name: "hunter2"}) == {name: MASK}


@pytest.mark.parametrize(
    "value",
    [
        "Authorization=Bearer hunter2",
        "-H 'authorization: basic aHVudGVyMg=='",
        "AccountName=me;AccountKey=hunter2==;EndpointSuffix=core.windows.net",
        "Server=db;Uid=me;Pwd=hunter2",
        '{"api_key":"hunter2"}',
        r'{"inner": "{\"apiKey\": \"hunter2\"}"}',
        "() {  curl -H 'X-Api-Key: hunter2' http://h\n}",
        "() {  export HF_TOKEN=hunter2\n}",
        "--password = hunter2",
        "client_secret: hunter2",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2",
    ],
)
def test_what_its_own_text_calls_a_secret_is_masked(value):
    assert without_secrets({"X": value}) == {"X": MASK}


@pytest.mark.parametrize(
    "value",
    [
        "/opt/basic/bin:/opt/tokenizers/bin",
        "/run/secrets:/opt/token:/bin",
        "--max-new-tokens 4096",
        "tcp://h:1",
        "a basic",
        '{"keys": 1}',
    ],
)
def test_other_texts_stay_as_they_are(value):
    assert without_secrets({"X": value}) == {"X": value}


def test_a_number_of_tokens_is_no_secret():
    env = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "4096", "MAX_TOKENS": "8"}
    assert without_secrets(env) == env


@pytest.mark.parametrize("login", ["me:hunter2", "me:hun@ter2", "me:hun/ter2", "hunter2"])
def test_a_login_is_masked_up_to_the_last_at(login):
    assert without_secrets({"X": f"see http://{login}@proxy:3128/x now"}) == {
        "X": f"see http://{MASK}@proxy:3128/x now"
    }


@pytest.mark.parametrize(
    "name",
    ["PATH", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "KEYBOARD", "NCCL_CUMEM_ENABLE", "PYTHONPATH", "XAUTHORITY"],
)
def test_other_values_stay_as_they_are(name):
    assert without_secrets({name: "/a/b:c"}) == {name: "/a/b:c"}


def test_a_login_in_an_address_is_masked_and_an_unset_secret_shown_as_such():
    env = {"https_proxy": "http://me:hunter2@proxy:3128/x", "HF_TOKEN": "", "URL": "http://proxy:3128/here"}
    assert without_secrets(env) == {**env, "https_proxy": f"http://{MASK}@proxy:3128/x"}


def test_the_file_is_the_users_alone_and_holds_what_is_not_text(tmp_path: Path):
    path = tmp_path / "node" / "w.g1-1.env.json"
    path.parent.mkdir()
    path.write_text("from before")
    path.chmod(0o644)
    files = EnvironFiles()
    files.write(path, {"B": os.fsdecode(b"\xff"), "A": "1\n2", "KEY": "hunter2"})
    files.close(30)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(json.loads(path.read_text()).items()) == [("A", "1\n2"), ("B", "\ufffd"), ("KEY", MASK)]


def test_a_directory_that_cannot_be_written_costs_that_file_only(tmp_path: Path):
    (tmp_path / "file").touch()
    files = EnvironFiles()
    files.write(tmp_path / "file" / "w.env.json", {"A": "1"})
    files.write(tmp_path / "w.env.json", {"A": "1"})
    files.close(30)
    assert (tmp_path / "w.env.json").exists()
