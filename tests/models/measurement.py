"""Measurements of a tiny model in the package against plain transformers; called through `run_ranks`."""

import re
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.utils import SAFE_WEIGHTS_NAME as SAFETENSORS

import vcore_ds
from tests.helpers import step_runs, tiny
from tests.models import families
from tests.models.reference import Expected, Text, compute_expected, compute_gradient, load_plain_model
from vcore_ds.common.errors import UserError
from vcore_ds.config.schema import Recipe
from vcore_ds.data.batches import Batch, idle_batch, pack
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.engine.flat_shards import iterate_chunks
from vcore_ds.engine.zero3 import Engine, build_optimizer
from vcore_ds.models.architecture_check import check_architecture
from vcore_ds.models.causal_lm import prepare_for_training
from vcore_ds.models.description import read_model
from vcore_ds.models.lora import add_lora
from vcore_ds.models.megatron.model import transformer_config
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training.setup import build_estimator, load_model
from vcore_ds.training.start_checks import check_derivatives, check_start
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import FiniteDifference, ForwardMode, why_not_fused

BOUND = 1e-5
"""Largest relative error in fp32 of a model that counts as right."""

MIN_RANK_CORRELATION = 0.99
"""Smallest Spearman correlation of finite differences that counts as right."""

LONGEST = 24
"""Number of tokens of the longest sequence."""


@dataclass
class ModelResult:
    """Results of one model."""

    name: str
    architecture: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    """Messages by requested feature, raised before weights are read or by the checks at the start."""
    late: dict[str, str] = field(default_factory=dict)
    """Messages that were raised later."""
    errors: dict[str, str] = field(default_factory=dict)
    """Last lines of tracebacks."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Relative errors in fp32; rank correlations where the name ends in `rank`."""
    packing: str | None = None
    sequence_parallelism: str | None = None
    """Reason why it is not possible, as for packing; None where it is."""
    tensor_parallelism: bool = False
    is_alone: bool = False
    """Whether each sequence has a separate forward."""

    def beyond_bounds(self) -> dict[str, float]:
        """Numbers in fp32 beyond the bounds. Some architectures lose more than `BOUND` to rounding in transformers' own
        fp32, so three times that error is allowed."""
        bound = max(BOUND, 3 * self.numbers.get("plain fp32 gradient", 0.0))

        def is_beyond(name: str, value: float) -> bool:
            return not (value >= MIN_RANK_CORRELATION if name.endswith("rank") else value <= bound)

        ours = {name: value for name, value in self.numbers.items() if not name.startswith("plain")}
        return {name: value for name, value in ours.items() if is_beyond(name, value)}

    @property
    def verdict(self) -> str:
        """`right`, `WRONG`, `refused` (before weights are read or before the first step), or `not built` where no tiny
        model can be made."""
        if "build" in self.errors:
            return "not built"
        if {"sft", "start"} & self.refused.keys():
            return "refused"
        # Optional features are refused when the model is built, or in the first step.
        refused_late = self.late.keys() - {"lora", "fused, checkpointed"}
        return "WRONG" if self.errors or refused_late or self.beyond_bounds() else "right"

    @property
    def worst(self) -> float:
        """Largest relative error in fp32."""
        errors = [x for n, x in self.numbers.items() if not n.startswith("plain") and not n.endswith("rank")]
        return max(errors, default=float("nan"))


