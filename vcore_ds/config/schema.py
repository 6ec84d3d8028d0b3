"""The keys of a recipe: one class per section, one documented field per key.

Every name that counts something says over what: `global` is over all ranks and micro-batches, `per_rank` is on one
data-parallel rank. The sections of the method are in `method_sections.py`, rules that look at more than one key in
`rules.py`.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, Strict, model_validator

from vcore_ds.config.fields import (
    LARGEST_COUNT,
    LARGEST_FLOAT,
    LARGEST_MINUTES,
    LARGEST_SEED,
    Beta,
    Count,
    Minutes,
    Name,
    NonNegative,
    NumTokens,
    PathText,
    Positive,
    Section,
    Text,
)
from vcore_ds.config.method_sections import MethodConfig, ProbeConfig, UtilityConfig
from vcore_ds.config.rules import broken_rules


class ModelConfig(Section):
    """The pretrained causal language model."""

    path: PathText
    """Folder with a Hugging Face model (relative to the working directory), or its id on the hub."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Data type of the parameters in forward and backward; the master copy and the accumulated gradients are fp32."""
    provider: Literal["huggingface", "megatron"] = "huggingface"
    """Whose layers compute: `huggingface` any causal language model of transformers; `megatron` dense Qwen3, Qwen2,
    Llama and Mistral models in megatron-core's parallel layers, for tensor parallelism (parallel.tensor)."""
    attention: Literal["auto", "sdpa", "flash_attention_2", "eager"] = "auto"
    """Attention of the passes with a gradient: `auto` the fused kernel of the device, without masks, with Ulysses
    sequence parallelism; the others are Hugging Face's kernels, for architectures whose attention cannot be
    replaced."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward: memory per token falls, a step takes about a third longer."""
    activation_offload: bool = False
    """Keep the activation checkpoints in host memory until the backward, for very long sequences."""


class ParallelConfig(Section):
    """How a model is divided over ranks, beyond ZeRO-3's shards and sequence parallelism (batch.sequence_parallel)."""

    tensor: Literal[1, 2, 4, 8] = 1
    """Degree of tensor parallelism: so many ranks divide the heads and columns of every layer among them; with
    model.provider megatron. For models whose layer, or whose longest row, does not fit on one rank: it is not faster.
    Within a node."""
    expert: Count = 1
    """Degree of expert parallelism, for mixtures of experts: so many neighbouring ranks divide the experts of every
    layer among them, and send their tokens to each other instead of gathering all experts; a divisor of the ranks and
    of the experts of a layer. With model.provider huggingface."""


class LoraConfig(Section):
    """Low-rank adapters; `lora: null` trains all parameters."""

    rank: Count
    """Rank r of every adapter."""
    alpha: Positive
    """Adapters are scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability on the adapters' input."""
    target_modules: Literal["all-linear"] | Annotated[tuple[Text, ...], Strict(False), Field(min_length=1)] = (
        "all-linear"
    )
    """`all-linear` (every linear layer but the output head, and but routers and experts), or a list of names of layers
    such as [q_proj, v_proj], in which `all-linear` may be too. In a mixture of experts `experts` names the experts of
    all layers: [all-linear, experts]; dropout is then 0."""


class KeepConfig(Section):
    """Which traces of data.train_path are trained on, by the scores that `vcore-ds score` gave them."""

    scores: PathText
    """The folder that `vcore-ds score` wrote, of this data, tokenizer and model; a relative path is relative to the
    working directory."""
    set: Name | None = None
    """The trusted set along whose gradient the utilities were taken; null where the scores are of one set."""
    by: Literal["mean", "sum"] = "mean"
    """A trace's utility: `mean` over its tokens, or their `sum`, which favours long traces."""
    top: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the traces that is kept, those with the highest utility, rounded to whole traces; or give above."""
    above: Annotated[float, Field(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)] | None = None
    """Traces with a higher utility than this are kept: with 0, all that lower the trusted set's loss; or give top."""
    within: Literal["all", "source"] = "all"
    """Whether top is a share of all traces, or of those of each source file, so that the mixture stays as it is."""


