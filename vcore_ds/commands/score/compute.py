"""Utilities of all tokens of a store along the gradients of trusted sets: one forward-mode (JVP) pass per set.

For each checkpoint and set, a backward over the set gives the gradient of its loss, kept in shards. One JVP pass over
the data then gives each token's loss and the derivative of that loss along the gradient. The sum over several
checkpoints is TracInCP (Pruthi et al. 2020, arXiv:2002.08484); with Adam's direction it is close to what LESS computes
from projected gradients (Xia et al. 2024, arXiv:2402.04333), without its cosine.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from vcore_ds.commands.score import NEW_FOLDER, ScoreInputs
from vcore_ds.commands.score.output import ScoredSequence, ScoringPass, count_rows, write_results
from vcore_ds.common import __version__
from vcore_ds.common.locks import resume_or_begin, unfinished_work
from vcore_ds.common.paths import check_folder, compute_file_digest, unfinished_path, writing
from vcore_ds.common.random_streams import Stream
from vcore_ds.common.text import count, duration, gib
from vcore_ds.config.exports import ADAPTER_WEIGHTS
from vcore_ds.config.schema import flat_values
from vcore_ds.data.cache import find_shared
from vcore_ds.data.dataset import RandomDraws
from vcore_ds.data.scores_folder import PAGE, ScoredCheckpoint, ScoredData, Scores
from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device, num_local_ranks
from vcore_ds.distributed.position import mark
from vcore_ds.distributed.process_group import run_on_first_rank
from vcore_ds.distributed.watchdog import watching
from vcore_ds.engine.zero3 import Engine, NonFiniteLoss
from vcore_ds.models.architecture_check import check_architecture, count_parameters
from vcore_ds.models.cpu_matmul import measure_matmul_flops
from vcore_ds.models.description import DTYPES
from vcore_ds.models.model_identity import check_adapter_base, compute_model_digest
from vcore_ds.planning.batch_layout import Utilization, summarize
from vcore_ds.planning.batch_plan import BatchKind
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.fit import Available, MemoryPlan, plan_memory
from vcore_ds.planning.hardware import FAST, SLOW, Cluster, Gpu, find_gpu
from vcore_ds.planning.passes import CPU, derive_passes, parameter_counts
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.planning.step_cost import LaidOutBatch, StepModel
from vcore_ds.training import checkpoint_folder, console, run_folder
from vcore_ds.training.checkpoint_read import compute_frozen_digest, read_checkpoint, verify_step
from vcore_ds.training.faults import advising_on_memory, warn_of_non_finite
from vcore_ds.training.feed import DataReader, build_feed
from vcore_ds.training.setup import build_direction, build_engine, plan_ranks, start_ranks
from vcore_ds.training.start_checks import (
    check_approximation,
    check_derivatives,
    check_memory,
    check_start,
    find_available_memory,
)
from vcore_ds.training.start_screen import describe_data, describe_training
from vcore_ds.training.step import take_direction
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import ForwardMode, compute_jvp_losses_and_utilities

CHUNK_TOKENS_PER_RANK = 16_384
"""Tokens per rank and file of results: about a second on a GPU, and enough to balance the ranks. On a CPU an eighth of
them: progress is shown, and work resumed, by files."""
SEQUENCES_PER_MICRO_BATCH = 8  # minimum sequences of a chunk, per sequence of a micro-batch over all ranks

MOST_LAID_OUT = 1024  # sequences by which the seconds of a pass are predicted

WITHOUT_EFFECT = {f"model.{key}" for key in ("gradient_checkpointing", "activation_offload")} | {
    f"engine.{key}" for key in ("deepspeed_config", "memory_check", "timeout_minutes", "lost_rank_seconds")
}
"""Keys that may differ when a scoring is resumed, such as after a rank ran out of memory: they change no number, or
their file's values are compared."""


