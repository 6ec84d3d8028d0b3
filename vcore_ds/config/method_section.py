"""The section `method` of a recipe: how tokens are weighted; and the function of `custom`, which is read, not run."""

import ast
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, Strict, model_validator

from vcore_ds.common.paths import expand_home
from vcore_ds.config.sections import Name, NonNegative, Positive, Section, Text

FunctionInput = Literal[
    "losses", "probabilities", "entropies", "utilities", "sequence_index", "num_sequences", "positions"
]
"""A parameter of `method.function` that is filled with the tokens of a micro-batch (docs/custom-weighting.md)."""


class MethodConfig(Section):
    """How tokens are weighted (paper, sections "Reweighting" and "Variance-Controlled Descent Scaling")."""

    name: Literal["vcore", "sft", "dft", "asft", "eaft", "deft", "profit", "iw_sft", "random", "stored", "custom"] = (
        "vcore"
    )
    """`vcore` weights tokens by their utility, `sft` equally, `dft` by their probability; `asft` is `dft` plus the KL
    divergence from the base model; `eaft` weights tokens by the entropy of the prediction, `deft` by their probability
    to the power of the prediction's concentration; `profit` drops unlikely tokens; `iw_sft` weights sequences by the
    importance ratio of the model to its reference; `random` trains on a random share of the tokens; `stored` takes the
    weights of data.token_weights; `custom` calls `function`."""
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
    """Variance-control factor of `vcore` and `custom`: `loss_ratio` uniform loss / weighted loss (Algorithm 1),
    `variance` sqrt(V_u / V_q) (Section "Variance-Controlled Descent Scaling"), `effective_sample_size`
    1 / sqrt(n * sum q^2) per sequence, `none` 1, the default of `custom`."""
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
    function: Text | None = None
    """The function of `custom` (docs/custom-weighting.md), MODULE:FUNCTION or FILE.py:FUNCTION, looked up in the folder
    of the file that names it, the working directory and the Python path. In a resolved recipe the path is absolute."""
    options: dict[Name, bool | int | float | Text] = {}  # noqa: RUF012  (pydantic copies it)
    """Further arguments of `function`, such as {gamma: 2}."""
    function_inputs: Annotated[tuple[FunctionInput, ...], Strict(False)] = ()
    """The parameters of `function` that are filled with tokens. Set when a recipe is loaded."""
    function_digest: Text | None = None
    """SHA-256 of the name of `function` and its file, which a resumed run must share. Set when a recipe is loaded."""

    @model_validator(mode="before")
    @classmethod
    def _take_custom_factors_as_they_are(cls, values: Any) -> Any:
        is_custom = isinstance(values, dict) and values.get("name") == "custom"
        return {"alpha": "none", **values} if is_custom else values

    @property
    def title(self) -> str:
        """The method in words: `sft`, or `custom (my_weights.py:focal, gamma 2)`."""
        parts = [Path(self.function or "").name, *(f"{key} {value}" for key, value in self.options.items())]
        return f"custom ({', '.join(parts)})" if self.name == "custom" else self.name

    @property
    def uses_utilities(self) -> bool:
        """Whether weights depend on utilities, and so on a probe direction."""
        return self.name == "vcore" or (self.name == "custom" and "utilities" in self.function_inputs)

    @property
    def applied_alpha(self) -> str:
        """`alpha`, but `none` for methods that ignore it."""
        return self.alpha if self.name in ("vcore", "custom") else "none"

    @property
    def weights_sequences(self) -> bool:
        """Whether sequences of a batch are weighted too, which needs all utilities before the first backward."""
        return self.name == "vcore" and self.scope == "sequence_and_batch"

    @property
    def reads_reference(self) -> bool:
        """Whether weights depend on each sequence's log-probability under a reference model."""
        return self.name == "iw_sft"

    @property
    def is_anchored(self) -> bool:
        """Whether the loss has the KL divergence from the base model."""
        return self.name == "asft"

    @property
    def prediction_statistic(self) -> Literal["top_entropy", "concentration", "entropy"] | None:
        """Quantity of each prediction that the weights use, besides the probability of its target."""
        if self.name == "custom" and "entropies" in self.function_inputs:
            return "entropy"
        return {"eaft": "top_entropy", "deft": "concentration"}.get(self.name)  # type: ignore[return-value]

    @property
    def drops_tokens(self) -> bool:
        """Whether some supervised tokens have no loss by a mask of the data."""
        return self.name == "random"


def read_function(written: str, options: Mapping[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """Read the function that `method.function` names; return the values of `function`, `function_inputs` and
    `function_digest`. `folders` come before the Python path; a file that has moved may be in the first of them, where
    a run keeps it. Raises ValueError(key, found, expected, names that may be meant)."""
    key, (module, _, name) = "method.function", written.rpartition(":")
    relative = expand_home(module) if module.endswith(".py") else Path(f"{module.replace('.', '/')}.py")
    places = [*(folder / relative for folder in (*folders, *map(Path, sys.path))), folders[0] / relative.name]
    file = next((path.resolve() for path in places if os.path.isfile(path)), None)
    if file is None:
        raise ValueError(key, written, f"MODULE:FUNCTION or FILE.py:FUNCTION, found in {folders[0]} or sys.path", ())
    try:
        source = file.read_bytes()
        body = ast.parse(source).body
    except OSError as error:
        raise ValueError(key, written, f"{file} to be readable ({error.strerror})", ()) from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # null bytes, too deeply nested
        place, problem = (error.lineno or 1, error.msg) if isinstance(error, SyntaxError) else (1, str(error))
        raise ValueError(key, written, f"Python in {file}:{place} ({problem})", ()) from None
    functions = {node.name: node.args for node in body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        raise ValueError(key, name, f"a function that {file} defines", functions)
    arguments, known = functions[name], get_args(FunctionInput)
    defaults = [*[None] * (len(arguments.args) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    parameters = dict(zip([x.arg for x in (*arguments.args, *arguments.kwonlyargs)], defaults, strict=False))
    unknown = [name for name, default in parameters.items() if not default and name not in {*known, *options}]
    unknown += [x.arg for x in (*arguments.posonlyargs, arguments.vararg, arguments.kwarg) if x]
    if unknown:
        expected = f"its value in method.options, or a parameter among {', '.join(known)}"
        raise ValueError(key, f"the parameter {unknown[0]}", expected, known)
    accepted = [name for name in parameters if name not in known]
    if foreign := [option for option in options if option not in accepted]:
        raise ValueError(
            "method.options", foreign[0], f"parameters of {name}: {', '.join(accepted) or 'none'}", accepted
        )
    inputs = [name for name in parameters if name in known]
    digest = hashlib.sha256(name.encode() + b"\0" + source).hexdigest()
    return {"function": f"{file}:{name}", "function_inputs": inputs, "function_digest": digest}
