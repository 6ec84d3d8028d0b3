"""The sections of a recipe that say how tokens are weighted: `method`, `utility` and `probe`."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vcore_ds.config.fields import Count, NonNegative, Positive, Section


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
    """With `jvp`, take utilities from the main forward itself, which saves one forward and one gather of all weights:
    `auto` or true wherever that is possible, and the run says why where it is not (dropout, model.attention other than
    auto); false in a pass of their own."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How the perturbed parameters of a finite difference become bf16: to the nearest value, or to either neighbour
    with the probability that makes it unbiased."""
    micro_batch_size_per_rank: Count | None = None
    """Sequences per rank in one gradient-free forward, a multiple of a number in batch.micro_batch_size_per_rank; null
    takes that key's value."""


_REMOVED_DEFAULTS = (("decay", 0), ("source", "batch"))
"""Of `probe`, in version 0.6 and before."""


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
    """Degree of Ulysses sequence parallelism of B'; see batch.sequence_parallel."""
    micro_batch_size_per_rank: Count | None = None
    """Sequences per rank in one forward and backward of B'; null takes batch.micro_batch_size_per_rank. Fewer pad
    less."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed_keys(cls, values: Any) -> Any:
        """Runs of earlier versions wrote the defaults of keys that are gone into their recipe.yaml, which `report` and
        a resume still read; other values are refused."""
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if (key, value) not in _REMOVED_DEFAULTS}
        return values
