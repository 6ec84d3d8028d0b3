"""The sections of a recipe: one class per section, one documented field per key.

Names of counts say over what they count: `global` over all ranks and micro-batches, `per_rank` on one data-parallel
rank. The sections `method` and `data` are in `method_section.py` and `data_section.py`, rules over several keys in
`schema.py`.
"""

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict

Count = Annotated[int, Field(ge=1)]
NumTokens = Annotated[int, Field(ge=2)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


def _expand_home(path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.split("/")[0] == "~":
        raise ValueError("no home folder")  # a folder called ~ would be made
    return expanded


PathText = Annotated[Text, AfterValidator(_expand_home)]
"""A path with `~` expanded, or an id on the hub."""
Name = Annotated[str, Field(pattern=r"^\w{1,64}$")]
"""A part of a metric's name."""


class Section(BaseModel):
    """Base of all sections: refuses unknown keys and type conversions ("4" for 4, true for 1)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
    )

    @classmethod
    def key_names(cls) -> list[str]:
        """The keys of the section, as recipes have them."""
        return [field.alias or name for name, field in cls.model_fields.items()]


class UtilityConfig(Section):
    """How a token's utility s, the directional derivative of its loss along the probe gradient, is computed."""

    estimator: Literal["jvp", "finite_difference"] = "jvp"
    """`jvp`: exact, by forward-mode differentiation; `finite_difference`: (l(theta) - l(theta - eps*g)) / eps."""
    epsilon: Positive | Literal["auto"] | None = None
    """Step eps of the finite difference, in units of the probe direction; `auto` searches for the value least affected
    by rounding and curvature; null with `jvp`."""
    fused: Literal["auto"] | bool = "auto"
    """With `jvp`, compute utilities in the main forward, which saves one forward and one all-gather of the weights.
    `auto` and true do so where possible; otherwise the run prints the reason (dropout, model.attention other than
    auto). false uses a separate JVP pass."""
    tangent_precision: Literal["fp8"] | None = None
    """With `jvp` in bf16: `fp8` multiplies the tangents of activations by the weights of a layer in FP8 (e4m3, a scale
    for each row), which GPUs from Hopper on do twice as fast; rounding takes time too, so that short packs gain
    nothing (`vcore-ds plan` counts both). Values, direction, experts and head stay in bf16. null for the precision of
    the model."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding to bf16 of the parameters perturbed by a finite difference: to the nearest value, or stochastically,
    which is unbiased."""
    micro_batch_size_per_rank: Count | None = None
    """Sequences per rank in one gradient-free forward, a multiple of a number in batch.micro_batch_size_per_rank; null
    for that key's value."""


class ProbeConfig(Section):
    """The probe batch B', whose gradient gives the direction of the utilities; drawn by a separate generator. Only
    `vcore` has one: merge methods/sft.yaml, or another method's file, to train without."""

    batch_size: Literal["all"] | Count = 4
    """|B'|, sequences over all ranks; `all` for the complete pool in data.probe_path. Larger batches have less noise,
    above all with direction adam, and cost more: beside a batch of 32, a step with 4 takes 1.8 times as long as that of
    SFT, with 32 (the paper's number, and the presets') 2.7 times. Of a pool of 64, 16 come close to `all`, and 4 are
    worse. From 256 ranks on, 4 leave ranks idle."""
    loss: Literal["uniform", "dft"] = "uniform"
    """Token weights of the probe's loss: `uniform` (the paper), or `dft`, the tokens' probabilities, so that tokens
    that the model finds unlikely, such as noise, have little influence."""
    direction: Literal["sgd", "adam", "muon"] = "sgd"
    """The probe direction: `sgd` the probe gradient g; `adam` J g, with the diagonal Jacobian J of Adam's update
    (appendix "Optimizer Scope and Robustness") at g; `muon` the same for Muon, transposed: J^T g. The first step has no
    optimizer state and uses g."""
    every: Count = 1
    """Optimizer steps for which one probe direction is used."""
    rank: Count | None = None
    """With `jvp` on all parameters: approximate each matrix of the probe direction by one of this rank, which saves the
    all-gather of the direction, the memory of its shard and most FLOPs of the tangents. The metric `direction_energy`
    is the share of the squared norm that is kept. null for the exact direction, which is also used for vectors and for
    matrices not larger than the rank."""
    rank_passes: Count = 1
    """Passes of subspace iteration that compute the approximations of `rank`. Each further one costs as much as the
    first and keeps more."""
    clip: Positive | None = None
    """Upper bound of the probe gradient's 2-norm over all trainable parameters; null for none. With direction adam,
    use the value of optimizer.gradient_clipping: the optimizer's moments are those of clipped gradients."""
    sequence_parallel: Literal["auto"] | Count = "auto"
    """Ulysses sequence-parallel size for B'; see batch.sequence_parallel."""
    micro_batch_size_per_rank: Count | None = None
    """Sequences per rank in one forward and backward of B'; null for batch.micro_batch_size_per_rank. Fewer sequences
    need less padding."""


class ModelConfig(Section):
    """The pretrained causal language model."""

    path: PathText
    """Folder with a Hugging Face model (relative to the working directory), its id on the hub, or a run or checkpoint
    (docs/recipes.md)."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Data type of the parameters in forward and backward; the master copy and the accumulated gradients are fp32."""
    provider: Literal["huggingface", "megatron"] = "huggingface"
    """Implementation of the layers: `huggingface` for any causal language model of transformers; `megatron` for dense
    Qwen3, Qwen2, Llama and Mistral models in megatron-core's tensor-parallel layers (parallel.tensor)."""
    attention: Literal["auto", "sdpa", "flash_attention_2", "eager"] = "auto"
    """Attention of the passes with a gradient: `auto` uses the device's fused kernel, without masks, and allows Ulysses
    sequence parallelism; the others are Hugging Face's implementations, for architectures whose attention cannot be
    replaced."""
    gradient_checkpointing: bool | Literal["auto"] = False
    """Recompute activations in the backward: less memory per token, steps about a third longer. `auto` recomputes only
    those for which memory does not suffice by the estimate."""
    activation_offload: bool = False
    """Keep activation checkpoints in host memory until the backward, for very long sequences."""


class ParallelConfig(Section):
    """Tensor and expert parallelism. ZeRO-3 is always on; for sequence parallelism see batch.sequence_parallel."""

    tensor: Literal[1, 2, 4, 8] = 1
    """Tensor-parallel size, with model.provider megatron: ranks within a node that share the heads and columns of every
    layer. For models of which a layer, or the longest sequence, does not fit on one rank; it is not faster."""
    expert: Count = 1
    """Expert-parallel size of MoE models, with model.provider huggingface: adjacent ranks that share the experts of
    every layer, and exchange tokens instead of all-gathering experts. A divisor of the ranks and of the experts per
    layer."""


class LoraConfig(Section):
    """Low-rank adapters; `lora: null` trains all parameters."""

    adapter: PathText | None = None
    """Go on training an adapter of the model in model.path: a LoRA run, its checkpoint, or a folder in peft's format.
    rank, alpha and target_modules are those of the adapter, and may be left out. null for a new one."""
    rank: Count
    """Rank r of every adapter."""
    alpha: Positive
    """Adapters are scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability on the adapters' input."""
    target_modules: Literal["all-linear"] | Annotated[tuple[Text, ...], Strict(False), Field(min_length=1)] = (
        "all-linear"
    )
    """`all-linear` (all linear layers except the output head, routers and experts), or a list of layer names such as
    [q_proj, v_proj], which may include `all-linear`. In an MoE model `experts` adds the experts of all layers,
    [all-linear, experts], which needs dropout 0."""


class BatchConfig(Section):
    """The main batch B."""

    global_size: Count = 32
    """|B|, sequences per optimizer step over all ranks and micro-batches."""
    micro_batch_size_per_rank: Literal["auto"] | Count = "auto"
    """Unpacked sequences per rank in one forward and backward. `auto` packs short sequences into packs of about equal
    cost, with at most the tokens of the batch's longest sequence (or 1,024); if the model or its attention rules
    packing out, sequences of similar length share a micro-batch. With pack_tokens_per_rank, or method.alpha_scope
    micro_batch, it is 1."""
    pack_tokens_per_rank: NumTokens | None = None
    """Pack sequences into packs of about equal cost, one in each forward and backward, without padding: the maximum
    tokens of a pack on each rank. null leaves packing to micro_batch_size_per_rank."""
    sequence_parallel: Literal["auto"] | Count = "auto"
    """Ulysses sequence-parallel size: ranks that share the tokens of a pack; a divisor of the ranks and of the model's
    query heads. `auto` chooses the fastest size for each batch."""


class OptimizerConfig(Section):
    """The optimizer over the trainable parameters."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """`adamw`; `sgd` without momentum; or `muon`, which updates the weight matrices of the decoder layers by Muon and
    everything else by AdamW. Muon's update is scaled to the size of AdamW's (arXiv 2502.16982), so learning rate and
    weight decay are those of AdamW. Only without adapters."""
    learning_rate: Positive
    """Peak learning rate, reached after the warm-up."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: Positive = 1e-8
    """AdamW's term in the denominator."""
    momentum: Beta = 0.95
    """Muon's decay rate of the momentum, with Nesterov's rule."""
    weight_decay: NonNegative = 0.0
    """Weight decay (decoupled for AdamW and Muon), multiplied by the learning rate in each step. Parameters with fewer
    than two dimensions, such as norms and biases, have none."""
    gradient_clipping: Positive | None = 1.0
    """Upper bound of the gradient's 2-norm over all trainable parameters and ranks; null for none."""


class ScheduleConfig(Section):
    """Length of the run, and its learning rate schedule."""

    num_steps: Count | None = None
    """Optimizer steps; or give num_epochs."""
    num_epochs: Positive | None = None
    """Passes over the training data; or give num_steps."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the steps during which the learning rate rises linearly from 0."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Number of these steps, instead of warmup_ratio: for runs that are extended or branched; null for warmup_ratio."""
    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warm-up: `cosine` or `linear` decay to the last step, `constant`, or `wsd` (warm-up, stable, decay):
    constant, then a linear decay over the last decay_ratio of the steps. Runs with `constant` and `wsd` can be
    extended, and decays branch off from them."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the steps in the decay of `wsd`."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate that a decay leads to, as a share of the peak."""


class ProfileConfig(Section):
    """Profile single optimizer steps; nothing else changes, and the other steps cost nothing."""

    steps: Annotated[tuple[Count, ...], Strict(False), Field(min_length=1)]
    """Optimizer steps, from 1, such as [3, 5]; the first steps allocate and compile."""
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Strict(False), Field(min_length=1)] = (0,)
    """Ranks that write profiles."""
    memory_snapshot: bool = False
    """Also record the allocations of these steps, for pytorch.org/memory_viz; on GPUs only."""


class RunConfig(Section):
    """The run: its folder, seed, output and time limit."""

    output_dir: PathText
    """The run's folder, relative to the working directory. A stopped run in it is resumed; other runs are never
    overwritten."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the data order, the probe batches, dropout and the initial adapters."""
    log_every: Count = 1
    """Optimizer steps between printed lines; metrics.jsonl has every step."""
    validate_every: Count | Literal["auto"] | None = "auto"
    """Optimizer steps between measurements of the held-out loss, besides those before the first and after the last
    step; `auto` for a tenth of the run, null for none (`vcore-ds plan` says what they cost)."""
    num_token_records: Annotated[int, Field(ge=0)] = 12
    """Number of optimizer steps whose tokens are recorded in tokens/ with loss, utility and weight, for `vcore-ds
    report`: evenly spaced on a log scale, from the first to the last step; 0 for none. At most about 2 MB each."""
    num_followed_traces: Annotated[int, Field(ge=0, le=1000)] = 16
    """Number of traces that are also measured at each recorded step, to follow the same tokens over the run: half of
    them held out (data.validation_path), the others training data, drawn by the seed; 0 for none. Costs three or four
    forwards of these traces and at most about 2 MB at each of these steps."""
    profile: ProfileConfig | None = None
    """Write PyTorch profiler traces of single steps into profile/; null for none."""
    time_limit_minutes: Positive | None = None
    """Wall-clock limit from the start of the processes: the run saves and stops (exit code 85) while one more step and
    a save would still fit; null for none."""

    def validates(self, step: int, num_steps: int) -> bool:
        """Whether the held-out loss, if there is one, is measured after this step, from 1."""
        every = -(-num_steps // 10) if self.validate_every == "auto" else self.validate_every
        return step == num_steps or (every is not None and step % every == 0)


TrackerName = Literal["wandb", "tensorboard", "mlflow", "trackio", "swanlab"]


class TrackConfig(Section):
    """Experiment trackers that also receive the lines of metrics.jsonl. A tracker that fails or hangs only causes a
    warning."""

    trackers: Annotated[tuple[TrackerName, ...], Strict(False)] = ()
    """Trackers such as [wandb, tensorboard], configured by their environment variables; all but wandb (Weights &
    Biases) must be installed. TensorBoard's events, and what could not be sent to Weights & Biases, are in the run's
    folder."""
    project: Text = "vcore_ds"
    """Project at these trackers (the experiment in MLflow); TensorBoard has none."""
    group: Text | None = None
    """Group name shared by the runs of an experiment; null for none."""
    tags: Annotated[tuple[Text, ...], Strict(False)] = ()
    """Tags of the run; Trackio has none."""


class CheckpointConfig(Section):
    """Checkpoints, from which stopped runs are resumed; one is always written after the last step."""

    resume: Literal["auto", "never"] = "auto"
    """`auto` resumes the run in run.output_dir from its newest valid checkpoint; `never` requires a new folder."""
    every_steps: Count | None = None
    """Optimizer steps between checkpoints; null for no such interval."""
    every_minutes: Positive | None = 30.0
    """Minutes from the end of one checkpoint to the start of the next; null for no such interval."""
    keep_last: Count = 2
    """Number of newest checkpoints to keep; older ones are deleted once a new one is complete."""
    keep_every_steps: Count | None = None
    """Keep the checkpoints of every multiple of this many optimizer steps permanently; null for none."""
    keep_best: Count | None = None
    """Number of checkpoints with the lowest held-out loss to keep besides the newest, among those of steps that
    run.validate_every evaluates; several held-out sets count by their mean. null for none."""
    async_: Annotated[bool, Field(alias="async")] = False
    """Copy the state to host memory, and write the checkpoint from there while the next steps run: the run waits for
    the copy alone. Takes the size of a rank's part of the checkpoint in host memory (`vcore-ds plan`)."""
    branch_from: PathText | None = None
    """A checkpoint of another run (RUN/checkpoints/step_NNNNNNNN), from which this run begins instead of the first
    step. The recipes may differ in `schedule`, as long as the learning rates up to there are the same; null for
    none."""


class EngineConfig(Section):
    """DeepSpeed, memory check and timeouts."""

    deepspeed_config: Text
    """DeepSpeed JSON (ZeRO-3), looked up in the folder of the file that names it, the working directory, and among the
    shipped ones. In a resolved recipe it is `ds_configs/NAME.json` for a shipped one, or an absolute path."""
    coalesce_gradient_reduction: Literal["auto"] | bool = "auto"
    """Reduce gradients once per step instead of once per micro-batch. Needs unsharded gradients on every rank: 4 bytes
    per trained parameter, 6 in bf16. `auto` does so if they take at most 5% of a rank's memory."""
    memory_check: bool = True
    """Stop before loading the model if an estimate says that it does not fit into memory; false starts anyway."""
    timeout_minutes: Positive = 30.0
    """Minutes that a collective may wait for the slowest rank before the run fails."""
    lost_rank_seconds: Annotated[float, Field(ge=5)] = 60.0
    """Seconds without a heartbeat after which a rank counts as hung and the run ends; at least ten minutes while models
    are loaded. A rank that dies is noticed at once."""
