"""The sections of a recipe: one class per section, one documented field per key.

Every name that counts something says over what: `global` is over all ranks and micro-batches, `per_rank` is on one
data-parallel rank. Rules that look at more than one key are in `schema.py`.
"""

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator

Count = Annotated[int, Field(ge=1)]
NumTokens = Annotated[int, Field(ge=2)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[Text, AfterValidator(os.path.expanduser)]
"""A path, or an id on the hub: `~` becomes the home folder."""
Name = Annotated[str, Field(pattern=r"^\w{1,64}$")]
"""Part of a metric's name."""


REMOVED = {
    ("probe", "decay"): (0, "the running mean over directions was removed after 0.6"),
    ("probe", "source"): (
        "batch",
        "the direction is always the gradient of a probe batch; the previous step's was removed after 0.6",
    ),
}
"""Keys of earlier versions: their default, and what became of them."""


def is_removed_default(section: str, key: str, value: Any) -> bool:
    """Whether a value is the default of a removed key."""
    return (section, key) in REMOVED and value == REMOVED[section, key][0]


class Section(BaseModel):
    """Base of all sections: refuses unknown keys and type conversions ("4" for 4, true for 1)."""

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

    @property
    def uses_utilities(self) -> bool:
        """Whether weights depend on utilities, and so on a probe direction."""
        return self.name == "vcore"

    @property
    def weights_sequences(self) -> bool:
        """Whether the sequences of a batch are weighted too, which takes all utilities before the first backward."""
        return self.uses_utilities and self.scope == "sequence_and_batch"

    @property
    def reads_reference(self) -> bool:
        """Whether weights depend on each sequence's log-probability under a reference model."""
        return self.name == "iw_sft"

    @property
    def drops_tokens(self) -> bool:
        """Whether some supervised tokens carry no loss."""
        return self.name == "random"


class UtilityConfig(Section):
    """How a token's utility s, the directional derivative of its loss along the probe gradient, is computed."""

    estimator: Literal["jvp", "finite_difference"] = "jvp"
    """`jvp` exact, by forward-mode differentiation; `finite_difference` (l(theta) - l(theta - eps*g)) / eps."""
    epsilon: Positive | Literal["auto"] | None = None
    """Step eps of the finite difference, in units of the probe direction; `auto` searches for the one that stands
    clearest of rounding and curvature; null with `jvp`."""
    fused: Literal["auto"] | bool = "auto"
    """With `jvp`, take utilities from the main forward itself, which saves one forward and one all-gather of the
    weights: `auto` or true wherever that is possible, and the run says why where it is not (dropout, model.attention
    other than auto); false in a separate JVP pass."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How the perturbed parameters of a finite difference become bf16: to the nearest value, or to either neighbour
    with the probability that makes it unbiased."""
    micro_batch_size_per_rank: Count | None = None
    """Sequences per rank in one gradient-free forward, a multiple of a number in batch.micro_batch_size_per_rank; null
    takes that key's value."""


class ProbeConfig(Section):
    """The probe batch B', whose gradient is the direction of the utilities; drawn by its own generator."""

    batch_size: Literal["all"] | Count = 4
    """|B'|, sequences over all ranks; `all` for the whole pool in data.probe_path."""
    loss: Literal["uniform", "dft"] = "uniform"
    """Token weights of the probe's loss: `uniform` (the paper), or `dft`, the tokens' probabilities, so that what the
    model finds unlikely, such as noise, does not steer."""
    direction: Literal["sgd", "adam"] = "sgd"
    """The update that utilities look along: `sgd` the probe gradient g; `adam` J g, with the diagonal Jacobian of
    Adam's update (appendix "Optimizer Scope and Robustness") at g. The first step has no optimizer state and uses g."""
    every: Count = 1
    """Optimizer steps for which one probe direction is used."""
    rank: Count | None = None
    """With `jvp` on all parameters, utilities look along an approximation of the direction: of each matrix a product of
    two with this many columns and rows, which saves the all-gather of the direction and most of the arithmetic of
    its tangents. The metric `direction_energy` is the share of the squared norm that is kept. Null takes the whole
    direction; so do vectors, and matrices that are no larger than the rank."""
    clip: Positive | None = None
    """Bound on the 2-norm of the probe gradient over all trainable parameters; null leaves it as it is. With direction
    adam it should be optimizer.gradient_clipping: the optimizer's moments are those of clipped gradients."""
    sequence_parallel: Literal["auto"] | Count = "auto"
    """Ulysses sequence-parallel size for B'; see batch.sequence_parallel."""
    micro_batch_size_per_rank: Count | None = None
    """Sequences per rank in one forward and backward of B'; null takes batch.micro_batch_size_per_rank. Fewer pad
    less."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed_keys(cls, values: Any) -> Any:
        """Drop removed keys with their defaults, which earlier versions wrote into recipe.yaml."""
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if not is_removed_default("probe", key, value)}
        return values


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
    """Tensor-parallel size: ranks, within a node, that divide the heads and columns of every layer; with
    model.provider megatron. For models whose layer, or whose longest sequence, does not fit on one rank: it is not
    faster."""
    expert: Count = 1
    """Expert-parallel size, for MoE models: neighbouring ranks that divide the experts of every layer, and send their
    tokens to each other instead of all-gathering the experts; a divisor of the ranks and of the experts of a layer.
    With model.provider huggingface."""


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
    such as [q_proj, v_proj], in which `all-linear` may be too. In an MoE model `experts` names the experts of all
    layers: [all-linear, experts]; dropout is then 0."""


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
    above: float | None = None
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
    with a loss `validation_loss_NAME`, names of letters, digits and underscores; null for none."""
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
    """Ulysses sequence-parallel size: ranks that divide the tokens of a pack; a divisor of the ranks and of the model's
    query heads. `auto` takes for each batch the number that makes the step shortest."""


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
    num_epochs: Positive | None = None
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
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the data order, the probe stream, dropout and the adapters."""
    log_every: Count = 1
    """Optimizer steps between two printed lines; metrics.jsonl has every step."""
    validate_every: Count | None = None
    """Optimizer steps between two validations; null validates before the first and after the last step only."""
    num_token_records: Annotated[int, Field(ge=0)] = 12
    """Optimizer steps whose tokens are recorded in tokens/, with loss, utility and weight, for `vcore-ds report`:
    spread evenly on a log scale, the first and the last among them; 0 for none. At most about 2 MB each."""
    num_followed_traces: Annotated[int, Field(ge=0, le=1000)] = 16
    """Traces that are measured at each of these steps, so that the same tokens can be followed over the run: half of
    them held out (data.validation_path), the rest training data, drawn by the seed; 0 for none. At each of these steps
    they cost three or four forwards of these traces, and a file of at most about 2 MB."""
    wandb_project: Text | None = None
    """Project on Weights & Biases that also gets the metrics; null for none. Where it cannot be reached, the run
    continues and keeps in its folder what it would have sent."""
    time_limit_minutes: Positive | None = None
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
    every_minutes: Positive | None = 30.0
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
    timeout_minutes: Positive = 30.0
    """Minutes that a collective may wait for the slowest rank before the run fails."""
    lost_rank_seconds: Annotated[float, Field(ge=5)] = 60.0
    """Seconds without a sign of life after which a rank counts as hung, and the run ends; at least ten minutes while
    models are loaded, which may silence a rank for long. A rank that dies is noticed at once."""
