"""The one TOML schema of a run: a Struct per section, a description per field, defaults in one place."""

# Annotations are not put off here: msgspec would compile the text of each in every process that reads a config, which
# is a tenth of the start of a hub.

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from miles_hpc.config.inference import EngineGroupConfig, ExternalEngineConfig, InferenceConfig, ServedModelConfig
from miles_hpc.config.node import ClusterConfig, GpuConfig, LogsConfig, NetworkConfig
from miles_hpc.config.section import NonNegativeInt, PositiveFloat, PositiveInt
from miles_hpc.config.section import describe as _d
from miles_hpc.config.section import path as _path
from miles_hpc.config.section import program as _program
from miles_hpc.config.timing import Timing

__all__ = [
    "ClusterConfig",
    "Config",
    "EngineGroupConfig",
    "ExternalEngineConfig",
    "GpuConfig",
    "InferenceConfig",
    "LogsConfig",
    "NetworkConfig",
    "ServedModelConfig",
]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the run file; unknown keys are refused."""


class RuntimeConfig(_Section, frozen=True):
    """The interpreter and environment that a pool's workers start in."""

    python: Annotated[
        str, _program("Interpreter; a bare name is looked up in PATH; empty: the one that runs miles-hpc.")
    ] = ""
    env: Annotated[dict[str, str], _d("Environment variables added for these workers.")] = {}


class MakeModelConfig(_Section, frozen=True):
    """A tiny model that is built into the run directory before the start (`miles-hpc make-model`)."""

    kind: Annotated[Literal["tiny"], _d("What to build.")] = "tiny"
    hidden_size: Annotated[PositiveInt, _d("Width.")] = 64
    layers: Annotated[PositiveInt, _d("Depth.")] = 2
    heads: Annotated[PositiveInt, _d("Attention heads.")] = 4


class ModelConfig(_Section, frozen=True):
    """The policy."""

    name: Annotated[str, _d("Name of the model; pools are called after it.")] = "policy"
    path: Annotated[str, _path("HF model directory with tokenizer and chat template; empty with `make`.")] = ""
    make: Annotated[MakeModelConfig | None, _d("Build a tiny model instead of reading `path`.")] = None
    chat_template: Annotated[
        str, _path("Chat template file that replaces the tokenizer's own; empty: the tokenizer's.")
    ] = ""


class ReasoningGymConfig(_Section, frozen=True):
    """Prompts that the package reasoning-gym makes, and its own verifier as reward `reasoning_gym`."""

    task: Annotated[str, _d("Name of the data set, such as `leg_counting`.")] = ""
    size: Annotated[PositiveInt, _d("Problems that are made.")] = 500
    seed: Annotated[int, _d("Seed of the problems; held-out ones must have another.")] = 0
    config: Annotated[dict[str, Any], _d("Further parameters of the data set.")] = {}


class DataConfig(_Section, frozen=True):
    """Prompts."""

    prompts: Annotated[str, _path("jsonl or parquet file, `path@[a:b]` for a slice of its rows.")] = ""
    source: Annotated[
        str, _d("Dotted path `module:function` of a function that returns a list of rows; in place of `prompts`.")
    ] = ""
    reasoning_gym: Annotated[ReasoningGymConfig | None, _d("Made problems; in place of `prompts`.")] = None
    prompt_key: Annotated[str, _d("Key of the prompt: a text, or a list of chat messages.")] = "prompt"
    label_key: Annotated[str, _d("Key of the label that the reward compares with; empty: no label.")] = "label"
    metadata_key: Annotated[str, _d("Key of a table that is passed to reward and generate functions.")] = "metadata"
    tools_key: Annotated[str, _d("Key of a list of tools that the chat template shows; empty: none.")] = ""
    multimodal_keys: Annotated[list[str], _d("Keys that are passed through in a sample's metadata, as they are.")] = []
    shuffle: Annotated[bool, _d("Shuffle by seed + epoch; off: file order.")] = True
    heldout: Annotated[str, _path("File of prompts that are only evaluated; empty: no held-out evaluation.")] = ""
    max_prompt_tokens: Annotated[PositiveInt, _d("Longer prompts are left out and counted.")] = 4096


