"""Loading into shards: every byte is read by the rank that keeps it, and the shards equal those of transformers, where
the first rank reads everything and broadcasts."""

import ctypes
import gc
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3MoeConfig

from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import write_model
from tests.helpers.soak import IS_SOAK
from vcore_ds.common import text as progress_module
from vcore_ds.common.errors import UserError
from vcore_ds.config.sections import LoraConfig, OptimizerConfig
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.engine import sharded_loading
from vcore_ds.engine.export_shards import save_hugging_face
from vcore_ds.engine.sharded_loading import load_and_broadcast, load_sharded
from vcore_ds.engine.zero3 import Engine, build_optimizer
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.lora import add_lora
from vcore_ds.models.safetensors_ranges import WINDOW_BYTES, read_header

pytestmark = pytest.mark.dist

SIZES = dict(vocab_size=127, hidden_size=40, intermediate_size=75, num_hidden_layers=2)
"""2 does not divide a bias of 75, and 3 not the 5,080 numbers of an embedding: shards have padding."""


def write_random_model(folder: Path, config: Any, dtype: torch.dtype = torch.float32, **options: Any) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():  # norms and biases would be all ones and zeros
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, **options)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model folders that are read by range."""
    root = tmp_path_factory.mktemp("models")
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    qwen3 = tiny.qwen3(**SIZES).config
    llama = LlamaConfig(
        **SIZES,
        **heads,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    qwen2 = Qwen2Config(**SIZES, **heads, tie_word_embeddings=True)
    neox = GPTNeoXConfig(**SIZES, num_attention_heads=4)
    folders = {
        "qwen3": write_random_model(root / "qwen3", qwen3),
        "qwen3, bf16": write_random_model(root / "qwen3_bf16", qwen3, torch.bfloat16),
        "qwen3, parts": write_random_model(root / "qwen3_parts", qwen3, max_shard_size="20KB"),
        "llama, bf16": write_random_model(root / "llama", llama, torch.bfloat16),
        "qwen2, tied": write_random_model(root / "qwen2", qwen2),
        "gpt_neox, renamed": write_random_model(root / "neox", neox),
        "exported": str(root / "exported"),
    }
    assert len(list(Path(folders["qwen3, parts"]).glob("*.safetensors"))) > 3
    assert "embed_out.weight" in read_header(Path(folders["gpt_neox, renamed"], "model.safetensors"))
    run_ranks(write_export, 2, str(write_model(root / "base")), folders["exported"])
    return folders


def write_export(base: str, folder: str) -> None:
    """Export an untrained engine, in two files."""
    config = tiny.deepspeed_config(bf16=True)
    model = TokenLossModel(load_sharded(base, config, **make_options(bf16=True)))
    engine = Engine(model, build_optimizer(model, OptimizerConfig(learning_rate=0.01)), config)
    save_hugging_face(engine, load_tokenizer(base), base, Path(folder), max_file_bytes=40_000)


def make_options(*, bf16: bool = False) -> dict[str, Any]:
    return dict(dtype=torch.bfloat16 if bf16 else torch.float32, attention="auto", gradient_checkpointing=False)


@contextmanager
def counting_reads() -> Iterator[list[int]]:
    """Record the bytes of every `os.preadv` inside the block."""
    preadv, read = os.preadv, []

    def count(*arguments: Any) -> int:
        read.append(preadv(*arguments))
        return read[-1]

    with patch.object(os, "preadv", count):
        yield read


@contextmanager
def counting_broadcasts() -> Iterator[list[int]]:
    """Record the number of elements of every DeepSpeed broadcast inside the block."""
    broadcast, numels = deepspeed.comm.broadcast, []

    def count(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        numels.append(tensor.numel())
        return broadcast(tensor, *arguments, **keywords)

    with patch.object(deepspeed.comm, "broadcast", count):
        yield numels


def strip_padding(parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's shard without padding."""
    shard = parameter.ds_tensor
    return shard[: max(0, min(shard.numel(), parameter.ds_numel - layout.rank("shards") * shard.numel()))]