class DataConfig(Section):
    """The data: each path a token store (`vcore-ds prepare`), or conversations: a .jsonl, .json or .parquet file, a
    folder of them, a pattern, or a hub id; rows of {"messages": [{"role", "content"}, ...]}, ShareGPT or Alpaca.
    Conversations are converted to a store first, once."""

    train_path: PathText
    """Training data; a relative path is relative to the working directory."""
    keep: KeepConfig | None = None
    """Train on the traces with the highest scores alone (`vcore-ds score`); null trains on all of them."""
    validation_path: PathText | Annotated[dict[Name, PathText], Field(min_length=1)] | None = None
    """Held-out conversations for the loss before, during and after the run; several sets as {NAME: PATH, ...}, each
    with a loss of its own, `validation_loss_NAME`; null for none."""
    probe_path: PathText | None = None
    """A pool of conversations that the probe batch is drawn from, such as a few trusted ones where the training data is
    noisy: utilities then say what lowers *their* loss. null draws from the training data, as the paper does."""
    trusted_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each batch that is drawn from the pool in probe_path instead of the training data, rounded to whole
    sequences, with any method. Training on the pool as well as steering by it."""
    cutoff_length: NumTokens = 16384
    """Longest sequence, in tokens."""
    overlong: Literal["drop", "truncate"] = "drop"
    """A sequence longer than cutoff_length is left out, or cut at its end."""
    cache_dir: Text | None = None
    """Folder for the stores made of conversations; null for ~/.cache/vcore_ds ($XDG_CACHE_HOME). Best on a file system
    that all nodes share: where they do not, the first process of each node makes its own."""
    reference_log_probabilities: PathText | None = None
    """For iw_sft with all parameters trained: the file that `vcore-ds reference` computed from the training data."""

    def validation_paths(self) -> dict[str, str]:
        """The path of each held-out set by its name, which is empty for an only one without a name."""
        path = self.validation_path
        return {} if path is None else {"": path} if isinstance(path, str) else path


class BatchConfig(Section):
    """The main batch B."""

    global_size: Count = 32
    """|B|, sequences per optimizer step over all ranks and micro-batches."""
    micro_batch_size_per_rank: Literal["auto"] | Count = "auto"
    """Sequences per rank in one forward and backward, a row each. `auto` packs short ones into rows of about equal
    cost, with no more tokens than the batch's longest sequence (or 1,024); where a model or its attention rules that
    out, those of similar length share a micro-batch. With packed_row_tokens, or method.alpha_scope micro_batch, it is
    1."""
    packed_row_tokens: NumTokens | None = None
    """Pack sequences into rows of about equal cost, a row in one forward and backward, without padding: most tokens of
    a row on each rank; null leaves rows to micro_batch_size_per_rank."""
    sequence_parallel: Literal["auto"] | Count = "auto"
    """Degree of Ulysses sequence parallelism: so many ranks divide the tokens of a row among them; a divisor of the
    ranks and of the model's query heads.
    `auto` takes for each batch the number that makes the step shortest."""


class OptimizerConfig(Section):
    """The optimizer over the trainable parameters."""

    name: Literal["adamw", "sgd"] = "adamw"
    """`adamw`, or `sgd` without momentum."""
    learning_rate: Positive
    """Peak learning rate, reached after the warm-up."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: Positive = 1e-8
    """AdamW's term in the denominator."""
    weight_decay: NonNegative = 0.0
    """Decay per step, times the learning rate (decoupled for AdamW)."""
    gradient_clipping: Positive | None = 1.0
    """Bound on the 2-norm of the step's gradient over all trainable parameters and ranks; null for none."""


class ScheduleConfig(Section):
    """How long, and the learning rate over the run."""

    num_steps: Count | None = None
    """Optimizer steps; or give num_epochs."""
    num_epochs: Annotated[float, Field(gt=0, le=LARGEST_COUNT)] | None = None
    """Passes over the training data; or give num_steps."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the steps in which the learning rate rises linearly from 0."""
    kind: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: `cosine` to 0 at the last step, or `constant`."""


class RunConfig(Section):
    """The run: its folder, seed, output and time limit."""

    output_dir: PathText
    """The run's folder; a relative path is relative to the working directory. A stopped run there is resumed; any other
    one is never overwritten."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 42
    """Seed of the data order, the probe stream, dropout and the adapters."""
    log_every: Count = 1
    """Optimizer steps between two printed lines; metrics.jsonl has every step."""
    validate_every: Count | None = None
    """Optimizer steps between two validations; null validates before the first and after the last step only."""
    num_token_records: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] = 12
    """Optimizer steps whose tokens are recorded in tokens/, with loss, utility and weight, for `vcore-ds tokens`:
    spread evenly on a log scale, the first and the last among them; 0 for none. At most about 2 MB each."""
    num_followed_traces: Annotated[int, Field(ge=0, le=1000)] = 16
    """Traces that are measured at each of these steps, so that the same tokens can be followed over the run: half of
    them held out (data.validation_path), the rest training data, drawn by the seed; 0 for none. At each of these steps
    they cost three or four forwards of so many traces, and a file of at most about 2 MB."""
    wandb_project: Text | None = None
    """Project on Weights & Biases that also gets the metrics; null for none. Where it cannot be reached, the run
    continues and keeps in its folder what it would have sent."""
    time_limit_minutes: Minutes | None = None
    """Wall clock from the start of the processes: the run saves and stops (exit code 85) so early that one more step
    and the save would have fitted; null for no limit."""


