"""The configuration: one frozen dataclass per component, each handed over whole to its component.

A field's docstring is its help text. Loading, checking and freezing are in `loading.py`; nothing
here reads a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from slurm_grpo.config.values import AT_LEAST_0, AT_LEAST_1, BELOW_1, Count, Positive, Range, Size


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Identity and length of the run."""

    name: str = ""
    """Directory under `runs_dir`. Empty: the configuration's file name, the seed and the time."""
    runs_dir: str = "runs"
    """Where run directories are made; on a cluster, a shared file system.
    Relative to the current directory."""
    seed: Annotated[int, Range(lambda x: 0 <= x < 2**32, "at least 0 and below 2**32")] = 0
    """Seeds prompts, sampling and nothing else: the initial weights come from `model.path`."""
    steps: Size = 40
    """Optimizer steps to take."""
    replay_of: str | None = None
    """Set by `slurm-grpo replay`: the run directory whose episodes this run trains on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The weights the run starts from."""

    path: str = ""
    """Required. Hugging Face model directory (config.json, safetensors, tokenizer).
    Families: llama, qwen3 (dense).
    Relative to the configuration file, or to the current directory when given as an option.
    Every path may hold `~`, `$VAR` and `${VAR:-default}`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerConfig:
    """How an answer is judged."""

    name: str = "last_number"
    """`exact`, `last_number`, `regex`, or your own function as `module:function`.
    It is called with (completion_text, target).
    It returns a number, a bool or a dict of parts; `reward` is their total (default: the sum)."""
    regex: str | None = None
    """With `regex`: the last match (its first group, if it has one) must equal the answer."""
    module_dir: str | None = None
    """With `module:function`: the directory that holds the module.
    By default the configuration file's, the current one, or the installed packages."""
    timeout_s: Positive = 5.0
    """Seconds one episode's scoring may take before it is marked as an error."""
    max_errors: Count = 64
    """Episodes that may fail to score in one engine process before the run fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """Where prompts come from."""

    name: Literal["addition", "sum_digits", "jsonl"] = "addition"
    """Built-in task, or `jsonl` for your own rows of `prompt` and `answer`."""
    path: str | None = None
    """With `jsonl`: the training rows. Relative like model.path."""
    eval_path: str | None = None
    """With `jsonl`: held-out rows; without it there is no evaluation."""
    chat_template: bool = False
    """Send a text prompt as one user message through the chat template (chat rows always go)."""
    scorer: ScorerConfig = field(default_factory=ScorerConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Greedy evaluation on held-out prompts."""

    n_prompts: Count = 128
    """Held-out prompts per evaluation; 0 turns evaluation off."""
    every_steps: Count = 0
    """Also evaluate every N steps; 0: before and after training only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """GRPO: how groups become a loss."""

    groups_per_step: Size = 8
    """Prompts (groups) in one optimizer step."""
    group_size: Annotated[
        int,
        Range(lambda x: x >= 2, "at least 2, since an advantage compares the episodes of a group"),
    ] = 8
    """Episodes per prompt."""
    advantage: Literal["std", "mean"] = "std"
    """`std`: (reward - mean) / (std + 1e-6) in the group; `mean`: reward - mean."""
    clip_low: Annotated[float, Range(lambda x: 0 < x < 1, "between 0 and 1, such as 0.2")] = 0.2
    """The importance ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Range(lambda x: x > 0, "more than 0, such as 0.28")] = 0.28
    """The importance ratio is clipped above at 1 + clip_high."""
    max_staleness: Count = 0
    """Steps an episode's oldest token may lag behind the policy it trains; 0: on-policy."""
    order: Literal["strict", "ready"] = "strict"
    """Train on groups by group id (`strict`) or as they become ready (`ready`)."""
    drop_zero_spread: bool = False
    """Replace groups whose rewards are all equal (they carry no gradient) by further prompts."""
    oversample: Annotated[float, Range(lambda x: 1 <= x < 1e6, "at least 1, such as 4")] = 4.0
    """Expect groups to be dropped as in the steps before and generate so many more at once.
    At most this many times what is missing; 1: no more than that."""
    max_dropped_per_step: Count = 160
    """Groups one step may drop before the run fails instead of searching for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How completions are sampled during training."""

    temperature: Annotated[
        float,
        Range(lambda x: x > 0, "more than 0: greedy episodes of a group would all be the same"),
    ] = 1.0
    """Sampling temperature."""
    max_new_tokens: Size = 24
    """Tokens a completion may have at most."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; kept in the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """One vLLM engine."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Weights and activations of the engine; weights are cast to it before they are sent."""
    tensor_parallel: Size = 1
    """GPUs (or CPU worker processes) per engine."""
    max_model_len: Annotated[int, Range(lambda x: x >= 2, "at least 2")] = 512
    """Longest prompt plus completion, tokens."""
    max_num_seqs: Size = 64
    """Sequences decoded together."""
    max_num_batched_tokens: Size = 8192
    """Tokens one engine step may process."""
    kv_cache_gib: Positive = 0.5
    """KV cache per engine on CPUs, GiB."""
    gpu_memory_utilization: Annotated[
        float, Range(lambda x: 0 < x <= 1, "more than 0 and at most 1")
    ] = 0.9
    """Share of the GPU's memory an engine may take."""
    block_size: Annotated[
        int, Range(lambda x: x > 0 and x % 32 == 0, "a multiple of 32, such as 32")
    ] = 32
    """Tokens per KV block; prefixes are shared in whole blocks. A multiple of 32 on CPUs."""
    enforce_eager: bool = True
    """Skip CUDA graphs and compilation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorConfig:
    """The generator side: engines, and how they publish."""

    n_engines: int = 1
    """Independent engines; more of them is data parallelism."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    threads: Size = 2
    """CPU threads per engine."""
    publish_groups: Size = 4
    """Publish a shard after this many groups.
    Strict on-policy runs publish one shard per engine and step."""
    publish_after_s: Positive = 2.0
    """Publish what is there after this many seconds."""
    max_restarts: Count = 3
    """Times one engine may be restarted in an attempt before the run fails."""
    restart_backoff_s: Annotated[float, AT_LEAST_0] = 1.0
    """Pause before the first restart; doubles with each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagingConfig:
    """Episodes on disk: what is kept once a checkpoint covers it."""

    keep: Literal["all", "trained", "recent"] = "all"
    """`all`: every shard. `trained`: those that a step trained on.
    `recent`: those that one of the last `keep_steps` steps trained on."""
    keep_steps: Annotated[int | None, AT_LEAST_1] = None
    """With `recent`: how many steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW."""

    lr: Positive = 3e-5
    """Peak learning rate."""
    beta1: Annotated[float, BELOW_1] = 0.9
    """First moment decay."""
    beta2: Annotated[float, BELOW_1] = 0.95
    """Second moment decay."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, AT_LEAST_0] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this global L2 norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate over steps."""

    warmup_steps: Count = 3
    """Steps of linear warm-up from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up, ending with the step after `run.steps`."""
    min_lr_ratio: Annotated[float, Range(lambda x: 0 <= x <= 1, "between 0 and 1")] = 0.0
    """Final learning rate as a share of the peak (linear and cosine)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What is saved, and when. A checkpoint at the end is always written."""

    every_steps: Count = 10
    """Save every N steps; 0: at the end only."""
    keep: Size = 2
    """Complete checkpoints kept; older ones are removed once a newer one is complete."""
    export_hf: bool = True
    """At the end, also write a Hugging Face directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """The trainer side: ranks, packing, optimizer."""

    n_ranks: Size = 1
    """Trainer processes; FSDP shards over them."""
    tokens_per_microbatch: Annotated[int, Range(lambda x: x >= 2, "at least 2")] = 2048
    """Tokens in one packed forward pass; a group's prompt counts once."""
    forward_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Parameters are cast to this for forward and backward; masters stay float32."""
    threads: Size = 2
    """CPU threads per rank."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass to save memory."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wait_for_groups_s: Positive = 1800.0
    """Seconds a step may wait for its groups before the run fails, naming the engines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSyncConfig:
    """The broadcast of new weights to the engines."""

    bucket_mib: Size = 32
    """Size of one broadcast, MiB; on a GPU five are held at most."""
    door_timeout_s: Positive = 300.0
    """Seconds an engine may take to come to the door before it is given up and restarted."""
    transfer_timeout_s: Positive = 120.0
    """Seconds one broadcast may take before both sides abort the group and a new one is formed."""
    max_probe_difference: Positive = 1.0
    """Mean absolute log-probability difference (nats) that fails a run after a sync.
    Engines and trainer compare a fixed prompt: above it, the engine runs other weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbConfig:
    """Weights & Biases."""

    enabled: bool = False
    """Also log to wandb; `metrics/*.jsonl` is written in any case."""
    mode: Literal["offline", "online"] = "offline"
    """`offline` writes into the run directory, for `wandb sync` later."""
    project: str = "slurm_grpo"
    """Project name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesConfig:
    """What one node group asks Slurm for. Unset: Slurm's or the site's default."""

    partition: str | None = None
    """Partition."""
    account: str | None = None
    """Account. A heterogeneous job takes the generators' for both groups unless set."""
    qos: str | None = None
    """Quality of service; like the account."""
    nodes: Size = 1
    """Nodes."""
    gpus_per_node: Count = 0
    """GPUs on each node; 0 runs on CPUs."""
    cpus_per_node: Annotated[int | None, AT_LEAST_1] = None
    """CPUs on each node. Unset: what its processes' `threads` add up to."""
    mem_gib: Annotated[int | None, AT_LEAST_1] = None
    """Memory on each node, GiB."""
    constraint: str | None = None
    """Node features."""
    exclusive: bool = False
    """Share no node with other jobs."""
    flags: tuple[str, ...] = ()
    """Further sbatch flags of this group, such as `--reservation=course`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Where processes run and how long they are waited for."""

    kind: Literal["local", "slurm"] = "local"
    """`local`: the supervisor in the foreground, roles as its child processes.
    `slurm`: a batch job."""
    allocation: Literal["het", "split"] = "het"
    """With slurm: a heterogeneous job of `generators` and `trainers` (het).
    Or one allocation, `shared`, whose nodes or single node's GPUs are cut in two (split)."""
    generators: NodesConfig = field(default_factory=NodesConfig)
    """With het: the engines' nodes."""
    trainers: NodesConfig = field(default_factory=NodesConfig)
    """With het: the trainer ranks' nodes."""
    shared: NodesConfig = field(default_factory=NodesConfig)
    """With split: the whole allocation."""
    time_limit: str = "4:00:00"
    """Time limit of the job, as Slurm writes it: minutes, H:M:S or D-H:M:S."""
    signal_s: int = 300
    """Seconds before the limit at which the run saves a checkpoint and requeues itself."""
    max_requeues: Count = 16
    """Times a run may put itself back into the queue."""
    python: str | None = None
    """Interpreter of the role processes (with torch and vLLM); by default the launching one."""
    start_timeout_s: Positive = 600.0
    """Seconds a role may take from its start until it is ready."""
    heartbeat_timeout_s: Positive = 60.0
    """Seconds without a sign of life before a process counts as dead."""
    stop_grace_s: Positive = 5.0
    """Seconds between asking a process to end and killing it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteConfig:
    """What differs between clusters; `--site FILE.yaml` fills this section."""

    gpu_flag: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How GPUs are asked for."""
    gpu_type: str | None = None
    """Type in that flag, as in `gres:gpu:a100:4`."""
    mem_flag: Literal["mem", "mem-per-cpu", "none"] = "mem"
    """How memory is asked for."""
    remove_flags: tuple[str, ...] = ()
    """Flags this site refuses, by name: `mem`, `requeue`."""
    flags: tuple[str, ...] = ()
    """Flags added to every component, or replacing ours of the same name."""
    srun_flags: tuple[str, ...] = ()
    """Flags added to every srun, or replacing ours of the same name."""
    setup: tuple[str, ...] = ()
    """Shell lines before the supervisor starts, such as `module load cuda`."""
    teardown: tuple[str, ...] = ()
    """Shell lines after it has ended."""
    container: Literal["none", "pyxis", "prefix"] = "none"
    """Roles in a container: pyxis flags to srun, or a command prefix such as apptainer."""
    container_image: str | None = None
    """With pyxis: the image."""
    container_mounts: tuple[str, ...] = ()
    """With pyxis: `HOST:CONTAINER` mounts; the run directory and the code are added."""
    container_prefix: tuple[str, ...] = ()
    """With prefix: words before the interpreter, such as `apptainer exec --nv image.sif`."""
    mpi: str = "none"
    """srun --mpi."""
    cpu_bind: str | None = None
    """srun --cpu-bind."""
    interface: str | None = None
    """Network interface between the groups, for the control plane, NCCL and gloo (`ib0`)."""
    scratch_dir: str | None = None
    """Node-local directory for caches; may hold $VARIABLES of the job."""
    environment: tuple[str, ...] = ()
    """`NAME=VALUE` for the roles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A GRPO run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    staging: StagingConfig = field(default_factory=StagingConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    site: SiteConfig = field(default_factory=SiteConfig)

    @property
    def strict_mode(self) -> bool:
        """Whether the run is repeatable: on-policy, and groups trained on by id."""
        return self.algorithm.max_staleness == 0 and self.algorithm.order == "strict"