def find_differences(model: PreTrainedModel, expected: PreTrainedModel) -> list[str]:
    """Names of parameters and buffers that are not equal bit for bit, and whether the configuration differs."""
    pairs = zip(model.named_parameters(), expected.named_parameters(), strict=True)
    wrong = [
        name
        for (name, a), (other, b) in pairs
        if name != other or a.ds_shape != b.ds_shape or a.requires_grad != b.requires_grad
        or a.dtype != b.dtype or not torch.equal(strip_padding(a), strip_padding(b))
    ]  # fmt: skip
    pairs = zip(model.named_buffers(), expected.named_buffers(), strict=True)
    wrong += [name for (name, a), (_, b) in pairs if a.dtype != b.dtype or not torch.equal(a, b)]
    if model.config.to_dict() != expected.config.to_dict() or model.training != expected.training:
        wrong.append("the configuration")
    return wrong


def load_both_ways(folders: dict[str, str]) -> dict[tuple[str, bool], tuple[list[str], int, list[int], str, str]]:
    """Differences, bytes read by this rank, broadcasts, and digests of the adapters of both ways, by folder and
    precision; the first two folders in both precisions, the others in one."""
    outcomes = {}
    for i, (name, folder) in enumerate(folders.items()):
        for bf16 in (False, True) if i < 2 or IS_SOAK else (i % 2 == 0,):
            config = tiny.deepspeed_config(bf16=bf16)
            torch.manual_seed(7)
            with counting_reads() as read, counting_broadcasts() as broadcasts:
                model = load_sharded(folder, config, **make_options(bf16=bf16))
            adapters = hash_adapters(model)
            torch.manual_seed(7)
            expected = load_and_broadcast(folder, config, **make_options(bf16=bf16))
            adapters_expected = hash_adapters(expected)
            wrong = find_differences(model, expected)
            outcomes[name, bf16] = wrong, sum(read), broadcasts, adapters, adapters_expected
    return outcomes


def hash_adapters(model: PreTrainedModel) -> str:
    """Digest of new adapters, which are not sharded yet."""
    linear = "query_key_value" if model.config.model_type == "gpt_neox" else "q_proj"
    adapted = add_lora(model, LoraConfig(rank=4, alpha=8, target_modules=[linear]))
    digest = hashlib.sha256()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            digest.update(parameter.detach().float().numpy().tobytes())
    adapted.unload()
    return digest.hexdigest()


@pytest.mark.parametrize("num_ranks", [1, 3, *([2] if IS_SOAK else [])])
def test_shards_equal_those_of_the_broadcast(folders: dict[str, str], num_ranks: int) -> None:
    ranks = run_ranks(load_both_ways, num_ranks, folders)
    for name, bf16 in ranks[0]:
        case, stored_bytes = f"{name}, run in {'bf16' if bf16 else 'fp32'}", count_weight_bytes(folders[name])
        results = [outcomes[name, bf16] for outcomes in ranks]
        assert [wrong for wrong, *_ in results] == [[]] * num_ranks, case
        assert sum(num_bytes for _, num_bytes, *_ in results) == stored_bytes, f"{case}: each byte once"
        assert max(num_bytes for _, num_bytes, *_ in results) < 1.02 * stored_bytes / num_ranks + 200, case
        assert all(broadcasts == [] for _, _, broadcasts, _, _ in results), case
        assert len({digest for *_, adapters, expected in results for digest in (adapters, expected)}) == 1, case


def count_weight_bytes(folder: str) -> int:
    """Bytes of all tensors in a folder's files."""
    headers = 0
    for path in Path(folder).glob("*.safetensors"):
        headers += 8 + int.from_bytes(path.read_bytes()[:8], "little")
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) - headers


# ---- adapters ------------------------------------------------------------------------------------------------------


