"""Tests that need several GPUs: collectives, checkpoints, faults and speed on the 8, 4 or 2 GPUs of a node.

    make gpu8                                       all parts, in the order of their value
    make gpu8 ONLY="resume kill"                    some of them
    python -m tests.gpu.node.session --list         the parts
    python -m tests.gpu.node.session --try cpu      the same scripts on two ranks without a GPU, in tiny sizes
    python -m tests.gpu.node.session --try simulated
    python -m tests.gpu.node.session --try loopback   four ranks on one GPU over NCCL, or without it over gloo

Parts are run, stopped and skipped as those of `make gpu` (`tests.gpu.session`), one after another. Results are in
`runs/gpu8`, with `--try` in `runs/gpu8_cpu` and `runs/gpu8_simulated`.
"""

import argparse
import os
import platform
import sys

import torch

from tests.gpu.node.launch import make_rank_arguments
from tests.gpu.parts import IS_LOOPBACK, RESULTS, STEPS, Part
from tests.gpu.results import describe_devices
from tests.gpu.session import list_parts, make_environment, read_arguments, run_session
from tests.helpers.commands import REPOSITORY
from tests.helpers.simulated_cuda.build import compile_device
from tests.helpers.simulated_cuda.ranks import simulated_environment
from vcore_ds.distributed.device import uses_gpu

SECONDS = 1800
LIMIT_SECONDS = 570
TRIED_RANKS = {"cpu": 2, "simulated": 2, "loopback": 4}
FILES = ("zero3_bf16_large.json", "zero3_bf16_sequential.json", "zero3_bf16_large.json:reduce_bucket_size=500000000")


def make_parts(num_ranks: int, *, is_tiny: bool = False) -> tuple[Part, ...]:
    """The parts for this number of ranks, in the order of their value, each a stage."""
    ranks, shape = ("--ranks", str(num_ranks)), ("--shape", "tiny" if is_tiny else "0.6b")
    if is_tiny:
        sizes, low_rank = ("--shape", "tiny", "--tokens", "64", "--packs", "1", "--rounds", "1"), "jvp, fused, rank 8"
    else:
        sizes, low_rank = ("--shape", "32b", "--tokens", "16384", "--rounds", "3"), "jvp, fused, rank 32"
    layers = (
        *(*sizes, "--layers", "2", "--methods", "sft", "jvp, fused", low_rank),
        *("--profile", "--output", f"{RESULTS}/layers", "--deepspeed-config", *FILES),
    )
    questions = {
        f"steps_{num_ranks}": (
            "Do steps equal the oracle's under every kind of parallelism?", make_rank_arguments(num_ranks, STEPS)
        ),
        "resume": ("Do killed runs end as others do, on fewer ranks too?", ("-m", "tests.gpu.node.resume", *ranks)),
        "commands": (
            "Do preflight, score and asynchronous checkpoints work?", ("-m", "tests.gpu.node.commands", *ranks, *shape)
        ),
        "kill": ("Do the others end in time when a rank is lost?", ("-m", "tests.gpu.node.kill", *ranks, *shape)),
        "layers": (
            "How fast are two layers of Qwen3-32B, and is their memory the plan's?",
            make_rank_arguments(num_ranks, "tests.benchmarks.gpu", *layers),
        ),
        "calibrate": ("Which speeds does plan read from a run?", ("-m", "tests.gpu.calibrate", *ranks, *shape)),
    }  # fmt: skip
    if num_ranks > 2:
        question = "Do steps on half of the ranks equal the oracle's?"
        questions[f"steps_{num_ranks // 2}"] = question, make_rank_arguments(num_ranks // 2, STEPS)
    return tuple(
        Part(name, question, arguments, stage, LIMIT_SECONDS)
        for stage, (name, (question, arguments)) in enumerate(questions.items())
    )


def choose_num_ranks(num_gpus: int) -> int:
    """8, 4 or 2 of the GPUs; 0 if there are fewer."""
    return next((number for number in (8, 4, 2) if number <= num_gpus), 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--try", dest="tried", choices=TRIED_RANKS, help="with fewer GPUs, in tiny sizes")
    tried = parser.parse_known_args()[0].tried
    num_gpus = 0 if tried else torch.cuda.device_count()
    num_ranks = TRIED_RANKS[tried] if tried else choose_num_ranks(num_gpus)
    if tried == "loopback":
        os.environ[IS_LOOPBACK] = "1"
    parts = make_parts(num_ranks or 8, is_tiny=tried is not None)
    folder = REPOSITORY / "runs" / ("gpu8" if tried is None else f"gpu8_{tried}")
    arguments = read_arguments(str(__doc__), str(folder), SECONDS, parser)
    if arguments.list:
        list_parts(parts)
    if num_ranks == 0:
        sys.exit(
            f"make gpu8: torch {torch.__version__} finds {num_gpus} GPUs on {platform.node()}; expected 2 or more. "
            "`make gpu` is for one GPU; TRY=cpu or TRY=simulated runs the same scripts without any"
        )
    environment, device = dict(os.environ), ""
    if tried == "cpu" or (tried == "loopback" and not uses_gpu()):
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        device = f"{num_ranks} x CPU, torch {torch.__version__}, gloo"
    elif tried == "simulated":
        if torch.version.cuda is not None:
            sys.exit(
                f"make gpu8: torch {torch.__version__} is built for CUDA; a simulated device needs a build for CPUs"
            )
        cache = REPOSITORY / ".pytest_cache" / "d" / "simulated_cuda"
        cache.mkdir(parents=True, exist_ok=True)
        environment = simulated_environment(compile_device(cache), for_commands=True)
        device = f"{num_ranks} x simulated device, torch {torch.__version__}, gloo"
    run_session(parts, arguments, make_environment(environment), device or describe_devices(num_ranks), num_ranks)


if __name__ == "__main__":
    main()