class RolloutConfig(_Section, frozen=True):
    """What is generated in a step."""

    batch_size: Annotated[PositiveInt, _d("Prompt groups in a step.")] = 8
    samples_per_prompt: Annotated[PositiveInt, _d("Samples in a group.")] = 4
    workers: Annotated[PositiveInt, _d("Rollout worker processes.")] = 2
    concurrency: Annotated[PositiveInt, _d("Groups that one worker runs at once (its credits).")] = 16
    max_response_tokens: Annotated[PositiveInt, _d("Upper bound of one generated turn.")] = 256
    temperature: Annotated[float, Meta(ge=0), _d("Sampling temperature; 0 is greedy.")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1), _d("Nucleus sampling bound.")] = 1.0
    top_k: Annotated[int, _d("Top-k bound; -1: none.")] = -1
    stop: Annotated[list[str], _d("Texts that end a generation.")] = []
    session_every: Annotated[
        NonNegativeInt, _d("Every n-th prompt is a two-turn exchange through a session server; 0: none.")
    ] = 0
    second_turn: Annotated[str, _d("The user's second message in a two-turn exchange.")] = "Are you sure? Answer again."
    generate: Annotated[str, _d("Dotted path `module:function` of a generate function; empty: the built-in ones.")] = ""
    sample_timeout_s: Annotated[PositiveFloat, _d("Deadline of one sample, retries included.")] = 600.0
    keep_bytes: Annotated[PositiveInt, _d("Finished, uncommitted groups that one worker keeps for replay.")] = 1 << 30
    max_turns: Annotated[PositiveInt, _d("Turns of `multi_turn` at most.")] = 16
    tools: Annotated[
        str,
        _d(
            "Dotted path `module:function` of `async f(name, arguments, sample) -> str`, which runs multi_turn's tools."
        ),
    ] = ""
    tool_timeout_s: Annotated[PositiveFloat, _d("Deadline of one tool call; its error text goes to the policy.")] = 60.0
    over_sampling: Annotated[
        float, Meta(ge=1), _d("Groups that are begun for each group that is needed; what is left over is returned.")
    ] = 1.0
    filters: Annotated[
        list[str],
        _d(
            "Which finished groups may be trained on: `nonzero_std`, `no_truncated`, `no_aborted`, or dotted paths; "
            "reasons counted."
        ),
    ] = []
    max_filtered_batches: Annotated[
        PositiveInt, _d("So many batches filtered out in one step end the run with the table of reasons.")
    ] = 10
    partial: Annotated[
        bool, _d("Groups that are left over keep the tokens they have, and go on from there in a later step.")
    ] = False
    mask_off_policy: Annotated[
        bool, _d("Tokens of a partial group from before its last step do not count in the loss.")
    ] = False
    on_failed_sample: Annotated[
        Literal["drop", "backfill"],
        _d("`drop`: a failed sample drops its group, the next prompt replaces it; `backfill`: it is generated again."),
    ] = "drop"
    backfills: Annotated[PositiveInt, _d("How often one sample may be generated again under `backfill`.")] = 2
    submission: Annotated[
        Literal["group", "sample"],
        _d("What a worker's credits count: `concurrency` groups, or as many samples as those groups have."),
    ] = "group"
    max_staleness: Annotated[
        NonNegativeInt, _d("mode async: how many weight versions a group's oldest token may be behind when trained.")
    ] = 1
    on_stale: Annotated[
        Literal["drop", "retry"],
        _d("mode async: what becomes of a group that is too stale; `retry` generates it anew."),
    ] = "drop"
    save_debug: Annotated[bool, _d("Keep each rollout as a file in <run_dir>/rollouts/; see `rollouts show`.")] = False
    load_debug: Annotated[
        str, _path("Directory of saved rollouts that are trained on in place of generated ones; no engine is asked.")
    ] = ""