def shard_adapters(folder: str, json_changes: dict[str, Any]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, this rank's shard, the unsharded adapter as this rank initialised it)."""
    config = tiny.deepspeed_config()
    config["zero_optimization"] |= json_changes
    torch.manual_seed(layout.rank("job"))
    model = TokenLossModel(add_lora(load_sharded(folder, config, **make_options()), LoraConfig(rank=4, alpha=8)))
    unsharded = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_A" in name}
    engine = Engine(model, build_optimizer(model, OptimizerConfig(learning_rate=0.01)), config)
    return [(name, strip_padding(p).clone(), unsharded[name]) for name, p in engine.trainable if name in unsharded]


def test_adapters_are_still_broadcast(folders: dict[str, str]) -> None:
    """They are made after loading, by the same zero.Init that sharded the model without a broadcast."""
    first, second = run_ranks(shard_adapters, 2, folders["qwen3"], {})
    assert len(first) > 4
    for (name, a, unsharded), (_, b, other) in zip(first, second, strict=True):
        assert not torch.equal(unsharded, other), name
        assert torch.equal(torch.cat([a, b]), unsharded.flatten()), name


# ---- progress ------------------------------------------------------------------------------------------------------


def collect_progress_lines(folder: str) -> list[str]:
    progress_module.FIRST_LINE_SECONDS = progress_module.LINE_SECONDS = 0.0
    progress_module.Progress.__init__.__kwdefaults__["clock"] = lambda: (
        0.0
    )  # a line for each file, whatever the machine's load
    lines: list[str] = []
    load_sharded(folder, tiny.deepspeed_config(), **make_options(), say=lines.append)
    return lines


def test_only_the_first_rank_reports_progress(folders: dict[str, str]) -> None:
    lines, others = run_ranks(collect_progress_lines, 2, folders["qwen3, parts"])
    pattern = rf"Loading {re.escape(folders['qwen3, parts'])}, 0\.0 GB on each rank: (\d+)%, \d+s left"
    shares = [int(re.fullmatch(pattern, line)[1]) for line in lines]
    assert shares == sorted(shares) and shares[0] < 50 < shares[-1]
    assert others == []


# ---- weights that transformers has to read -------------------------------------------------------------------------


def load_and_listen(folder: str) -> tuple[list[str], list[str]]:
    lines: list[str] = []
    model = load_sharded(folder, tiny.deepspeed_config(), **make_options(), say=lines.append)
    return find_differences(model, load_and_broadcast(folder, tiny.deepspeed_config(), **make_options())), lines


def test_weights_that_need_conversion_are_read_by_transformers_and_broadcast(tmp_path: Path) -> None:
    experts = Qwen3MoeConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, moe_intermediate_size=16
    )
    folder = write_random_model(tmp_path / "experts", experts)
    (wrong, lines), (others_wrong, others_lines) = run_ranks(load_and_listen, 2, folder)
    assert (wrong, others_wrong, others_lines) == ([], [], [])
    (line,) = lines
    assert line.startswith(f"{folder}: weights are read by one process, since ") and "experts.0." in line


# ---- weights that cannot be used -----------------------------------------------------------------------------------


