"""Values of a run file that do not fit together. Pure: nothing here looks at a file or at this machine."""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
from collections.abc import Callable, Iterator

from miles_hpc.config.check_inference import MODEL_NAME
from miles_hpc.config.check_inference import RULES as INFERENCE_RULES
from miles_hpc.config.errors import ConflictError
from miles_hpc.config.schema import Config

RUNTIME_KINDS = (
    "default",
    "router",
    "session-server",
    "engine",
    "controller",
    "rollout-worker",
    "executor",
    "trainer",
    "driver",
)
BUILT_IN_REWARDS = ("exact_match", "math_verify", "reasoning_gym", "remote_http")
REWARDS_WITH_LABEL = ("exact_match", "math_verify")
BUILT_IN_FILTERS = ("nonzero_std", "no_truncated", "no_aborted")
BUILT_IN_GENERATES = ("", "single_turn", "multi_turn", "two_turn_session")
BUILT_IN_TRAINERS = ("torch", "hash")
SLICE = re.compile(r"^(?P<path>.*?)(?:@\[(?P<start>-?\d*):(?P<stop>-?\d*)\])?$", re.DOTALL)
_DOTTED = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")

Found = Iterator[tuple[tuple[str, ...], str]]


def check(config: Config) -> None:
    """Refuse values that do not fit together.

    Raises:
        ConflictError: for the first conflict, in one line that names the keys, their values and the remedy.
    """
    for keys, text in conflicts(config):
        raise ConflictError(keys, text)


def conflicts(config: Config) -> Found:
    """Every conflict as (dotted keys, one line of text)."""
    for rule in _RULES:
        yield from rule(config)


def split_slice(text: str) -> tuple[str, slice]:
    """`path@[a:b]` as path and slice; without a suffix, the whole file."""
    match = SLICE.match(text)
    assert match is not None
    ends = [int(end) if end else None for end in (match["start"], match["stop"])]
    return match["path"], slice(*ends)