def draw_texts(num: int, seed: int, longest: int = LONGEST) -> list[Text]:
    """Draw random sequences of different lengths, with special tokens in their prompts and at their ends."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [longest - 7 * (index % 3) for index in range(num)]
    draw = [torch.randint(families.FIRST_TOKEN, families.END_TOKEN, (n,), generator=generator) for n in lengths]
    for tokens in draw:
        tokens[:3] = torch.tensor([families.START, families.PADDING, families.END])
        tokens[-1] = families.PADDING
    return [Text(tokens, 4 + index) for index, tokens in enumerate(draw)]


def make_local_batches(
    given: Sequence[Text], *, packed: bool = False, alone: bool = False, sequence_parallel: int = 1
) -> list[Batch]:
    """Make this rank's batches of every `world size`-th sequence: unpacked, one pack, or one per batch."""
    rank, size = layout.rank("data", sequence_parallel), layout.size("data", sequence_parallel)
    sequences = [as_sequence(i, text) for i, text in enumerate(given) if i % size == rank]
    if alone:
        batches = [pack([[one]], 0, sequence_parallel) for one in sequences]
        return batches + [idle_batch(0, sequence_parallel)] * (-(-len(given) // size) - len(batches))
    return [pack([sequences] if packed else [[one] for one in sequences], 0, sequence_parallel)]


def as_sequence(number: int, text: Text) -> TokenizedSequence:
    return TokenizedSequence(number, text.tokens.int().numpy(), np.arange(len(text.tokens)) >= text.prompt)


def join_by_sequence(batches: Sequence[Batch], values: Sequence[Tensor]) -> Tensor:
    """Gather the values `[N]` of all ranks' tokens, in the order of the sequences; on all ranks."""
    local = {
        number: batch_values.detach().double()[batch.sequence_index() == row]
        for batch, batch_values in zip(batches, values, strict=True)
        for row, number in enumerate(batch.sequence_ids)
    }
    gathered = {number: part for rank in layout.gather_objects("shards", local) for number, part in rank.items()}
    return torch.cat([gathered[number] for number in sorted(gathered)])


class MeasuredEngine:
    """An engine, and its losses, utilities and gradients for the main sequences and the probe."""

    def __init__(self, engine: Engine, main: Sequence[Text], probe: Sequence[Text], *, alone: bool = False):
        self.engine, self.main, self.probe, self.alone = engine, main, probe, alone
        self.direction = Direction(engine)

    def take_direction(self) -> dict[str, Tensor]:
        batches = make_local_batches(self.probe, alone=self.alone)
        self.direction.compute(batches, normalization="sequence", clip=None)
        return self.gather(self.direction)

    def gather(self, direction: Direction) -> dict[str, Tensor]:
        names = {id(p): name.removeprefix("causal_lm.") for name, p in self.engine.trainable}
        gathered = {}
        for number in range(len(direction.groups)):
            parts = direction.finish_gather(direction.start_gather(number))
            gathered |= {names[key]: part.detach().double().clone() for key, part in parts.items()}
        return gathered

    def compute_utilities(self, *, fused: bool, **options: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Compute losses, utilities, and the gradient of the main batch."""
        batches = make_local_batches(self.main, **{"alone": self.alone, **options})
        results = []
        forward = ForwardMode(self.engine, self.direction, fused=fused).begin(batches)
        with self.engine.without_dropout(), self.engine.accumulation(len(batches)):
            for k, batch in enumerate(batches):
                result = forward.run(k)
                results.append((result.losses, result.utilities))
                counts = batch.num_supervised_tokens()[batch.sequence_index()]
                self.engine.backward((results[-1][0] / counts).sum() / len(self.main))
        other = Direction(self.engine)
        for part, gradient in iterate_chunks(other.buffers, self.engine.shards.gradients()):
            part.copy_(gradient)
        losses, utilities = (join_by_sequence(batches, part) for part in zip(*results, strict=True))
        return losses, utilities, self.gather(other)

    def compute_differences(self) -> tuple[Tensor, Tensor]:
        batches = make_local_batches(self.main, alone=self.alone)
        forward = FiniteDifference(self.engine, self.direction, epsilon="auto").begin(batches, measure_noise=True)
        with self.engine.without_dropout(), torch.no_grad():
            results = [forward.run(k) for k in range(len(batches))]
            results = [(result.losses, result.utilities) for result in results]
        losses, utilities = (join_by_sequence(batches, part) for part in zip(*results, strict=True))
        return losses, utilities

    def compute_losses(self, **options: Any) -> Tensor:
        batches = make_local_batches(self.main, **options)
        with self.engine.without_gradient():
            return join_by_sequence(batches, [self.engine.token_losses(batch) for batch in batches])


def relative_error(vector: Tensor, wanted: Tensor) -> float:
    return float((vector - wanted).norm() / wanted.norm().clamp_min(1e-30))


def relative_gradient_error(gradient: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    # Loading in another precision, transformers lets parameters be trained that have no gradient by design.
    wanted = {name: vector for name, vector in wanted.items() if name in gradient or vector.any()}
    assert gradient.keys() == wanted.keys(), sorted(gradient.keys() ^ wanted.keys())[:4]
    flat = [torch.cat([vector[name].flatten() for name in wanted]) for vector in (gradient, wanted)]
    return relative_error(*flat)


def rank_correlation(vector: Tensor, wanted: Tensor) -> float:
    """Spearman's."""
    return float(spearmanr(vector.double(), wanted.double()).statistic)


def make_recipe(folder: Path, **sections: dict[str, Any]) -> Recipe:
    model = {"path": str(folder), "precision": "fp32", **sections.pop("model", {})}
    rows = {"global_size": 4, "micro_batch_size_per_rank": "auto"}
    data = {"train_path": "none", "cutoff_length": LONGEST}
    return step_runs.make_recipe(model=model, data=data, batch=rows, **sections)


JVP: dict[str, Any] = {}
DIFFERENCE = {"utility": {"estimator": "finite_difference", "epsilon": "auto"}}
SFT = {"method": {"name": "sft"}}


def measure(name: str, parts: Sequence[str] = ("full", "lora")) -> ModelResult:
    """Measure one model. A collective; apart from errors, the result is the same on all ranks."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    result = ModelResult(name)
    with tempfile.TemporaryDirectory() as shared:
        folder = Path(layout.gather_objects("job", shared)[0])
        with recording_errors(result, "build"):
            write_model(name, folder)
            layout.gather_objects("job", None)
        if "build" in result.errors:
            _read_default_configuration(result, folder)
        else:
            _measure(result, folder, parts)
        layout.gather_objects("job", None)
    return result


def write_model(name: str, folder: Path) -> None:
    """Write the tiny model's folder on the first rank."""
    if not layout.is_first():
        return
    config = families.make_tiny_config(name)
    families.make_tiny_model(config).save_pretrained(folder)
    config.save_pretrained(folder)  # the complete one; a language model inside another model saves its part only
    if name == "qwen3_vl_moe":  # the released models' layout, which transformers reads but does not write
        weights = load_file(folder / SAFETENSORS)
        experts = {key: tensor.mT.contiguous() for key, tensor in weights.items() if ".experts." in key}
        save_file(weights | experts, folder / SAFETENSORS, metadata={"format": "pt"})


def _read_default_configuration(result: ModelResult, folder: Path) -> None:
    """Check whether the type of a model that cannot be made is one that is refused."""
    try:
        CONFIG_MAPPING[result.name]().save_pretrained(folder)
        read_model(str(folder))
    except UserError as error:
        result.refused["sft"] = anonymize(error)
        del result.errors["build"]
    except Exception:  # transformers cannot make its default configuration either
        return


def anonymize(error: UserError) -> str:
    """Message of an error without the name of the temporary folder."""
    return re.sub(r"/\S*/tmp\w+", "MODEL", str(error))


@contextmanager
def recording_errors(result: ModelResult, what: str) -> Iterator[None]:
    """Record the error with which the block may end."""
    try:
        yield
    except UserError as error:
        result.late[what] = anonymize(error)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        result.errors[what] = f"{type(error).__name__}: {str(error).strip().splitlines()[0:1]} ({where})"[:300]


def _measure(result: ModelResult, folder: Path, parts: Sequence[str]) -> None:
    checkpointing = {**SFT, "model": {"gradient_checkpointing": True}}
    asked = {"jvp": JVP, "finite_difference": DIFFERENCE, "sft": SFT, "checkpointing": checkpointing}
    for key, sections in asked.items():
        with recording_errors(result, key):
            try:
                check_architecture(derive_plan_settings(make_recipe(folder, **sections)))
                plan_batch(
                    derive_plan_settings(make_recipe(folder, **sections)),
                    layout.size("job"),
                    read_model(str(folder)).shape,
                )
            except UserError as error:
                result.refused[key] = anonymize(error)
    if "sft" in result.refused:
        return
    config = read_model(str(folder)).config
    result.architecture = config.architectures[0] if config.architectures else ""
    main, probe = draw_texts(3, 1), draw_texts(2, 2)
    shape = read_model(str(folder)).shape.adapt_to_length(max(len(text.tokens) for text in main))
    result.packing, result.sequence_parallelism, result.is_alone = (
        shape.unpackable,
        shape.no_sequence_parallelism,
        shape.is_alone,
    )
    with recording_errors(result, "tensor"), suppress(UserError):
        transformer_config(str(folder), config, tensor=2, dtype=torch.float32)
        result.tensor_parallelism = True
    for part in parts:
        had_jvp = "jvp" not in result.refused
        with recording_errors(result, part):
            _measure_part(result, folder, part, main, probe)
        if had_jvp and "jvp" in result.refused:  # refused by a check of the run: measure without it
            with recording_errors(result, part):
                _measure_part(result, folder, part, main, probe)
        if result.errors or "full" in result.late or "start" in result.refused:
            break


def _measure_part(result: ModelResult, folder: Path, part: str, main: Sequence[Text], probe: Sequence[Text]) -> None:
    has_jvp = "jvp" not in result.refused
    sections: dict[str, Any] = {}
    if part == "lora":
        sections["lora"] = {"rank": 4, "alpha": 8}
    if not has_jvp:
        sections |= DIFFERENCE if "finite_difference" not in result.refused else SFT
    recipe = make_recipe(folder, **sections)
    if part == "lora":
        check_architecture(derive_plan_settings(recipe))
    config = tiny.deepspeed_config()
    torch.manual_seed(5)
    try:
        model = load_model(derive_plan_settings(recipe), config)
    except UserError as error:
        if "own code fails" not in str(error):
            raise
        result.refused["start"] = anonymize(error)
        return
    adapters = {}
    if part == "lora":
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.1)
            if "lora_" in parameter_name:
                adapters[parameter_name.removeprefix("causal_lm.")] = parameter.detach().double().clone()
    model.train()
    engine = Engine(model, build_optimizer(model, recipe.optimizer), config)
    try:
        if part == "full":
            asked = "start"
            try:
                check_start(engine, _make_check_data(result))
                asked = "jvp"
                check_derivatives(
                    engine,
                    build_estimator(recipe.method, recipe.probe, recipe.utility, engine),
                    _make_check_data(result),
                )
            except UserError as error:
                result.refused[asked] = anonymize(error)
                return  # DeepSpeed has stopped in the middle of a forward
        plain = load_plain_model(folder)
        if part == "lora":
            plain = add_lora(plain, recipe.lora).double().eval()
            assert adapters.keys() == {n for n, p in plain.named_parameters() if "lora_" in n}
            plain.load_state_dict(adapters, strict=False)
        wanted = compute_expected(plain, main, probe)
        if part == "full":
            in_fp32 = relative_gradient_error(compute_gradient(plain.float(), probe), wanted.direction)
            result.numbers["plain fp32 gradient"] = in_fp32
        if part == "full" and has_jvp and layout.size("job") == 1:
            api = compute_api_utilities(folder, main, probe)
            result.numbers["full API utility"] = relative_error(api, wanted.utilities)
        _compare(result, part, MeasuredEngine(engine, main, probe, alone=result.is_alone), wanted, has_jvp)
    finally:
        engine.close()


def compute_api_utilities(folder: Path, main: Sequence[Text], probe: Sequence[Text]) -> Tensor:
    """Utilities of the main sequences by the Python API, on the stored model in fp32."""
    model = families.find_auto_class(read_model(str(folder)).config).from_pretrained(folder, dtype=torch.float32)

    def make_row(text: Text) -> dict[str, Tensor]:
        labels = text.tokens.clone()
        labels[: text.prompt] = -100
        return {"input_ids": text.tokens[None], "labels": labels[None]}

    direction = vcore_ds.probe_direction(model, map(make_row, probe))
    rows = [vcore_ds.token_utilities(model, make_row(text), direction)[0, text.prompt :] for text in main]
    return torch.cat(rows).double()


def _make_check_data(result: ModelResult) -> Any:
    """Make the plan and the sequences that the checks before the first step use."""
    sequences = [as_sequence(number, text) for number, text in enumerate(draw_texts(2, 3, longest=39))]
    plan = SimpleNamespace(is_packed=result.packing is None, shares_forwards=not result.is_alone)
    return SimpleNamespace(plan=plan, dataset=sequences, pad_token_id=0)


def _compare(result: ModelResult, part: str, ours: MeasuredEngine, wanted: Expected, has_jvp: bool) -> None:
    def note(what: str, error: float) -> None:
        result.numbers[f"{part} {what}"] = error

    def compare(what: str, losses: Tensor, utilities: Tensor, gradient: dict[str, Tensor] | None = None) -> None:
        note(f"{what} loss", relative_error(losses, wanted.losses))
        if what == "difference":
            note(f"{what} rank", rank_correlation(utilities, wanted.utilities))
        else:
            note(f"{what} utility", relative_error(utilities, wanted.utilities))
        if gradient is not None:
            note(f"{what} gradient", relative_gradient_error(gradient, wanted.gradient))

    note("probe gradient", relative_gradient_error(ours.take_direction(), wanted.direction))
    if part == "full" and "finite_difference" not in result.refused:
        with recording_errors(result, "difference"):
            compare("difference", *ours.compute_differences())
    if result.packing is None:
        note("packed plain loss", relative_error(ours.compute_losses(packed=True), wanted.losses))
    if not has_jvp:
        return
    compare("separate", *ours.compute_utilities(fused=False))
    if why_not_fused(ours.engine) is None or part == "full":
        compare("fused", *ours.compute_utilities(fused=True))
    if part != "full":
        return
    if result.packing is None:
        compare("packed", *ours.compute_utilities(fused=True, packed=True))
    if result.sequence_parallelism is None and layout.size("shards") > 1:
        layout.make_sequence_groups([2])
        compare("ulysses", *ours.compute_utilities(fused=True, sequence_parallel=2))
    if "checkpointing" in result.refused:
        return
    prepare_for_training(ours.engine.module.base, gradient_checkpointing=True)
    compare("checkpointed separate", *ours.compute_utilities(fused=False))
    with recording_errors(result, "fused, checkpointed"):
        compare("checkpointed", *ours.compute_utilities(fused=True))
