"""A tiny model through the package, against plain transformers; called through `run_ranks`."""

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
from scipy.stats import spearmanr
from torch import Tensor
from transformers import CONFIG_MAPPING

from tests.helpers import step_runs, tiny
from tests.models import families
from tests.models.reference import Expected, Text, expected, mean_gradient, plain_model
from vcore_ds.common.errors import UserError
from vcore_ds.config.schema import Recipe
from vcore_ds.data.batches import Batch, idle_batch, pack
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.engine.flat_shards import iterate_chunks
from vcore_ds.engine.zero3 import Engine, build_optimizer
from vcore_ds.models.architecture_check import check_model
from vcore_ds.models.configuration import read_config, read_model_shape
from vcore_ds.models.loading import prepare_for_training
from vcore_ds.models.lora import add_lora
from vcore_ds.models.megatron.configuration import transformer_config
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.train.console import Console
from vcore_ds.train.settings import derive_engine_settings, derive_step_settings
from vcore_ds.train.setup import build_estimator, load_model
from vcore_ds.train.start_checks import check_derivatives, check_start
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import ForwardMode, why_not_fused
from vcore_ds.utility.finite_difference import FiniteDifference

BOUND = 1e-5
"""Largest relative error of what is right, in fp32."""

MIN_RANK_CORRELATION = 0.99
"""Spearman's, of utilities in bf16, and of finite differences in fp32."""


LONGEST = 24
"""Tokens of the longest sequence."""


@dataclass
class Found:
    """What is known of one model."""

    name: str
    architecture: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    """Messages, by what was asked for; raised before weights are read."""
    late: dict[str, str] = field(default_factory=dict)
    """Messages that came later."""
    errors: dict[str, str] = field(default_factory=dict)
    """Last lines of tracebacks."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Relative errors in fp32; rank correlations where the name ends in `rank`."""
    packing: str | None = None
    sequence_parallelism: str | None = None
    """Why they are not possible; None where they are."""
    tensor_parallelism: bool = False
    is_alone: bool = False
    """Each sequence has a forward of its own."""

    def beyond_bounds(self) -> dict[str, float]:
        """The numbers of fp32 that are not those of a right model. Some architectures lose more than `BOUND` to
        rounding in transformers' own fp32 too, so three times that is allowed."""
        bound = max(BOUND, 3 * self.numbers.get("plain fp32 gradient", 0.0))

        def is_bad(name: str, value: float) -> bool:
            return not (value >= MIN_RANK_CORRELATION if name.endswith("rank") else value <= bound)

        of_fp32 = {name: value for name, value in self.numbers.items() if not name.startswith(("plain", "bf16"))}
        return {name: value for name, value in of_fp32.items() if is_bad(name, value)}

    @property
    def verdict(self) -> str:
        """`right`, `WRONG`, or `refused`, before weights are read or before the first step; `not built` where no tiny
        model can be made."""
        if "build" in self.errors:
            return "not built"
        if {"sft", "start"} & self.refused.keys():
            return "refused"
        # What can be done without is refused when the model is built, or in the first step.
        said_late = self.late.keys() - {"lora", "fused, checkpointed"}
        return "WRONG" if self.errors or said_late or self.beyond_bounds() else "right"

    @property
    def worst(self) -> float:
        """Largest relative error in fp32."""
        of_fp32 = [x for n, x in self.numbers.items() if not n.startswith(("bf16", "plain")) and not n.endswith("rank")]
        return max(of_fp32, default=float("nan"))