TrackerName = Literal["tensorboard", "mlflow", "trackio", "swanlab"]


class TrackConfig(Section):
    """Where the lines of metrics.jsonl also go. A tracker that fails or hangs costs a warning, and not the run.
    run.wandb_project names the one on Weights & Biases."""

    trackers: Annotated[tuple[TrackerName, ...], Strict(False)] = ()
    """Such as [tensorboard, mlflow]; each has to be installed, and is configured by its own environment variables.
    TensorBoard's events are in the run's folder."""
    project: Text = "vcore_ds"
    """Project (in MLflow the experiment) at these trackers, but TensorBoard, which has none."""
    group: Text | None = None
    """Name that the runs of one experiment share, also on Weights & Biases; null for none."""
    tags: Annotated[tuple[Text, ...], Strict(False)] = ()
    """Words to find the run by, also on Weights & Biases; Trackio has none."""


class CheckpointConfig(Section):
    """What a stopped run is resumed from: written by all ranks after a step, and always after the last one."""

    resume: Literal["auto", "never"] = "auto"
    """`auto` resumes the run in run.output_dir, from its newest checkpoint that verifies; `never` requires a new
    folder."""
    every_steps: Count | None = None
    """Optimizer steps between two checkpoints; null for none by this rule."""
    every_minutes: Minutes | None = 30.0
    """Minutes between two checkpoints, from the end of one to the beginning of the next; null for none by this rule."""
    keep_last: Count = 2
    """Number of newest checkpoints that are kept; an older one is deleted when a new one is complete."""
    keep_every_steps: Count | None = None
    """Optimizer steps between two checkpoints that are kept for good; null for none."""


class EngineConfig(Section):
    """DeepSpeed."""

    deepspeed_config: Text
    """DeepSpeed JSON (ZeRO-3), looked up in the folder of the file that names it, the working directory, and among the
    shipped ones. In a resolved recipe the name of a shipped one, `ds_configs/NAME.json`, or an absolute path."""
    coalesce_gradient_reduction: Literal["auto"] | bool = "auto"
    """Reduce gradients once a step instead of once a micro-batch, at the cost of unsharded gradients on every rank: 4
    bytes for each trained parameter, 6 in bf16. `auto` does so where they take at most 5% of a rank's memory."""
    memory_check: bool = True
    """Stop before the model is loaded where it cannot fit into memory, by an estimate that says what it counts; false
    starts anyway."""
    timeout_minutes: Minutes = 30.0
    """Minutes that a collective may wait for the slowest rank before the run fails."""
    lost_rank_seconds: Annotated[float, Field(ge=5, le=60 * LARGEST_MINUTES)] = 60.0
    """Seconds without a sign of life after which a rank counts as hung, and the run ends; at least ten minutes while
    models are loaded, which may silence a rank for long. A rank that dies is noticed at once."""


class Recipe(Section):
    """A run, completely: the same recipe and the same data give the same run."""

    method: MethodConfig = Field(default_factory=MethodConfig)
    utility: UtilityConfig = Field(default_factory=UtilityConfig)
    probe: ProbeConfig = Field(default_factory=ProbeConfig)
    model: ModelConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    lora: LoraConfig | None = None
    data: DataConfig
    batch: BatchConfig = Field(default_factory=BatchConfig)
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    run: RunConfig
    track: TrackConfig = Field(default_factory=TrackConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    engine: EngineConfig

    # Without annotation, because SECTIONS are the annotated ones.
    _retired = PrivateAttr(default_factory=dict[str, Any])

    @property
    def retired(self) -> dict[str, Any]:
        """Dotted key -> value of keys that only earlier versions have; empty but for the recipe of a finished run."""
        return self._retired

    def with_retired(self, values: dict[str, Any]) -> Self:
        """The same recipe with other `retired` values."""
        recipe = self.model_copy()
        recipe._retired = values
        return recipe

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [f"{rule.keys[0]}: found {rule.found}; expected {rule.expected}" for rule in broken_rules(self)]
        if broken:
            raise ValueError("\n".join(broken))
        return self


SECTIONS: dict[str, type[Section]] = {**Recipe.__annotations__, "lora": LoraConfig}
"""Section name -> its class, in the order of the schema."""

SUBSECTIONS: dict[tuple[str, str], type[Section]] = {("data", "keep"): KeepConfig}
"""(section, key) -> class of a key whose value is null or keys of its own."""


def section_class(*names: str) -> type[Section]:
    """The class of a section (`data`), or of a key that has keys of its own (`data`, `keep`)."""
    return SUBSECTIONS[names[0], names[1]] if len(names) == 2 else SECTIONS[names[0]]
