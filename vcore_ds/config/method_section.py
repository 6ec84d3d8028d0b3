"""The section `method` of a recipe: how tokens are weighted."""

from typing import Annotated, Literal

from pydantic import Field

from vcore_ds.config.sections import NonNegative, Positive, Section


class MethodConfig(Section):
    """How tokens are weighted (paper, sections "Reweighting" and "Variance-Controlled Descent Scaling")."""

    name: Literal["vcore", "sft", "dft", "asft", "eaft", "deft", "profit", "iw_sft", "random", "stored"] = "vcore"
    """`vcore` weights tokens by their utility, `sft` equally, `dft` by their probability; `asft` is `dft` plus the KL
    divergence from the base model; `eaft` weights tokens by the entropy of the prediction, `deft` by their probability
    to the power of the prediction's concentration; `profit` drops unlikely tokens; `iw_sft` weights sequences by the
    importance ratio of the model to its reference; `random` trains on a random share of the tokens; `stored` takes the
    weights of data.token_weights."""
    normalization: Literal["sequence", "token"] = "sequence"
    """Weight of a sequence in the loss: `sequence` 1/|B| (the paper), `token` its share of the supervised tokens."""
    temperature: NonNegative | None = None
    """tau of the weights softmax(tau * s) within each sequence, a factor and not a divisor; 0 is uniform."""
    kl_budget: Positive | None = None
    """KL(weights || base measure) of each sequence in nats, for which tau is solved; independent of the utilities'
    scale. 0.005 (presets/recommended.yaml) changes the weight of a typical token by a tenth and is as good as SFT
    wherever it was tried; with a probe from the training data larger budgets do more harm the larger they are. With
    trusted traces in data.probe_path: 0.5 (presets/trusted.yaml); 0.05 is even with that on random noise and worse on
    systematic noise."""
    base_measure: Literal["uniform", "dft"] = "uniform"
    """Base measure b of the weights b * exp(tau * s) of `vcore`: `uniform` (the paper), or `dft`, the tokens'
    probabilities, which give little weight to tokens that the model finds unlikely."""
    scope: Literal["sequence", "sequence_and_batch"] = "sequence"
    """`sequence` weights the tokens of each sequence (the paper); `sequence_and_batch` also weights the sequences of a
    batch by their weighted utility, so that traces that raise the probe's loss lose weight."""
    batch_kl_budget: Positive | None = None
    """With scope `sequence_and_batch`: KL(sequence weights || weights of `normalization`) over the batch, in nats."""
    alpha: Literal["loss_ratio", "variance", "effective_sample_size", "none"] = "loss_ratio"
    """Variance-control factor of `vcore`: `loss_ratio` uniform loss / weighted loss (Algorithm 1), `variance`
    sqrt(V_u / V_q) (Section "Variance-Controlled Descent Scaling"), `effective_sample_size` 1 / sqrt(n * sum q^2) per
    sequence, `none` 1."""
    alpha_scope: Literal["global_batch", "micro_batch"] = "global_batch"
    """One alpha for the step's global batch (the paper), or one for each micro-batch of each rank (released code)."""
    alpha_cap: Positive | None = 1.0
    """Upper bound of alpha; null for none."""
    keep_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of a sequence's supervised tokens that `random` keeps, always including those inside \\boxed{}."""

    kl_weight: Positive = 0.1
    """Factor of the KL divergence in the loss of `asft`."""
    min_probability: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """`profit` trains on the tokens that the current model gives at least this probability."""

    @property
    def uses_utilities(self) -> bool:
        """Whether weights depend on utilities, and so on a probe direction."""
        return self.name == "vcore"

    @property
    def weights_sequences(self) -> bool:
        """Whether sequences of a batch are weighted too, which needs all utilities before the first backward."""
        return self.uses_utilities and self.scope == "sequence_and_batch"

    @property
    def reads_reference(self) -> bool:
        """Whether weights depend on each sequence's log-probability under a reference model."""
        return self.name == "iw_sft"

    @property
    def is_anchored(self) -> bool:
        """Whether the loss has the KL divergence from the base model."""
        return self.name == "asft"

    @property
    def prediction_statistic(self) -> Literal["top_entropy", "concentration"] | None:
        """Quantity of each prediction that the weights use, besides the probability of its target."""
        return {"eaft": "top_entropy", "deft": "concentration"}.get(self.name)  # type: ignore[return-value]

    @property
    def drops_tokens(self) -> bool:
        """Whether some supervised tokens have no loss by a mask of the data."""
        return self.name == "random"