def texts(num: int, seed: int, longest: int = LONGEST) -> list[Text]:
    """Random sequences of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [longest - 7 * (index % 3) for index in range(num)]
    draw = [torch.randint(families.FIRST_TOKEN, families.END_TOKEN, (n,), generator=generator) for n in lengths]
    return [Text(tokens, 4 + index) for index, tokens in enumerate(draw)]


def own_batches(
    given: Sequence[Text], *, packed: bool = False, alone: bool = False, sequence_parallel: int = 1
) -> list[Batch]:
    """This rank's part: each `world size`-th sequence, in rows of their own, all in one, or each in its own batch."""
    rank, size = layout.rank("data", sequence_parallel), layout.size("data", sequence_parallel)
    sequences = [as_sequence(i, text) for i, text in enumerate(given) if i % size == rank]
    if alone:
        batches = [pack([[one]], 0, sequence_parallel) for one in sequences]
        return batches + [idle_batch(0, sequence_parallel)] * (-(-len(given) // size) - len(batches))
    return [pack([sequences] if packed else [[one] for one in sequences], 0, sequence_parallel)]


def as_sequence(number: int, text: Text) -> TokenizedSequence:
    return TokenizedSequence(number, text.tokens.int().numpy(), np.arange(len(text.tokens)) >= text.prompt)


def by_sequence(batches: Sequence[Batch], values: Sequence[Tensor]) -> Tensor:
    """The values `[N]` of every rank's tokens, in the order of the sequences; on all ranks."""
    own = {
        number: of_batch.detach().double()[batch.sequence_index() == row]
        for batch, of_batch in zip(batches, values, strict=True)
        for row, number in enumerate(batch.sequence_ids)
    }
    found = {number: part for rank in layout.gather_objects("shards", own) for number, part in rank.items()}
    return torch.cat([found[number] for number in sorted(found)])


class Measured:
    """An engine, with what it gives for the main sequences and the probe."""

    def __init__(self, engine: Engine, main: Sequence[Text], probe: Sequence[Text], *, alone: bool = False):
        self.engine, self.main, self.probe, self.alone = engine, main, probe, alone
        self.direction = Direction(engine)

    def take_direction(self) -> dict[str, Tensor]:
        batches = own_batches(self.probe, alone=self.alone)
        self.direction.compute(batches, normalization="sequence", clip=None)
        return self.whole(self.direction)

    def whole(self, direction: Direction) -> dict[str, Tensor]:
        names = {id(p): name.removeprefix("causal_lm.") for name, p in self.engine.trainable}
        found = {}
        for number in range(len(direction.groups)):
            parts = direction.finish_gather(direction.start_gather(number))
            found |= {names[key]: part.detach().double().clone() for key, part in parts.items()}
        return found

    def utilities(self, *, fused: bool, **options: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Losses, utilities, and the gradient of the main batch."""
        batches = own_batches(self.main, **{"alone": self.alone, **options})
        found = []
        forward = ForwardMode(self.engine, self.direction, fused=fused).begin(batches)
        with self.engine.without_dropout(), self.engine.accumulation(len(batches)):
            for k, batch in enumerate(batches):
                result = forward(k)
                found.append((result.losses, result.utilities))
                counts = batch.num_supervised_tokens()[batch.sequence_index()]
                self.engine.backward((found[-1][0] / counts).sum() / len(self.main))
        other = Direction(self.engine)
        for part, gradient in iterate_chunks(other.buffers, self.engine.shards.gradients()):
            part.copy_(gradient)
        losses, utilities = (by_sequence(batches, part) for part in zip(*found, strict=True))
        return losses, utilities, self.whole(other)

    def differences(self) -> tuple[Tensor, Tensor]:
        batches = own_batches(self.main, alone=self.alone)
        forward = FiniteDifference(self.engine, self.direction, epsilon="auto").begin(batches, measure_noise=True)
        with self.engine.without_dropout(), torch.no_grad():
            results = [forward(k) for k in range(len(batches))]
            found = [(result.losses, result.utilities) for result in results]
        losses, utilities = (by_sequence(batches, part) for part in zip(*found, strict=True))
        return losses, utilities

    def losses(self, **options: Any) -> Tensor:
        batches = own_batches(self.main, **options)
        with self.engine.without_gradient():
            return by_sequence(batches, [self.engine.token_losses(batch) for batch in batches])


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def relative_of(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    # Loading in another precision, transformers lets parameters be trained that have no gradient by design.
    wanted = {name: vector for name, vector in wanted.items() if name in found or vector.any()}
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:4]
    flat = [torch.cat([vector[name].flatten() for name in wanted]) for vector in (found, wanted)]
    return relative(*flat)


def rank_correlation(found: Tensor, wanted: Tensor) -> float:
    """Spearman's."""
    return float(spearmanr(found.double(), wanted.double()).statistic)


def recipe(folder: Path, **sections: dict[str, Any]) -> Recipe:
    model = {"path": str(folder), "precision": "fp32", **sections.pop("model", {})}
    rows = {"global_size": 4, "micro_batch_size_per_rank": "auto"}
    data = {"train_path": "none", "cutoff_length": LONGEST}
    return step_runs.make_recipe(model=model, data=data, batch=rows, **sections)


JVP: dict[str, Any] = {}
DIFFERENCE = {"utility": {"estimator": "finite_difference", "epsilon": "auto"}}
SFT = {"method": {"name": "sft"}}


def measure(name: str, parts: Sequence[str] = ("full", "lora", "bf16")) -> Found:
    """All that is to be known of one model. A collective; the result is the same on all ranks but for errors."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    found = Found(name)
    with tempfile.TemporaryDirectory() as shared:
        folder = Path(layout.gather_objects("job", shared)[0])
        with noted(found, "build"):
            write(name, folder)
            layout.gather_objects("job", None)
        if "build" in found.errors:
            _read_default_configuration(found, folder)
        else:
            _measure(found, folder, parts)
        layout.gather_objects("job", None)
    return found


def write(name: str, folder: Path) -> None:
    """The tiny model's folder, made by the first rank."""
    if not layout.is_first():
        return
    config = families.tiny_config(name)
    families.tiny_model(config).save_pretrained(folder)
    config.save_pretrained(folder)  # the whole one, where the language model has a part of it for its own


def _read_default_configuration(found: Found, folder: Path) -> None:
    """Where no tiny model can be made, its type may be one that is refused."""
    try:
        CONFIG_MAPPING[found.name]().save_pretrained(folder)
        read_config(str(folder))
    except UserError as error:
        found.refused["sft"] = message(error)
        del found.errors["build"]
    except Exception:  # transformers cannot make its default configuration either
        return


def message(error: UserError) -> str:
    """Without the folder's name, which says nothing."""
    return re.sub(r"/\S*/tmp\w+", "MODEL", str(error))


@contextmanager
def noted(found: Found, what: str) -> Iterator[None]:
    """A part that may fail."""
    try:
        yield
    except UserError as error:
        found.late[what] = message(error)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        found.errors[what] = f"{type(error).__name__}: {str(error).strip().splitlines()[0:1]} ({where})"[:300]


def _measure(found: Found, folder: Path, parts: Sequence[str]) -> None:
    checkpointing = {**SFT, "model": {"gradient_checkpointing": True}}
    asked = {"jvp": JVP, "finite_difference": DIFFERENCE, "sft": SFT, "checkpointing": checkpointing}
    for key, sections in asked.items():
        with noted(found, key):
            try:
                check_model(derive_plan_settings(recipe(folder, **sections)))
                plan_batch(
                    derive_plan_settings(recipe(folder, **sections)), layout.size("job"), read_model_shape(str(folder))
                )
            except UserError as error:
                found.refused[key] = message(error)
    if "sft" in found.refused:
        return
    config = read_config(str(folder))
    found.architecture = config.architectures[0] if config.architectures else ""
    main, probe = texts(3, 1), texts(2, 2)
    shape = read_model_shape(str(folder)).for_sequences_of(max(len(text.tokens) for text in main))
    found.packing, found.sequence_parallelism, found.is_alone = (
        shape.unpackable,
        shape.no_sequence_parallelism,
        shape.is_alone,
    )
    with noted(found, "tensor"), suppress(UserError):
        transformer_config(str(folder), config, tensor=2, dtype=torch.float32)
        found.tensor_parallelism = True
    for part in parts:
        if part == "bf16" and (found.errors or "jvp" in found.refused):
            continue
        had_jvp = "jvp" not in found.refused
        with noted(found, part):
            _measure_part(found, folder, part, main, probe)
        if had_jvp and "jvp" in found.refused:  # by a check of the run: what is possible without
            with noted(found, part):
                _measure_part(found, folder, part, main, probe)
        if found.errors or "full" in found.late or "start" in found.refused:
            break


def _measure_part(found: Found, folder: Path, part: str, main: Sequence[Text], probe: Sequence[Text]) -> None:
    is_bf16, has_jvp = part == "bf16", "jvp" not in found.refused
    sections: dict[str, Any] = {"model": {"precision": "bf16"}} if is_bf16 else {}
    if part == "lora":
        sections["lora"] = {"rank": 4, "alpha": 8}
    if not has_jvp:
        sections |= DIFFERENCE if "finite_difference" not in found.refused else SFT
    own = recipe(folder, **sections)
    if part == "lora":
        check_model(derive_plan_settings(own))
    config = tiny.deepspeed_config(bf16=is_bf16)
    torch.manual_seed(5)
    try:
        model = load_model(derive_engine_settings(own), config)
    except UserError as error:
        if "own code fails" not in str(error):
            raise
        found.refused["start"] = message(error)
        return
    adapters = {}
    if part == "lora":
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.1)
            if "lora_" in parameter_name:
                adapters[parameter_name.removeprefix("causal_lm.")] = parameter.detach().double().clone()
    model.train()
    engine = Engine(model, build_optimizer(model, own.optimizer), config)
    try:
        if part == "full":
            asked = "start"
            try:
                check_start(engine, _data_of(found), Console(enabled=False))
                asked = "jvp"
                check_derivatives(
                    engine, build_estimator(derive_step_settings(own), engine), _data_of(found), Console(enabled=False)
                )
            except UserError as error:
                found.refused[asked] = message(error)
                return  # DeepSpeed is in the middle of a forward
        plain = plain_model(folder, rounded_to=torch.bfloat16 if is_bf16 else torch.float32)
        if part == "lora":
            plain = add_lora(plain, own.lora).double().eval()
            assert adapters.keys() == {n for n, p in plain.named_parameters() if "lora_" in n}
            plain.load_state_dict(adapters, strict=False)
        wanted = expected(plain, main, probe)
        if part == "full":
            in_fp32 = relative_of(mean_gradient(plain.float(), probe), wanted.direction)
            found.numbers["plain fp32 gradient"] = in_fp32
        if is_bf16:
            in_bf16 = expected(plain.bfloat16(), main, probe).utilities
            found.numbers["plain bf16 rank"] = rank_correlation(in_bf16, wanted.utilities)
        _compare(found, part, Measured(engine, main, probe, alone=found.is_alone), wanted, has_jvp)
    finally:
        engine.close()


def _data_of(found: Found) -> Any:
    """What the check before the first step looks at: a plan, and sequences."""
    sequences = [as_sequence(number, text) for number, text in enumerate(texts(2, 3, longest=15))]
    return SimpleNamespace(plan=SimpleNamespace(is_packed=found.packing is None), dataset=sequences, pad_token_id=0)


def _compare(found: Found, part: str, ours: Measured, wanted: Expected, has_jvp: bool) -> None:
    def note(what: str, error: float) -> None:
        found.numbers[f"{part} {what}"] = error

    def compare(what: str, losses: Tensor, utilities: Tensor, gradient: dict[str, Tensor] | None = None) -> None:
        note(f"{what} loss", relative(losses, wanted.losses))
        if what == "difference" or part == "bf16":
            note(f"{what} rank", rank_correlation(utilities, wanted.utilities))
        else:
            note(f"{what} utility", relative(utilities, wanted.utilities))
        if gradient is not None:
            note(f"{what} gradient", relative_of(gradient, wanted.gradient))

    note("probe gradient", relative_of(ours.take_direction(), wanted.direction))
    if part == "full" and "finite_difference" not in found.refused:
        with noted(found, "difference"):
            compare("difference", *ours.differences())
    if found.packing is None:
        note("packed plain loss", relative(ours.losses(packed=True), wanted.losses))
    if not has_jvp:
        return
    compare("separate", *ours.utilities(fused=False))
    if why_not_fused(ours.engine) is None or part == "full":
        compare("fused", *ours.utilities(fused=True))
    if part != "full":
        return
    if found.packing is None:
        compare("packed", *ours.utilities(fused=True, packed=True))
    if found.sequence_parallelism is None and layout.size("shards") > 1:
        layout.make_sequence_groups([2])
        compare("ulysses", *ours.utilities(fused=True, sequence_parallel=2))
    if "checkpointing" in found.refused:
        return
    prepare_for_training(ours.engine.module.base, gradient_checkpointing=True)
    compare("checkpointed separate", *ours.utilities(fused=False))
    with noted(found, "fused, checkpointed"):
        compare("checkpointed", *ours.utilities(fused=True))