class RewardConfig(_Section, frozen=True):
    """How a sample is scored."""

    function: Annotated[
        str,
        _d("`exact_match`, `math_verify`, `reasoning_gym`, `remote_http`, or a dotted path `module:function`."),
    ] = "exact_match"
    scope: Annotated[
        Literal["sample", "group", "batch"],
        _d(
            "`group`: the function gets the list of a group's samples and returns their rewards; `batch`: a list "
            "of what has gathered from all groups of a worker."
        ),
    ] = "sample"
    batch_size: Annotated[PositiveInt, _d("scope batch: most samples of one call.")] = 64
    batch_wait_s: Annotated[float, Meta(ge=0), _d("scope batch: how long the first sample of a call waits.")] = 0.1
    url: Annotated[str, _d("remote_http: where prompt, response and label are posted to as JSON.")] = ""
    timeout_s: Annotated[PositiveFloat, _d("Deadline of one call.")] = 60.0
    max_failure_rate: Annotated[float, Meta(ge=0, le=1), _d("Share of failed calls in a step that ends the run.")] = 0.2


class SessionConfig(_Section, frozen=True):
    """Session servers: chat with exact token bookkeeping."""

    servers: Annotated[NonNegativeInt, _d("Session server processes.")] = 2
    port: Annotated[
        NonNegativeInt, _d("Fixed port of the first instance, instance i listens on port + i; 0: free ports.")
    ] = 0


class WarmStartConfig(_Section, frozen=True):
    """Supervised steps before the first rollout of a fresh run."""

    data: Annotated[str, _path("jsonl file with prompt and answer.")] = ""
    prompt_key: Annotated[str, _d("Key of the prompt.")] = "prompt"
    answer_key: Annotated[str, _d("Key of the answer.")] = "answer"
    steps: Annotated[PositiveInt, _d("Optimizer steps.")] = 300
    batch_size: Annotated[PositiveInt, _d("Examples in a step, over all ranks.")] = 64
    learning_rate: Annotated[float, Meta(ge=0), _d("Learning rate of these steps.")] = 3e-3


class TrainConfig(_Section, frozen=True):
    """The trainer, and how finished groups become its batches."""

    trainer: Annotated[
        str, _d("`torch`: the reference trainer; `hash`: hashes its batches, for tests; or `module:Class`.")
    ] = "torch"
    ranks: Annotated[PositiveInt, _d("Data-parallel ranks of the trainer cell.")] = 2
    learning_rate: Annotated[float, Meta(ge=0), _d("AdamW learning rate.")] = 1e-5
    weight_decay: Annotated[float, Meta(ge=0), _d("AdamW weight decay.")] = 0.0
    max_grad_norm: Annotated[PositiveFloat, _d("Gradient clipping.")] = 1.0
    updates_per_step: Annotated[PositiveInt, _d("Optimizer updates on one rollout batch.")] = 1
    micro_batch_size: Annotated[PositiveInt, _d("Samples in one forward pass of one rank.")] = 16
    clip_low: Annotated[float, Meta(gt=0), _d("Lower clipping range of the importance ratio.")] = 0.2
    clip_high: Annotated[float, Meta(gt=0), _d("Upper clipping range of the importance ratio.")] = 0.2
    advantage: Annotated[
        Literal["grpo", "gspo", "rloo", "reinforce++", "reinforce++_baseline", "none"],
        _d("How rewards become advantages; see docs/rollouts.md."),
    ] = "grpo"
    normalize_advantages: Annotated[
        bool, _d("grpo, gspo: divide a group's advantages by their standard deviation.")
    ] = True
    split: Annotated[
        Literal["strided", "balanced"],
        _d("How samples are dealt to ranks: in turn, or so that all ranks have about as many tokens."),
    ] = "strided"
    max_tokens_per_micro_batch: Annotated[
        NonNegativeInt,
        _d("Samples packed first-fit into rows of so many tokens, in place of micro_batch_size; 0: none."),
    ] = 0
    uneven: Annotated[
        Literal["error", "trim", "pad"],
        _d("Samples that do not divide by ranks x updates: refuse, leave the last out, or repeat the last masked."),
    ] = "error"
    kl_coef: Annotated[float, Meta(ge=0), _d("Weight of the KL penalty to the start policy; 0: none.")] = 0.0
    save_every: Annotated[PositiveInt, _d("Steps between two commits; a commit holds a checkpoint.")] = 5
    weight_transfer: Annotated[
        Literal["disk", "distributed"],
        _d("How new weights reach engines: from a directory, or broadcast from the trainer (it is written as well)."),
    ] = "disk"
    keep_checkpoints: Annotated[PositiveInt, _d("Newest checkpoints that are kept.")] = 2
    threads: Annotated[PositiveInt, _d("CPU threads of one rank.")] = 1
    external_timeout_s: Annotated[
        PositiveFloat, _d("mode external: until every rank of your trainer must have acknowledged a rollout.")
    ] = 86400.0
    warm_start: Annotated[WarmStartConfig | None, _d("Supervised steps before the first rollout.")] = None