def load_and_catch(root: str) -> dict[str, str]:
    """For each case in `root`, load on each rank from `./model` in its working directory, `rank0` or `rank1`, as on
    nodes with separate copies; returns the errors' messages. In the case `cut`, the last rank's files are truncated
    once their headers are read."""
    read_ranges, messages = sharded_loading.read_ranges, {}

    def truncate_and_read(wanted: list, progress: Any) -> None:
        for file in {one.stored.file for one in wanted}:
            os.truncate(file, file.stat().st_size // 2)
        read_ranges(wanted, progress)

    for case in sorted(Path(root).iterdir()):
        os.chdir(case / f"rank{layout.rank('job')}")
        is_cut = case.name == "cut" and layout.rank("job") == layout.size("job") - 1
        with patch.object(sharded_loading, "read_ranges", truncate_and_read if is_cut else read_ranges):
            try:
                load_sharded("./model", tiny.deepspeed_config(), **make_options())
                messages[case.name] = ""
            except UserError as error:
                messages[case.name] = str(error)
    return messages


def test_weights_that_cannot_be_used_are_refused_on_all_ranks(folders: dict[str, str], tmp_path: Path) -> None:
    """Other sizes than the configuration's are reported here for a hub id; for a folder, `check_model_folder` does so
    before."""
    folder_of_rank_1 = {"truncated": "qwen3, parts", "cut": "qwen3", "other": "qwen3, bf16", "sizes": "qwen3"}
    for case, name in folder_of_rank_1.items():
        shutil.copytree(folders["qwen3" if case == "other" else name], tmp_path / case / "rank0" / "model")
        shutil.copytree(folders[name], tmp_path / case / "rank1" / "model")
    part = sorted((tmp_path / "truncated" / "rank1" / "model").glob("*.safetensors"))[1]
    part.write_bytes(part.read_bytes()[:-4])
    for path in (tmp_path / "sizes").glob("*/model/config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 76}))
    messages, others = run_ranks(load_and_catch, 2, str(tmp_path))
    assert messages == others
    assert f"{part.name}: not a complete safetensors file" in messages["truncated"]
    no_weights = "model.path: ./model: no weights can be read on rank 1 (host "
    assert no_weights in messages["cut"] and "ended at" in messages["cut"]
    assert "found other weights on rank 1 (host " in messages["other"]
    assert "the weights do not fit config.json: found " in messages["sizes"]


# ---- memory --------------------------------------------------------------------------------------------------------


def read_process_memory() -> int:
    """Bytes of memory of this process without mapped files, which the kernel can drop."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def measure_loading(folder: str) -> tuple[int, int]:
    """(bytes of this rank's shards, peak of the memory that loading adds)."""
    before, highest, done = read_process_memory(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, read_process_memory() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_sharded(folder, tiny.deepspeed_config(), **make_options())
    done.set()
    watcher.join()
    return sum(parameter.ds_tensor.numel() * 4 for parameter in model.parameters()), highest


LARGE = {"read in place": torch.float32, "cast": torch.bfloat16}
"""Dtypes in which the model of the memory test is stored."""


def return_freed_memory() -> None:
    """Make glibc return freed memory of 64 KiB or more at once. It would keep some of it, by chance as much as the
    model's, and the test measures the memory that loading needs."""
    libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3
    assert libc.mallopt(trim_threshold, 65536) and libc.mallopt(mmap_threshold, 65536)


def load_large_and_cached(root: Path, hub_id: str) -> tuple[dict[str, tuple[int, int]], tuple[list[str], list[str]]]:
    return_freed_memory()
    memory = {}
    for name in LARGE:
        memory[name] = measure_loading(str(root / name))
        gc.collect()
    with patch.multiple(constants, HF_HUB_CACHE=str(root / "hub"), HF_HUB_OFFLINE=True):
        return memory, load_and_listen(hub_id)


@pytest.fixture(scope="module")
def large_and_cached(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[Any]]:
    """Number of parameters of the large model, and for each of two ranks its memory and the comparison of the cached
    model."""
    root = tmp_path_factory.mktemp("large")
    for name, dtype in LARGE.items():
        model = tiny.qwen3(
            vocab_size=8192, hidden_size=1024, intermediate_size=3072, num_hidden_layers=6, head_dim=256, dtype=dtype
        )
        model.save_pretrained(root / name, max_shard_size="40MB")
        assert len(list((root / name).glob("*.safetensors"))) > 4
    cached = root / "hub" / "models--someone--parts"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folders["qwen3, parts"], cached / "snapshots" / ("0" * 40))
    results = run_ranks(load_large_and_cached, 2, root, "someone/parts")
    for name in LARGE:
        shutil.rmtree(root / name)
    return sum(parameter.numel() for parameter in model.parameters()), results


@pytest.mark.parametrize("name", LARGE)
def test_a_rank_holds_at_most_its_shards_and_a_window(large_and_cached: tuple[int, list[Any]], name: str) -> None:
    num_parameters, results = large_and_cached
    total = num_parameters * 4
    for memory, _ in results:
        shards, highest = memory[name]
        print(f"model {total / 2**20:.0f} MiB; a rank's shards {shards / 2**20:.0f}, highest {highest / 2**20:.0f} MiB")
        assert shards == pytest.approx(total / 2, rel=0.01)
        assert highest < shards + WINDOW_BYTES + 16 * 2**20


def test_a_hub_id_is_read_from_the_local_cache(large_and_cached: tuple[int, list[Any]]) -> None:
    assert [differences_and_lines for _, differences_and_lines in large_and_cached[1]] == [([], []), ([], [])]
