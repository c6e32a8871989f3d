from __future__ import annotations

import pytest

from miles_hpc.config.check import check, conflicts, split_slice
from miles_hpc.config.errors import ConflictError
from miles_hpc.config.load import load

pytestmark = pytest.mark.unit

GOOD = ["model.path=/m", "data.prompts=/p.jsonl"]


def test_a_plain_config_has_no_conflict():
    check(load([], GOOD))
    check(load([], ["model.make.layers=2", "data.prompts=/p.jsonl", "train.trainer=hash", "inference.engine=fake"]))


CONFLICTS = [
    (["model.make.layers=2"], ("model.path", "model.make"), "model.make=none"),
    (["model.path="], ("model.path", "model.make"), "both unset"),
    (["model.name=a b"], ("model.name",), "'a b'"),
    (
        ["rollout.batch_size=7", "rollout.samples_per_prompt=3", "train.ranks=4"],
        ("rollout.batch_size", "rollout.samples_per_prompt", "train.ranks", "train.updates_per_step"),
        "set rollout.batch_size to 4 or 8",
    ),
    (["rollout.batch_size=1", "train.ranks=8"], ("rollout.batch_size", "train.ranks"), "set rollout.batch_size to 2"),
    (
        ["train.warm_start.data=/w", "train.warm_start.batch_size=5"],
        ("train.warm_start.batch_size", "train.ranks"),
        "set it to 6",
    ),
    (["train.warm_start.steps=5"], ("train.warm_start.data",), "name a jsonl file"),
    (["rollout.samples_per_prompt=1"], ("rollout.samples_per_prompt", "train.trainer"), "2 or more"),
    (["rollout.temperature=0"], ("rollout.temperature", "rollout.samples_per_prompt"), "raise rollout.temperature"),
    (["data.prompts="], ("data.prompts",), "name a jsonl"),
    (["data.label_key="], ("data.label_key", "reward.function"), "set data.label_key"),
    (["data.prompts=/p@[3:3]"], ("data.prompts",), "first < end"),
    (["data.prompts=/p@[a:b]"], ("data.prompts",), "not a slice"),
    (["data.heldout=/p.jsonl@[0:5]"], ("data.prompts", "data.heldout"), "do not overlap"),
    (["eval.every=5"], ("eval.every", "data.heldout"), "set eval.every to 0"),
    (["eval.limit=5"], ("eval.limit", "data.heldout"), "set eval.limit to 0"),
    (["rollout.session_every=2", "session.servers=0"], ("rollout.session_every", "session.servers"), "1 or more"),
    (["rollout.session_every=2", "rollout.second_turn="], ("rollout.session_every", "rollout.second_turn"), "0"),
    (["session.port=65535"], ("session.port", "session.servers"), "65534 or less"),
    (["inference.gpus_per_engine=1"], ("inference.gpus_per_engine", "inference.engine"), '"sglang"'),
    (["inference.sglang.tp_size=1"], ("inference.sglang", "inference.engine"), '"sglang"'),
    (
        ["inference.engine=sglang", "inference.sglang.port=1"],
        ("inference.sglang.port", "network.port_range"),
        "leave it out",
    ),
    (
        ["inference.engine=sglang", "inference.sglang.log-level=info"],
        ("inference.sglang.log-level", "inference.keyed"),
        "warning",
    ),
    (
        ["inference.engine=sglang", "inference.gpus_per_engine=4", "inference.sglang.tp=3"],
        ("inference.sglang.tp", "inference.gpus_per_engine"),
        "leave it out for 4",
    ),
    (
        ["inference.engine=sglang", "inference.nodes_per_engine=2", "inference.sglang.tp_size=3"],
        ("inference.sglang.tp_size", "inference.nodes_per_engine"),
        "multiple of 2",
    ),
    (["inference.nodes_per_engine=2"], ("inference.nodes_per_engine", "inference.engine"), "sglang"),
    (
        ["inference.engine=sglang", "inference.sglang.disaggregation_mode=prefill"],
        ("inference.sglang.disaggregation_mode",),
        "not yet",
    ),
    (
        ["inference.engine=sglang", "runtimes.trainer.env.NCCL_ALGO=Ring"],
        ("runtimes.trainer.env.NCCL_ALGO", "runtimes.engine.env.NCCL_ALGO"),
        "one value",
    ),
    (
        ["inference.router_policy=manual"],
        ("inference.router_policy", "rollout.session_every"),
        "session_every to 1",
    ),
    (["models.policy.path=/j"], ("models.policy", "model.name"), "rename it"),
    (["models.judge.engines=2"], ("models.judge.path",), "HF model directory"),
    (["models.judge.path=/j", "models.judge.router_policy=manual"], ("models.judge.router_policy",), "another policy"),
    (
        ["models.judge.path=/j", "models.judge.sglang.tp=2"],
        ("models.judge.sglang", "inference.engine"),
        "leave models.judge.sglang out",
    ),
    (
        ["inference.engine=sglang", "models.j.path=/j", "models.j.gpus_per_engine=2", "models.j.sglang.tp=3"],
        ("models.j.sglang.tp", "inference.gpus_per_engine"),
        "leave it out for 2",
    ),
    (["inference.engine=sglang", "inference.sglang.tp=two"], ("inference.sglang.tp",), "number of ranks"),
    (["inference.external.a.url=node7:3000"], ("inference.external.a.url",), "http://host:port"),
    (["inference.external.a.url=http://node7"], ("inference.external.a.url",), "http://host:port"),
    (
        ["inference.external.a.url=http://h:1", "inference.external.b.url=http://h:1/"],
        ("inference.external.a.url", "inference.external.b.url"),
        "once",
    ),
    (
        ["inference.external.a.url=http://node7:1", "inference.external.b.url=http://Node7:1"],
        ("inference.external.a.url", "inference.external.b.url"),
        "once",
    ),
    (
        ["inference.external.a.url=http://h:1", "models.j.path=/j", "models.j.external.b.url=http://h:1"],
        ("inference.external.a.url", "models.j.external.b.url"),
        "once",
    ),
    (
        ["inference.external.a.url=http://h:1", "inference.groups=[{engines=1}]"],
        ("inference.external", "inference.groups"),
        "drop one",
    ),
    (["inference.groups=[{role='placeholder'}]"], ("inference.groups",), "not yet"),
    (["inference.groups=[{role='prefill'}]"], ("inference.groups",), "not yet"),
    (["models.j.path=/j", "models.j.groups=[{role='decode'}]"], ("models.j.groups",), "not yet"),
    (
        [
            "inference.engine=sglang",
            "inference.gpus_per_engine=2",
            "inference.groups=[{gpus_per_engine=3, sglang={tp=2}}]",
        ],
        ("inference.sglang.tp", "inference.gpus_per_engine"),
        "does not divide the 3 GPUs",
    ),
    (
        ["inference.engine=sglang", "inference.gpus_per_engine=4", "inference.sglang.pp_size=3"],
        ("inference.sglang.pp_size", "inference.gpus_per_engine"),
        "does not divide the 4 GPUs",
    ),
    (
        ["inference.engine=sglang", "inference.gpus_per_engine=2", "inference.sglang={tp_size=2, pp_size=2}"],
        ("inference.sglang.pp_size", "inference.gpus_per_engine"),
        "with tp_size = 2 does not divide the 2 GPUs",
    ),
    (["inference.engine=sglang", "inference.sglang.pp_size=0"], ("inference.sglang.pp_size",), "1 or more"),
    (
        ["inference.engine=sglang", "inference.groups=[{sglang={api_key='x'}}]"],
        ("inference.groups[0].sglang.api_key", "inference.keyed"),
        "leave it out",
    ),
    (["mode=rollout", "rollout.load_debug=/r"], ("mode", "rollout.load_debug"), 'set mode = "sync"'),
    (
        ["train.weight_transfer=distributed", "inference.engine=fake"],
        ("train.weight_transfer", "inference.engine"),
        'train.weight_transfer = "disk"',
    ),
    (
        ["train.weight_transfer=distributed", "train.trainer=hash"],
        ("train.weight_transfer", "train.trainer"),
        'train.weight_transfer = "disk"',
    ),
    (["train.trainer=hash"], ("train.trainer", "inference.engine"), 'inference.engine = "fake"'),
    (["inference.router_policy=fastest"], ("inference.router_policy",), "round_robin"),
    (["inference.router_port=70000"], ("inference.router_port",), "above 65535"),
    (
        ["inference.router_port=5001", "session.port=5000"],
        ("inference.router_port", "session.port"),
        "move one of them",
    ),
    (["network.port_range=[30000, 20000]"], ("network.port_range",), "widen"),
    (["network.subnet=ten"], ("network.subnet",), "CIDR"),
    (["cluster.spare_nodes=1"], ("cluster.spare_nodes", "cluster.local_nodes", "slurm.nodes"), "lower it"),
    (["cluster.spare_nodes=4", "slurm.nodes=4"], ("cluster.spare_nodes", "slurm.nodes"), "raise the number"),
    (["runtimes.rooter.python=/p"], ("runtimes.rooter",), "did you mean runtimes.router?"),
    (["reward.function=sum"], ("reward.function",), "module:name"),
    (["train.trainer=tourch"], ("train.trainer",), 'did you mean "torch"?'),
    (["rollout.generate=my.module"], ("rollout.generate",), "module:name"),
    (["rollout.top_k=0"], ("rollout.top_k",), "-1"),
    (['rollout.stop=[""]'], ("rollout.stop",), "leave it out"),
    (["heal.backoff_s=60"], ("heal.backoff_s", "heal.max_backoff_s"), "raise the other"),
    (["model.path=", "model.make.hidden_size=30"], ("model.make.hidden_size", "model.make.heads"), "multiple of 8"),
]