class EvalDatasetConfig(_Section, frozen=True):
    """One evaluated data set. Unset values are those of training, but greedy."""

    data: Annotated[str, _path("Prompt file, as data.prompts.")] = ""
    samples: Annotated[PositiveInt, _d("Samples of each prompt; pass@k is told for k = 1, 2, 4 ... up to it.")] = 1
    temperature: Annotated[float, Meta(ge=0), _d("Sampling temperature; 0 is greedy.")] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1), _d("Nucleus sampling bound.")] = 1.0
    max_response_tokens: Annotated[NonNegativeInt, _d("Upper bound of one turn; 0: rollout.max_response_tokens.")] = 0
    generate: Annotated[str, _d("Generate function; empty: a single turn.")] = ""
    limit: Annotated[NonNegativeInt, _d("Prompts that are evaluated; 0: eval.limit.")] = 0


class EvalConfig(_Section, frozen=True):
    """Held-out evaluation: greedy unless said otherwise, never mixed with the training accounts."""

    every: Annotated[
        NonNegativeInt, _d("Steps between two evaluations; 0: only before the first and after the last step.")
    ] = 0
    limit: Annotated[NonNegativeInt, _d("Prompts that are evaluated; 0: all.")] = 0
    datasets: Annotated[
        dict[str, EvalDatasetConfig],
        _d("More data sets by name, beside data.heldout; the rows of all lie in <run_dir>/eval/."),
    ] = {}


class HealConfig(_Section, frozen=True):
    """How often a cell may be started again."""

    budget: Annotated[
        NonNegativeInt, _d("Restarts of one cell inside the window; then the run ends with a reason.")
    ] = 5
    window_s: Annotated[PositiveFloat, _d("The window.")] = 600.0
    backoff_s: Annotated[
        float, Meta(ge=0), _d("Wait before the second restart in the window; doubled for each further one.")
    ] = 1.0
    max_backoff_s: Annotated[float, Meta(ge=0), _d("Longest such wait.")] = 30.0
    quarantine: Annotated[
        NonNegativeInt,
        _d("Deaths of at least two cells on one node inside the window that keep new work off it; 0: never."),
    ] = 4


class TrackingConfig(_Section, frozen=True):
    """Where metrics go beside metrics.jsonl; a tracker that fails never fails a step."""

    tensorboard: Annotated[bool, _d("Write TensorBoard events into <run_dir>/tensorboard.")] = False
    wandb_project: Annotated[str, _d("W&B project; empty: none.")] = ""
    wandb_mode: Annotated[Literal["online", "offline"], _d("W&B mode.")] = "offline"


class ContainerConfig(_Section, frozen=True):
    """The container that the nodes' agents, and with them all workers, run in."""

    kind: Annotated[
        Literal["pyxis", "apptainer"], _d("`pyxis`: srun's --container-… options; `apptainer`: `apptainer exec`.")
    ] = "pyxis"
    image: Annotated[str, _d("Image: a file, or what the container tool takes.")] = ""
    mounts: Annotated[list[str], _d("`SOURCE:TARGET[:OPTIONS]`; the run directory is always mounted.")] = []
    python: Annotated[str, _d("The interpreter inside the container that has miles-hpc.")] = "python3"
    arguments: Annotated[list[str], _d("More arguments of srun (pyxis) or of `apptainer exec`.")] = []