def _model(config: Config) -> Found:
    model = config.model
    if model.path and model.make is not None:
        yield (
            ("model.path", "model.make"),
            f"model.path = {model.path!r} and model.make are both set: "
            'drop one (`--set model.make=none` uses the directory, `--set model.path=""` builds a model)',
        )
    if not model.path and model.make is None:
        yield (
            ("model.path", "model.make"),
            "model.path and model.make are both unset: name a HF model directory in model.path, "
            "or let `[model.make]` build a tiny one",
        )
    if not MODEL_NAME.match(model.name):
        yield (
            ("model.name",),
            f"model.name = {model.name!r} cannot be part of a pool's name: use letters, digits, '.', '_' and '-'",
        )
    make = model.make
    if make is not None and (make.hidden_size % make.heads or make.hidden_size // make.heads % 2):
        yield (
            ("model.make.hidden_size", "model.make.heads"),
            f"model.make.hidden_size = {make.hidden_size} does not divide into model.make.heads = {make.heads} heads "
            f"of even width: set hidden_size to a multiple of {2 * make.heads}",
        )


def _batches(config: Config) -> Found:
    rollout, train = config.rollout, config.train
    samples = rollout.batch_size * rollout.samples_per_prompt
    shares = train.ranks * train.updates_per_step
    if samples % shares and train.uneven == "error" and config.mode in ("sync", "async"):
        # The step between two sizes that fit; the next larger one exists, a smaller one may be 0.
        unit = shares // math.gcd(shares, rollout.samples_per_prompt)
        lower = rollout.batch_size // unit * unit
        better = f"{lower} or {lower + unit}" if lower else f"{unit}"
        yield (
            ("rollout.batch_size", "rollout.samples_per_prompt", "train.ranks", "train.updates_per_step"),
            f"rollout.batch_size = {rollout.batch_size} x rollout.samples_per_prompt = {rollout.samples_per_prompt} "
            f"gives {samples} samples, which do not divide by train.ranks = {train.ranks} x train.updates_per_step = "
            f"{train.updates_per_step}: set rollout.batch_size to {better}",
        )
    warm = train.warm_start
    if warm is not None and warm.batch_size % train.ranks:
        yield (
            ("train.warm_start.batch_size", "train.ranks"),
            f"train.warm_start.batch_size = {warm.batch_size} does not divide by train.ranks = {train.ranks}: "
            f"set it to {-(-warm.batch_size // train.ranks) * train.ranks}",
        )


def _learning(config: Config) -> Found:
    rollout, train = config.rollout, config.train
    if train.trainer != "torch" or train.learning_rate == 0 or config.mode in ("external", "eval"):
        return
    if rollout.samples_per_prompt == 1:
        yield (
            ("rollout.samples_per_prompt", "train.trainer"),
            'rollout.samples_per_prompt = 1 with train.trainer = "torch": an advantage is the distance to the group\'s '
            "mean reward, so a group of one teaches nothing: set rollout.samples_per_prompt to 2 or more",
        )
    elif rollout.temperature == 0:
        yield (
            ("rollout.temperature", "rollout.samples_per_prompt"),
            f"rollout.temperature = 0 with rollout.samples_per_prompt = {rollout.samples_per_prompt}: greedy samples "
            "of one prompt are all equal and teach nothing: raise rollout.temperature",
        )


def _data(config: Config) -> Found:
    data = config.data
    sources = [key for key in ("prompts", "source", "reasoning_gym") if getattr(data, key)]
    if config.mode == "eval" and not data.heldout and not config.eval.datasets:
        yield (
            ("mode", "data.heldout", "eval.datasets"),
            'mode = "eval" with nothing to evaluate: name prompts in data.heldout or [eval.datasets]',
        )
    if config.rollout.load_debug and config.mode not in ("sync", "async"):
        yield (
            ("rollout.load_debug", "mode"),
            f'rollout.load_debug with mode = "{config.mode}": saved rollouts are trained on by the run\'s own trainer, '
            'without engines: set mode = "sync"',
        )
    if not sources and not config.rollout.load_debug and config.mode != "eval":
        yield (("data.prompts",), "data.prompts is empty: name a jsonl or parquet file of prompts")
    if len(sources) > 1:
        one, other = (f"data.{key}" for key in sources[:2])
        yield ((one, other), f"{one} and {other} are both set: keep the one that the prompts come from")
    if config.reward.function == "reasoning_gym" and data.reasoning_gym is None:
        yield (
            ("reward.function", "data.reasoning_gym"),
            'reward.function = "reasoning_gym" scores the problems of [data.reasoning_gym] alone: set that table',
        )
    if config.reward.scope != "sample" and config.reward.function in BUILT_IN_REWARDS:
        yield (
            ("reward.scope", "reward.function"),
            f'reward.scope = "{config.reward.scope}" with reward.function = "{config.reward.function}", which takes '
            "one sample: name a function of your own that takes a list",
        )
    if config.reward.function == "remote_http" and not config.reward.url:
        yield (("reward.function", "reward.url"), 'reward.function = "remote_http" needs reward.url: set it')
    if not data.prompt_key:
        yield (("data.prompt_key",), "data.prompt_key is empty: name the key that holds the prompt")
    if config.reward.function in REWARDS_WITH_LABEL and not data.label_key:
        yield (
            ("data.label_key", "reward.function"),
            f'data.label_key is empty with reward.function = "{config.reward.function}", which compares with a label: '
            "set data.label_key, or name a reward function of your own",
        )
    for key, text in (("data.prompts", data.prompts), ("data.heldout", data.heldout)):
        path, rows = split_slice(text)
        if "@[" in path or (rows.start is not None and rows.stop is not None and 0 <= rows.stop <= rows.start):
            yield ((key,), f"{key} = {text!r}: the rows are not a slice: write path@[first:end] with first < end")
    if data.heldout and data.prompts and _overlap(data.prompts, data.heldout):
        yield (
            ("data.prompts", "data.heldout"),
            f"data.prompts = {data.prompts!r} and data.heldout = {data.heldout!r} share rows: give held-out prompts a "
            "file of their own, or slices that do not overlap, such as path@[0:256] and path@[256:]",
        )
    if not data.heldout and (config.eval.every or config.eval.limit):
        key = "eval.every" if config.eval.every else "eval.limit"
        value = config.eval.every or config.eval.limit
        yield (
            (key, "data.heldout"),
            f"{key} = {value} with an empty data.heldout: name a file of held-out prompts, or set {key} to 0",
        )
    if config.train.warm_start is not None and not config.train.warm_start.data:
        yield (
            ("train.warm_start.data",),
            "train.warm_start.data is empty: name a jsonl file, or leave [train.warm_start] out",
        )


def _overlap(one: str, other: str) -> bool:
    path, rows = split_slice(one)
    other_path, other_rows = split_slice(other)
    if path != other_path:
        return False
    many = range(1 << 40)
    ends = [(many[span].start, many[span].stop) for span in (rows, other_rows)]
    return max(ends[0][0], ends[1][0]) < min(ends[0][1], ends[1][1])


def _sessions(config: Config) -> Found:
    rollout, session = config.rollout, config.session
    if rollout.session_every and not session.servers:
        yield (
            ("rollout.session_every", "session.servers"),
            f"rollout.session_every = {rollout.session_every} with session.servers = 0: two-turn exchanges need a "
            "session server: set session.servers to 1 or more, or rollout.session_every to 0",
        )
    if rollout.session_every and not rollout.second_turn:
        yield (
            ("rollout.session_every", "rollout.second_turn"),
            f"rollout.session_every = {rollout.session_every} with an empty rollout.second_turn: "
            "write the user's second message, or set rollout.session_every to 0",
        )
    if session.port and session.port + max(session.servers, 1) - 1 > 65535:
        yield (
            ("session.port", "session.servers"),
            f"session.port = {session.port} with session.servers = {session.servers} ends above port 65535: "
            f"lower session.port to {65536 - session.servers} or less",
        )


def _ports(config: Config) -> Found:
    router, session = config.inference.router_port, config.session
    for key, port in (("inference.router_port", router), ("session.port", session.port)):
        if port > 65535:
            yield ((key,), f"{key} = {port} is above 65535: choose a port, or 0 for a free one")
    if router and session.port and session.port <= router < session.port + session.servers:
        yield (
            ("inference.router_port", "session.port"),
            f"inference.router_port = {router} lies in the ports of session.port = {session.port} with "
            f"session.servers = {session.servers}: move one of them",
        )
    spread = config.network.port_range
    if spread is not None:
        low, high = spread
        if not 1024 <= low <= high <= 65535 or high - low < 63:
            yield (
                ("network.port_range",),
                f"network.port_range = [{low}, {high}] is not a range of at least 64 ports inside 1024..65535: "
                "widen it",
            )
    if config.network.subnet:
        try:
            ipaddress.ip_network(config.network.subnet, strict=False)
        except ValueError:
            yield (
                ("network.subnet",),
                f"network.subnet = {config.network.subnet!r} is not a CIDR: write one such as 10.0.0.0/16",
            )


def _nodes(config: Config) -> Found:
    cluster, in_a_job = config.cluster, config.slurm.nodes
    # The same file may be run on this machine and as a job: what fits one of them is right.
    if cluster.spare_nodes >= max(cluster.local_nodes, in_a_job):
        yield (
            ("cluster.spare_nodes", "cluster.local_nodes", "slurm.nodes"),
            f"cluster.spare_nodes = {cluster.spare_nodes} leaves no node to work (cluster.local_nodes = "
            f"{cluster.local_nodes}, slurm.nodes = {in_a_job}): lower it, or raise the number of nodes",
        )


def _names(config: Config) -> Found:
    for kind in config.runtimes:
        if kind not in RUNTIME_KINDS:
            near = difflib.get_close_matches(kind, RUNTIME_KINDS, n=1)
            hint = f"did you mean runtimes.{near[0]}?" if near else f"kinds are {', '.join(RUNTIME_KINDS)}"
            yield ((f"runtimes.{kind}",), f"runtimes.{kind} is no kind of pool: {hint}")
    for key, value, built_in in (
        ("reward.function", config.reward.function, BUILT_IN_REWARDS),
        ("train.trainer", config.train.trainer, BUILT_IN_TRAINERS),
        ("rollout.generate", config.rollout.generate, BUILT_IN_GENERATES),
        ("rollout.tools", config.rollout.tools, ("",)),
        ("data.source", config.data.source, ("",)),
        *(("rollout.filters", name, BUILT_IN_FILTERS) for name in config.rollout.filters),
        *(
            (f"eval.datasets.{key}.generate", one.generate, BUILT_IN_GENERATES)
            for key, one in config.eval.datasets.items()
        ),
    ):
        if value not in built_in and not _DOTTED.match(value):
            names = "".join(f'"{name}", ' for name in built_in if name)
            near = difflib.get_close_matches(value, built_in, n=1) if value else []
            hint = f'did you mean "{near[0]}"?' if near else f"write {names}or a dotted path module:name"
            yield ((key,), f"{key} = {value!r} is not known: {hint}")


def _rest(config: Config) -> Found:
    rollout, heal = config.rollout, config.heal
    if rollout.top_k == 0 or rollout.top_k < -1:
        yield (
            ("rollout.top_k",),
            f"rollout.top_k = {rollout.top_k} is not possible: set 1 or more, or -1 for no bound",
        )
    if "" in rollout.stop:
        yield (("rollout.stop",), "rollout.stop holds an empty text, which would end every generation: leave it out")
    if config.mode == "async" and rollout.partial:
        yield (
            ("mode", "rollout.partial"),
            'mode = "async" never interrupts a group, so rollout.partial = true has no meaning there: drop one',
        )
    if rollout.mask_off_policy and not rollout.partial:
        yield (
            ("rollout.mask_off_policy", "rollout.partial"),
            "rollout.mask_off_policy = true masks tokens of partial groups: set rollout.partial = true, or drop it",
        )
    for name, one in config.eval.datasets.items():
        if not one.data or name == "heldout":
            yield (
                (f"eval.datasets.{name}.data",),
                f"eval.datasets.{name} needs a file in data, and a name other than heldout, which is data.heldout's",
            )
    if heal.backoff_s > heal.max_backoff_s:
        yield (
            ("heal.backoff_s", "heal.max_backoff_s"),
            f"heal.backoff_s = {heal.backoff_s:g} is above heal.max_backoff_s = {heal.max_backoff_s:g}: "
            "lower the one or raise the other",
        )


_RULES: tuple[Callable[[Config], Found], ...] = (
    _model,
    _data,
    _batches,
    _learning,
    _sessions,
    *INFERENCE_RULES,
    _ports,
    _nodes,
    _names,
    _rest,
)