@pytest.mark.parametrize(("sets", "keys", "remedy"), CONFLICTS, ids=[" ".join(sets) for sets, _, _ in CONFLICTS])
def test_a_conflict_names_all_its_keys_and_the_remedy_in_one_line(sets, keys, remedy):
    found = list(conflicts(load([], [*GOOD, *sets])))
    assert len(found) == 1
    named, text = found[0]
    assert set(keys) <= set(named)
    assert all(key in text for key in named)
    assert remedy in text and "\n" not in text


def test_check_raises_the_first_conflict_with_its_keys():
    with pytest.raises(ConflictError) as caught:
        check(load([], []))
    assert caught.value.keys == ("model.path", "model.make")


def test_groups_of_one_and_greedy_samples_are_fine_where_nothing_is_learned():
    check(load([], [*GOOD, "rollout.samples_per_prompt=1", "train.learning_rate=0"]))
    check(load([], [*GOOD, "rollout.temperature=0", "train.trainer=hash", "inference.engine=fake"]))


def test_spare_nodes_are_counted_against_the_nodes_of_a_job_as_well_as_those_of_this_machine():
    check(load([], [*GOOD, "cluster.spare_nodes=1", "slurm.nodes=4"]))
    check(load([], [*GOOD, "cluster.spare_nodes=1", "cluster.local_nodes=2"]))


def test_slices_of_one_file_that_do_not_overlap_are_fine():
    check(load([], [*GOOD[:1], "data.prompts=/p.jsonl@[256:]", "data.heldout=/p.jsonl@[0:256]"]))


def test_a_slice_is_split_from_the_path_only_at_the_end():
    assert split_slice("/a@[1:2]/b.jsonl") == ("/a@[1:2]/b.jsonl", slice(None))
    assert split_slice("/a b@[1:-2]") == ("/a b", slice(1, -2))
    assert split_slice("/a@[:]") == ("/a", slice(None, None))
