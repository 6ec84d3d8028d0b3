"""The keys of a recipe: one class per section, one documented field per key.

Every name that counts something says over what: `global` is over all ranks and micro-batches, `per_rank` is on
one data-parallel rank. Rules that look at more than one key stand in `rules.py`.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from vcore_ds.config.rules import broken_rules

LARGEST_COUNT = 2**31 - 1
"""Upper bound of what is counted: sequences, steps, tokens, ranks."""

LARGEST_FLOAT = 3.0e38
"""Upper bound of a number that meets tensors: the largest one of bf16 and fp32 is 3.4e38."""

LARGEST_SEED = 2**32 - 1
"""Upper bound of a seed: step and rank are added to multiples of it, within the 64 bits of a generator's state."""

LARGEST_MINUTES = 1.0e6
"""Upper bound of a duration, about two years: a timer holds it."""

Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
NumTokens = Annotated[int, Field(ge=2, le=LARGEST_COUNT)]
Minutes = Annotated[float, Field(gt=0, le=LARGEST_MINUTES)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST_FLOAT)]
Positive = Annotated[float, Field(gt=0, le=LARGEST_FLOAT)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
"""Nearly every text is a path, which has no NUL and, on Linux, at most 4096 bytes."""


class Section(BaseModel):
    """A section: unknown keys and silent conversions ("4" for 4, true for 1) are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class MethodConfig(Section):
    """How tokens are weighted (paper, sections "Reweighting" and "Variance-Controlled Descent Scaling")."""

    name: Literal["vcore", "sft", "dft", "iw_sft", "random"] = "vcore"
    """`vcore` weights tokens by their utility; `sft` equally; `dft` by their probability; `iw_sft` sequences by the
    importance ratio of the model to its reference; `random` keeps a random share of the tokens."""
    normalization: Literal["sequence", "token"] = "sequence"
    """Weight of a sequence in the loss: `sequence` 1/|B| (the paper), `token` its share of the supervised tokens."""
    temperature: NonNegative | None = None
    """tau of the weights softmax(tau * s) within a sequence; 0 is uniform. It multiplies; it does not divide."""
    kl_budget: Positive | None = None
    """KL(weights || base measure) within each sequence, in nats; tau is solved for it. Free of the utilities' scale."""
    base_measure: Literal["uniform", "dft"] = "uniform"
    """What `vcore` tilts: b in b * exp(tau * s). `uniform` (the paper), or `dft`, the tokens' probabilities, which give
    little weight to tokens that the model finds unlikely."""
    scope: Literal["sequence", "sequence_and_batch"] = "sequence"
    """`sequence` weights the tokens of each sequence (the paper); `sequence_and_batch` also the sequences of a batch,
    by the utility of their weighted tokens: whole traces that raise the probe's loss lose weight."""
    batch_kl_budget: Positive | None = None
    """With scope `sequence_and_batch`, KL(sequence weights || those of `normalization`) over the batch, in nats."""
    alpha: Literal["loss_ratio", "variance", "effective_sample_size", "none"] = "loss_ratio"
    """Variance-control factor of `vcore`: `loss_ratio` uniform loss / weighted loss (Algorithm 1), `variance`
    sqrt(V_u / V_q) (Section "Variance-Controlled Descent Scaling"), `effective_sample_size` 1 / sqrt(n * sum q^2) per
    sequence, `none` 1."""
    alpha_scope: Literal["global_batch", "micro_batch"] = "global_batch"
    """One alpha for the step's global batch (the paper), or one for each micro-batch of each rank (released code)."""
    alpha_cap: Positive | None = 1.0
    """Upper bound of alpha; null removes it."""
    keep_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of a sequence's supervised tokens that `random` keeps; those inside \\boxed{} are always among them."""


class UtilityConfig(Section):
    """How a token's utility s, the directional derivative of its loss along the probe gradient, is computed."""

    estimator: Literal["jvp", "finite_difference"] = "jvp"
    """`jvp` exact, by forward-mode differentiation; `finite_difference` (l(theta) - l(theta - eps*g)) / eps."""
    epsilon: Positive | Literal["auto"] | None = None
    """Step eps of the finite difference, in units of the probe direction; `auto` searches for the one that stands
    clearest of rounding and curvature; null with `jvp`."""
    fused: Literal["auto"] | bool = "auto"
    """With `jvp`, take utilities from the main forward itself, which saves one forward and one gather of all weights:
    `auto` or true wherever that is possible, and the run says why where it is not (dropout, model.attention other than
    auto); false in a pass of their own."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How the perturbed parameters of a finite difference become bf16: to the nearest value, or to either neighbour
    with the probability that makes it unbiased."""
    micro_batch_size_per_rank: Count | None = None
    """Sequences per rank in one gradient-free forward, a multiple of a number in batch.micro_batch_size_per_rank; null
    takes that key's value."""


class ProbeConfig(Section):
    """The probe batch B', whose gradient is the direction of the utilities; drawn by its own generator."""

    source: Literal["batch", "previous_step"] = "batch"
    """`batch` the gradient of B', a pass of its own; `previous_step` the gradient that the optimizer consumed last,
    which costs no pass and sees no trusted data. The first step then has uniform weights."""
    batch_size: Literal["all"] | Count = 4
    """|B'|, sequences over all ranks; `all` for the whole pool in data.probe_path."""
    loss: Literal["uniform", "dft"] = "uniform"
    """Token weights of the probe's loss: `uniform` (the paper), or `dft`, the tokens' probabilities, so that what the
    model finds unlikely, such as noise, does not steer."""
    decay: Annotated[float, Field(ge=0, le=0.98)] = 0.0
    """Decay rate of a running mean over the directions of all probes, without bias: about 1 / (1 - decay) probe batches
    count. 0 takes the last one. Bounded, because the mean is kept in the parameters' precision."""
    direction: Literal["sgd", "adam"] = "sgd"
    """The update that utilities look along: `sgd` the probe gradient g; `adam` J g, with the diagonal Jacobian of
    Adam's update (appendix "Optimizer Scope and Robustness") at g. The first step has no optimizer state and uses g."""
    every: Count = 1
    """Optimizer steps for which one probe direction is used."""
    clip: Positive | None = None
    """Bound on the 2-norm of the probe gradient over all trainable parameters; null leaves it as it is. With direction
    adam it should be optimizer.gradient_clipping: the optimizer's moments are those of clipped gradients."""
    sequence_parallel: Literal["auto"] | Count = "auto"
    """Ranks that share a row of B'; see batch.sequence_parallel."""
    micro_batch_size_per_rank: Count | None = None
    """Sequences per rank in one forward and backward of B'; null takes batch.micro_batch_size_per_rank. Fewer pad
    less."""


class ModelConfig(Section):
    """The pretrained causal language model."""

    path: Text
    """Folder with a Hugging Face model (relative to the working directory), or its id on the hub."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Data type of the parameters in forward and backward; the master copy and the accumulated gradients are fp32."""
    provider: Literal["huggingface", "megatron"] = "huggingface"
    """Whose layers compute: `huggingface` any causal language model of transformers; `megatron` dense Qwen3, Qwen2,
    Llama and Mistral models in megatron-core's parallel layers, which several ranks can share (parallel.tensor)."""
    attention: Literal["auto", "sdpa", "flash_attention_2", "eager"] = "auto"
    """Attention of the passes with a gradient: `auto` the fused kernel of the device, without masks, on rows that ranks
    may share; the others are Hugging Face's kernels, for architectures whose attention cannot be replaced."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward: memory per token falls, a step takes about a third longer."""
    activation_offload: bool = False
    """Keep the activation checkpoints in host memory until the backward, for very long sequences."""


class ParallelConfig(Section):
    """How a model is divided over ranks, beyond ZeRO-3's shards and shared rows (batch.sequence_parallel)."""

    tensor: Literal[1, 2, 4, 8] = 1
    """Ranks that share every layer, each with a part of its heads and columns; with model.provider megatron. For models
    whose layer, or whose longest row, does not fit on one rank: it is not faster. Within a node."""


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
    """`all-linear` (every linear layer but the output head), or a list of module names such as [q_proj, v_proj]."""


class DataConfig(Section):
    """The data: each path a token store (`vcore-ds prepare`), or conversations: a .jsonl, .json or .parquet file, a
    folder of them, a pattern, or a hub id; rows of {"messages": [{"role", "content"}, ...]}, ShareGPT or Alpaca.
    Conversations are converted to a store first, once."""

    train_path: Text
    """Training data; a relative path is relative to the working directory."""
    validation_path: Text | None = None
    """Held-out conversations for the loss before, during and after the run; null for none."""
    probe_path: Text | None = None
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
    reference_log_probabilities: Text | None = None
    """For iw_sft with all parameters trained: the file that `vcore-ds reference` computed from the training data."""


class BatchConfig(Section):
    """The main batch B."""

    global_size: Count = 32
    """|B|, sequences per optimizer step over all ranks and micro-batches."""
    micro_batch_size_per_rank: Literal["auto"] | Count = "auto"
    """Sequences per rank in one forward and backward. `auto` sorts each batch by length and lets short sequences share
    a micro-batch where the predicted step is shorter for it, within the tokens of the batch's longest sequence (or
    1,024); with packed rows, or method.alpha_scope micro_batch, it is 1."""
    packed_row_tokens: NumTokens | None = None
    """Pack sequences into rows of about equal cost, a row in one forward and backward, without padding: most tokens of
    a row on each of the ranks that share it; null gives every sequence a row of its own."""
    sequence_parallel: Literal["auto"] | Count = "auto"
    """Ranks that share a row, each with a part of its tokens; a divisor of the ranks and of the model's query heads.
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

    output_dir: Text
    """The run's folder; a relative path is relative to the working directory. A stopped run there is resumed; any other
    one is never overwritten."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 42
    """Seed of the data order, the probe stream, dropout and the adapters."""
    log_every: Count = 1
    """Optimizer steps between two printed lines; metrics.jsonl has every step."""
    validate_every: Count | None = None
    """Optimizer steps between two validations; null validates before the first and after the last step only."""
    wandb_project: Text | None = None
    """Project on Weights & Biases that also gets the metrics; null for none. Where it cannot be reached, the run
    continues and keeps in its folder what it would have sent."""
    time_limit_minutes: Minutes | None = None
    """Wall clock from the start of the processes: the run saves and stops (exit code 85) so early that one more step
    and the save would have fitted; null for no limit."""


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
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    engine: EngineConfig

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [f"{rule.keys[0]}: found {rule.found}; expected {rule.expected}" for rule in broken_rules(self)]
        if broken:
            raise ValueError("\n".join(broken))
        return self


SECTIONS: dict[str, type[Section]] = {
    "method": MethodConfig,
    "utility": UtilityConfig,
    "probe": ProbeConfig,
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "lora": LoraConfig,
    "data": DataConfig,
    "batch": BatchConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "run": RunConfig,
    "checkpoint": CheckpointConfig,
    "engine": EngineConfig,
}
"""Section name -> its class, in the order of the schema; lora's is inside `LoraConfig | None`."""