class SlurmConfig(_Section, frozen=True):
    """What `miles-hpc submit` asks Slurm for, and what happens at the end of an allocation."""

    partition: Annotated[str, _d("Partition; empty: the cluster's default.")] = ""
    account: Annotated[str, _d("Account; empty: your default.")] = ""
    qos: Annotated[str, _d("Quality of service; empty: the default.")] = ""
    nodes: Annotated[PositiveInt, _d("Nodes. In a job, what its allocation has.")] = 1
    gpus_per_node: Annotated[NonNegativeInt, _d("GPUs of each node.")] = 0
    cpus_per_node: Annotated[
        NonNegativeInt, _d("CPUs of each node; 0: whole nodes for this job alone (--exclusive).")
    ] = 0
    memory: Annotated[str, _d("Memory of each node, such as `200G`; empty: all of a node's (--mem=0).")] = ""
    time: Annotated[str, _d("Time limit in Slurm's forms, such as `4:00:00`; empty: the partition's default.")] = ""
    constraint: Annotated[str, _d("Node features.")] = ""
    exclude: Annotated[str, _d("Nodes to leave out.")] = ""
    reservation: Annotated[str, _d("Reservation.")] = ""
    setup: Annotated[list[str], _d("Shell lines before srun: modules, a virtual environment, exports.")] = []
    container: Annotated[ContainerConfig | None, _d("Run inside a container.")] = None
    additional: Annotated[
        dict[str, Any], _d("More options of sbatch by their long names, such as comment or nice.")
    ] = {}
    signal_s: Annotated[
        NonNegativeInt, _d("Slurm sends SIGUSR2 this many seconds before the time limit, up to a minute early.")
    ] = 180
    drain_margin_s: Annotated[
        PositiveFloat, _d("The hub's own clock begins to drain this long before the allocation ends.")
    ] = 120.0
    requeue: Annotated[bool, _d("A run that drained because its allocation ends is put into the queue again.")] = True
    max_requeues: Annotated[NonNegativeInt, _d("Restarts of one job; then it stays ended.")] = 20
    max_idle_requeues: Annotated[
        PositiveInt, _d("Attempts in a row that committed nothing; after these there is no further one.")
    ] = 2


class Config(_Section, frozen=True):
    """A run."""

    name: Annotated[str, _d("Shown in lists; part of the default run id.")] = "run"
    seed: Annotated[int, _d("Seed of data order, sampling, and model initialisation.")] = 0
    steps: Annotated[PositiveInt, _d("Training steps of the whole run.")] = 10
    mode: Annotated[
        Literal["sync", "async", "external", "eval", "rollout"],
        _d(
            "`sync`: generate, then train; `async`: generation never stops; `external`: your trainer; `eval`: only "
            "evaluate; `rollout`: generate every step with the start model, and train nothing."
        ),
    ] = "sync"
    python_path: Annotated[
        list[str],
        Meta(
            description="Directories where your own reward, generate and trainer modules are found; the run file's own "
            "directory and the current one are added where a dotted path is used.",
            extra={"path": True},
        ),
    ] = []
    cluster: ClusterConfig = ClusterConfig()
    logs: LogsConfig = LogsConfig()
    network: NetworkConfig = NetworkConfig()
    gpu: GpuConfig = GpuConfig()
    runtimes: Annotated[
        dict[str, RuntimeConfig], _d("Runtimes by pool kind: router, engine, trainer, rollout-worker, default ...")
    ] = {}
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    inference: InferenceConfig = InferenceConfig()
    models: Annotated[
        dict[str, ServedModelConfig], _d("Models beside the policy, by name: judges, reward models, opponents.")
    ] = {}
    session: SessionConfig = SessionConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    heal: HealConfig = HealConfig()
    slurm: SlurmConfig = SlurmConfig()
    tracking: TrackingConfig = TrackingConfig()
    timing: Timing = Timing()