def score(inputs: ScoreInputs) -> None:
    """Score on all ranks and write the folder on rank 0. A collective. Raises UserError for a user's mistake or a full
    disk, keeping finished work, and NonFiniteLoss on all ranks, with the sequences."""
    recipe = inputs.recipe
    check_architecture(derive_plan_settings(recipe))
    start_ranks(recipe.engine, recipe.parallel)
    with watching(recipe.engine.lost_rank_seconds, recipe.engine.timeout_minutes), ExitStack() as held:

        def hold() -> None:
            with writing("--output", inputs.output, NEW_FOLDER):
                check_folder(inputs.output)
                held.enter_context(unfinished_work(inputs.output, console.say))

        run_on_first_rank(hold)
        Scoring(inputs, unfinished_path(inputs.output)).run()


class Scoring:
    """A scoring on all ranks. The methods are collectives."""

    def __init__(self, inputs: ScoreInputs, folder: Path):
        self.inputs, self.folder = inputs, folder
        recipe = inputs.recipe
        self.plan_settings = derive_plan_settings(recipe)
        self.plan = plan_ranks(self.plan_settings)
        reader = DataReader(recipe.data, recipe.model.path, load_tokenizer(recipe.model.path))
        self.store = reader.read_training_stores()
        self.sets = {name: reader.read_store(path) for name, path in inputs.sets.items()}
        console.say(f"Data: {describe_training(recipe.data, self.store)}")
        for name, trusted in self.sets.items():
            console.say(f"Trusted set {name}: {describe_data(inputs.sets[name], trusted)}")
            if number := len(find_shared(self.store, trusted)):
                console.warn(
                    f"{number:,} of the traces to score are in {name} too: a trace that its own gradient scores ranks "
                    "high, whatever it is worth to the others. A run leaves out those in data.probe_path"
                )
        feed = (recipe.method, recipe.probe, self.plan, self.store, reader.pad_token_id)
        self.feed = build_feed(*feed, seed=recipe.run.seed)
        checkpoints: list[ScoredCheckpoint | None] = [*inputs.checkpoints] or [None]
        self.passes = [
            ScoringPass(folder / f"pass_{number:03d}", name, checkpoint)
            # Sorted by name: the same command with its sets in another order resumes this work.
            for number, (checkpoint, name) in enumerate(product(checkpoints, sorted(inputs.sets)))
        ]

    def run(self) -> None:
        recipe = self.inputs.recipe
        ds_config = deepspeed_config(self.plan_settings, self.plan)
        run_on_first_rank(lambda: self._resume_or_begin(ds_config))
        remaining = layout.gather_objects("job", self._list_remaining() if layout.is_first() else None)[0]
        if any(remaining):
            longest = next(self._split_into_chunks(next(filter(None, remaining))))
            available = find_available_memory()
            memory = self._plan_memory(ds_config, longest, available)
            check_memory(memory, available, recipe.engine)
            if memory is not None:
                console.say(self._describe_cost(memory, remaining))
            activations = None if memory is None else memory.settings.activations
            with advising_on_memory(memory):
                engine = build_engine(self.plan_settings, ds_config, activations)
                self._compute(engine, remaining)
                engine.close()
        run_on_first_rank(self._write)

    def _plan_memory(
        self, ds_config: Mapping[str, Any], longest: Sequence[int], available: Available
    ) -> MemoryPlan | None:
        """Plan the memory of a rank; None for a model of unknown size. `longest`: positions of the first chunk."""
        recipe, plan, (_, main) = self.inputs.recipe, self.plan, self._lay_out(longest)
        probes = [plan.lay_out_probe(range(len(one)), one.lengths.tolist()) for one in self.sets.values()]
        passes: dict[BatchKind, Utilization] = {"main": summarize([main]), "probe": summarize(probes)}
        counts = count_parameters(recipe.model.path, recipe.lora, recipe.parallel.tensor)
        on_gpu = device().type == "cuda"
        memory = plan_memory(self.plan_settings, plan, ds_config, passes, counts, on_gpu=on_gpu, available=available)
        if memory is None:
            return None
        # Only the pass over a trusted set has a backward; the one over the data has none.
        main_tokens, utility_tokens = memory.settings.probe_tokens, memory.settings.main_tokens
        settings = replace(memory.settings, is_fused=False, main_tokens=main_tokens, utility_tokens=utility_tokens)
        return replace(memory, settings=settings)

    def _lay_out(self, positions: Sequence[int]) -> LaidOutBatch:
        lengths = self.store.lengths[list(positions)].tolist()
        micro_batch_size = self.plan.utility_micro_batch_size_per_rank
        return lengths, self.plan.lay_out_main(range(len(positions)), lengths, micro_batch_size)

    def _describe_cost(self, memory: MemoryPlan, remaining: Sequence[Sequence[int]]) -> str:
        """Predict the memory of a rank and, except on an unknown GPU, the time of the remaining passes, by the formulas
        of `vcore-ds plan`."""
        estimate = memory.estimate
        # On a CPU libraries and data, which are loaded already, share the memory: 0.6 GiB.
        peak_bytes = estimate.peak_bytes + (psutil.Process().memory_info().rss if device().type == "cpu" else 0)
        most = gib(peak_bytes + estimate.margin_bytes, 1)
        text = f"Predicted: {gib(peak_bytes, 1)} to {most} GiB of memory for each rank"
        settings, plan, cluster = memory.settings, self.plan, _find_cluster(self.inputs.recipe.model.precision)
        if cluster is None:
            return text
        passes = derive_passes(self.plan_settings, settings)
        counts = memory.counts or parameter_counts(plan.time_model.shape, settings.lora)
        seconds = [0.0, 0.0, 0.0]
        for one, positions in zip(self.passes, remaining, strict=True):
            if not positions:
                continue
            lengths = self.sets[one.set_name].lengths.tolist()
            probe = lengths, plan.lay_out_probe(range(len(lengths)), lengths)
            step = 1 + len(positions) // MOST_LAID_OUT
            main = self._lay_out(positions[::step])
            for i, achieved in enumerate((cluster.achieved, FAST, SLOW)):
                time_model = replace(plan.time_model, number_bytes=settings.number_bytes)
                model = StepModel(time_model, counts, settings, replace(cluster, achieved=achieved))
                cost = model.estimate_step(passes, [main], [probe]).seconds
                seconds[i] += cost["probe"] + cost["utility"] * step
        typical, fast, slow = map(duration, seconds)
        return f"{text}; {typical} ({fast} to {slow}) after loading and checks"

    def _resume_or_begin(self, ds_config: dict[str, Any]) -> None:
        """On rank 0: prepare the folder of unfinished work; what a scoring of the same inputs has left there stays."""
        digests = {name: trusted.digest for name, trusted in self.sets.items()}
        recipe = self.inputs.recipe
        adapter = recipe.lora and recipe.lora.adapter
        if adapter and (warning := check_adapter_base(Path(adapter), recipe.model.path)) is not None:
            console.warn(warning)
        identity = describe_inputs(flat_values(self.inputs.recipe), self._description(), ds_config, digests)
        with writing("--output", self.folder, NEW_FOLDER):
            resume_or_begin(self.folder, identity, console.say, again=self.inputs.again)

    def _list_remaining(self) -> list[list[int]]:
        """On rank 0: for each pass, the positions of the sequences not yet scored, longest first: a pass that does not
        fit in memory fails at once."""
        by_length = sorted(range(len(self.store)), key=lambda i: -self.store.lengths[i])
        return [[i for i in by_length if i not in done] for done in (one.read_positions() for one in self.passes)]

    def _compute(self, engine: Engine, remaining: Sequence[Sequence[int]]) -> None:
        recipe = self.inputs.recipe
        direction = build_direction(engine, recipe.probe, recipe.utility)
        checkpoints, loaded, model = Path(recipe.run.output_dir) / "checkpoints", None, recipe.model.path
        frozen_digest = run_on_first_rank(lambda: compute_frozen_digest(model, has_adapters=recipe.lora is not None))
        is_checked = False
        for one, positions in zip(self.passes, remaining, strict=True):
            if not positions:
                continue
            if one.checkpoint is not None and one.checkpoint != loaded:
                mark("loading the checkpoint", is_loading=True)
                verified = verify_step(checkpoints, one.checkpoint.step, one.checkpoint.digest, console.say)
                read_checkpoint(verified, engine, None, model, frozen_digest)
                loaded = one.checkpoint
            if not is_checked:
                self._check(engine, ForwardMode(engine, direction), self.sets[one.set_name])
                is_checked = True
            self._take_direction(direction, one)
            self._score(engine, direction, one, positions)

    def _check(self, engine: Engine, estimator: ForwardMode, trusted: TokenStore) -> None:
        """Check the loaded weights, as at the start of a run, and the approximation of the first direction."""
        recipe = self.inputs.recipe
        warn_of_non_finite(engine)
        check_start(engine, self.feed)
        check_derivatives(engine, estimator, self.feed)
        draws = RandomDraws([len(trusted)], len(trusted), recipe.run.seed, Stream.PROBE)
        feed = replace(self.feed, probe_dataset=trusted, probe_stream=draws)
        check_approximation(engine, estimator, feed, recipe.method, recipe.probe)

    def _take_direction(self, direction: Direction, one: ScoringPass) -> None:
        """Compute the gradient of the loss of the pass's trusted set, over all its traces."""
        mark("gradient of the trusted set")
        trusted = self.sets[one.set_name]
        batches = replace(self.feed, probe_dataset=trusted).probe_batches(range(len(trusted)))
        console.say(f"Gradient of {one.set_name}: {count(len(trusted), 'trace')}{_describe(one.checkpoint)}")
        recipe = self.inputs.recipe
        probe = take_direction(direction, recipe.method, recipe.probe, batches, seed=recipe.run.seed)
        assert probe.loss is not None
        if layout.is_first():
            one.write_set(probe.loss, probe.gradient_norm)

    def _score(self, engine: Engine, direction: Direction, one: ScoringPass, positions: Sequence[int]) -> None:
        mark("utilities")
        title = f"Utilities along {one.set_name}{_describe(one.checkpoint)}"
        with console.progress(title, float(self.store.lengths[list(positions)].sum())) as progress:
            for chunk in self._split_into_chunks(positions):
                scored = self._score_chunk(engine, direction, chunk)
                # Rank 0 alone may fail here, on a full disk; the watchdog stops the others in the next chunk.
                if layout.is_first():
                    with writing("--output", self.folder, NEW_FOLDER):
                        one.add(scored)
                progress.advance(float(self.store.lengths[chunk].sum()))

    def _split_into_chunks(self, positions: Sequence[int]) -> Iterator[list[int]]:
        """Split the positions, in order, into chunks with enough sequences and tokens. Work resumes at the start of a
        chunk, so a resumed scoring has the same chunks."""
        min_size = self.plan.num_ranks * (self.plan.utility_micro_batch_size_per_rank or 1) * SEQUENCES_PER_MICRO_BATCH
        min_tokens = CHUNK_TOKENS_PER_RANK * self.plan.num_ranks // (8 if device().type == "cpu" else 1)
        chunk, num_tokens = [], 0
        for position in positions:
            chunk.append(position)
            num_tokens += int(self.store.lengths[position])
            if len(chunk) >= min_size and num_tokens >= min_tokens:
                yield chunk
                chunk, num_tokens = [], 0
        if chunk:
            yield chunk

    def _score_chunk(self, engine: Engine, direction: Direction, chunk: Sequence[int]) -> list[ScoredSequence]:
        """Losses and utilities of the sequences at the positions `chunk`, in that order, on all ranks."""
        position_of = {int(self.store.sequence_ids[i]): i for i in chunk}
        batches = self.feed.batches(chunk, self.plan.utility_micro_batch_size_per_rank)
        rank_arrays: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for batch, values in zip(batches, compute_jvp_losses_and_utilities(engine, direction, batches), strict=True):
            sizes = batch.num_supervised_tokens().tolist()
            losses, utilities = ([part.cpu().float().numpy() for part in value.split(sizes)] for value in values)
            # not strict: a padding pack has no sequence ids
            for sequence_id, *arrays in zip(batch.sequence_ids, losses, utilities, strict=False):
                rank_arrays[position_of[sequence_id]] = (arrays[0], arrays[1])
        if layout.rank("sequence", batches[0].sequence_parallel) > 0:
            rank_arrays = {}  # the first rank of a sequence-parallel group has the same values
        scored = {i: arrays for part in layout.gather_objects("job", rank_arrays) for i, arrays in part.items()}
        wrong = [i for i, arrays in scored.items() if not all(np.isfinite(values).all() for values in arrays)]
        if wrong:
            raise NonFiniteLoss(f"data.train_path: loss or utility is not finite of {len(wrong)} traces: {wrong[:8]}")
        return [ScoredSequence(i, *scored[i]) for i in chunk]

    def _write(self) -> None:
        inputs = self.inputs
        sets = {name: (inputs.sets[name], trusted) for name, trusted in self.sets.items()}
        written = (self.folder, inputs.output, self.store, sets, self.passes, self._description())
        with writing("--output", inputs.output, NEW_FOLDER):
            text = write_results(*written, all_tokens=inputs.all_tokens)
        console.say(f"\n{text}\n\nScores: {inputs.output} (open {PAGE} in a browser)")

    def _description(self) -> Scores:
        """scores.json without the measured `sets`."""
        store, recipe, adapter = self.store, self.inputs.recipe, self.inputs.adapter
        manifest = store.manifest
        return Scores(
            data=ScoredData(
                recipe.data.train_name(),
                store.digest,
                len(store),
                manifest["tokenizer"]["hash"],
                manifest["tokenizer"]["chat_template_hash"],
                manifest["num_supervised_tokens"],
                {one["file"]: one["fingerprint"] for one in manifest.get("source", []) if "file" in one},
                **count_rows(store),
            ),
            model=recipe.model.path,
            model_digest=compute_model_digest(recipe.model.path),
            checkpoints=self.inputs.checkpoints,
            direction=recipe.probe.direction,
            normalization=recipe.method.normalization,
            sets={},
            probe_rank=recipe.probe.rank,
            adapter=adapter,
            adapter_digest=None if adapter is None else _digest_adapter(Path(adapter)),
            result_digest=self._digest_result(),
            version=__version__,
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    def _digest_result(self) -> str | None:
        """Compute `Scores.result_digest`."""
        run, is_adapter = Path(self.inputs.recipe.run.output_dir), self.inputs.recipe.lora is not None
        newest = next(iter(checkpoint_folder.list_complete(run / "checkpoints")), None)
        result = run_folder.export_folder(run, is_adapter=is_adapter)
        scored = [one.step for one in self.inputs.checkpoints]
        if newest is None or checkpoint_folder.parse_step(newest) not in scored or not result.is_dir():
            return None
        return _digest_adapter(result) if is_adapter else compute_model_digest(str(result))


def _digest_adapter(folder: Path) -> str:
    """Compute the digest of an adapter's weights; empty where they are gone: a checkpoint needs them no longer."""
    file = folder / ADAPTER_WEIGHTS
    return compute_file_digest(file) if file.is_file() else ""


def describe_inputs(
    recipe: Mapping[str, Any], description: Scores, deepspeed_config: Mapping[str, Any], digests: Mapping[str, str]
) -> dict[str, Any]:
    """The identity of a scoring, for JSON: all that its losses and utilities depend on. Unfinished work is resumed only
    for the same identity. It includes every key of the recipe except `WITHOUT_EFFECT`, so that no new key can be
    forgotten. `recipe`: its values by dotted key; `digests`: of each trusted set."""
    return {
        **asdict(replace(description, date="", result_digest=None)),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "recipe": {key: value for key, value in recipe.items() if key not in WITHOUT_EFFECT},
        # Neither ZeRO-3's settings (offload, bucket sizes) nor the number of ranks changes a result.
        "deepspeed": {k: v for k, v in deepspeed_config.items() if k not in ("zero_optimization", "train_batch_size")},
        "sets": dict(digests),
    }


def _find_cluster(precision: str) -> Cluster | None:
    """This job's GPUs by their data sheet, or its CPUs, whose fastest matrix multiplication is the fast end of the
    range; None for an unknown GPU."""
    if device().type == "cuda":
        gpu = find_gpu(torch.cuda.get_device_name(device()))
    else:
        peak = measure_matmul_flops(DTYPES[precision]) / FAST.compute
        gpu = Gpu("CPU", 0, peak, 20e9, CPU.node_bandwidth, CPU.network_bandwidth, attention_flops=CPU.flops)
    return None if gpu is None else Cluster(gpu, layout.size("job"), num_local_ranks())


def _describe(checkpoint: ScoredCheckpoint | None) -> str:
    return "" if checkpoint is None else f", checkpoint of step {checkpoint.step}"
