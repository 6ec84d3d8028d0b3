"""The parts of `make gpu`: what would crash first, what would be silently wrong, what is slow, in this order.

Limits are three to four times the seconds that a part took on one H200 with 16 cores (2026-11-27)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

RESULTS = "VCORE_DS_GPU_RESULTS"
"""Variable with the folder of a part's results; in a part's arguments it stands for the folder itself."""

IS_LOOPBACK = "VCORE_DS_GPU_LOOPBACK"
"""Variable of parts whose ranks `tests.gpu.node.loopback` starts on one device, instead of torchrun."""

CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Part:
    """A command and the question that it answers."""

    name: str
    question: str
    arguments: tuple[str, ...]
    """Arguments of Python."""
    stage: int = 0
    """Parts of a stage run at the same time."""
    limit_seconds: float = 570
    needed_seconds: float = 20
    """Seconds before the deadline without which the part does not begin."""
    variables: Mapping[str, str] = field(default_factory=dict)
    num_gpus: int = 1
    is_default: bool = True
    """Whether it runs without being named."""
    is_gate: bool = False
    """Whether later stages depend on it."""


def _tests(*arguments: str, num_workers: int = 0) -> tuple[str, ...]:
    workers = ("-n", str(num_workers)) if num_workers else ("-s",)
    return ("-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "--timeout=100", *workers, *arguments)


def _probe(*names: str) -> tuple[str, ...]:
    return ("-m", "tests.gpu.probe", *names)


QUESTIONS = {
    "steps": "Does a step of every method and estimator equal the CPU's?",
    "runs": "Do whole runs equal the CPU's, and resume?",
}


def _cases(kind: str, device: str, shard: int, num_shards: int) -> Part:
    is_cpu = device == "cpu"
    output = f"{RESULTS}/{kind}_{device}_{shard}.jsonl"
    return Part(
        f"{kind}_cpu_{shard}" if is_cpu else f"{kind}_{shard}",
        QUESTIONS[kind] + " The CPU's." * is_cpu,
        ("-m", "tests.gpu.cases", kind, device, output, "--shard", f"{shard}/{num_shards}"),
        stage=1,
        limit_seconds=180,
        needed_seconds=30,
        variables=CPU if is_cpu else {},
    )


def _loopback(name: str, question: str, stage: int, *arguments: str) -> Part:
    variables = {IS_LOOPBACK: "1", "OMP_NUM_THREADS": "1"}
    return Part(f"loopback_{name}", question, ("-m", *arguments), stage, 100, 40, variables)


LAUNCHER = "tests.gpu.node.loopback"
STEPS = "tests.gpu.node.steps"


def _speed(name: str, *options: str) -> tuple[str, ...]:
    return ("-m", "tests.benchmarks.gpu", *options, "--output", f"{RESULTS}/{name}")


ALL_METHODS = ("--methods", "sft", "jvp", "jvp, fused", "finite difference", "jvp, fused, rank 32")
FEW_METHODS = ("--methods", "sft", "jvp, fused", "jvp, fused, rank 32")

PARTS: tuple[Part, ...] = (
    Part("packages", "Do the packages import, is there a GPU?", _probe("imports", "device"), 0, 90, 5, is_gate=True),
    Part("matmul", "Are matrix products with fp32 results, grouped and in FP8 right?",
         _probe("products", "grouped", "fp8", "profiler"), 1, 100),
    Part("pointwise", "Are the kernels of norms, gates and rotations right?", _probe("pointwise"), 1, 120),
    Part("engine", "Does a step with NCCL run, and is a checkpoint staged in pinned memory?",
         _probe("nccl", "engine"), 1, 120),
    Part("attention", "Does attention with a gradient equal fp64?", _tests("tests/gpu/test_attention.py"), 1, 120),
    Part("kernel", "Does the kernel with a tangent equal fp64 in bf16?",
         _tests("tests/gpu/test_flash_tangent.py", "-k", "bfloat16", num_workers=4), 1, 180, 30),
    *(_cases("steps", "cuda", shard, 2) for shard in range(2)),
    _cases("steps", "cpu", 0, 1),
    *(_cases("runs", "cuda", shard, 4) for shard in range(4)),
    *(_cases("runs", "cpu", shard, 2) for shard in range(2)),
    Part("waits", "Where does the host wait in a step?", _tests("tests/gpu/test_synchronisations.py"), 1, 180, 30),
    _loopback("4", "Do steps of 4 ranks on one GPU equal the oracle's, over NCCL?", 2, LAUNCHER, "4", "-m", STEPS),
    _loopback("kill", "Do the others end in time when a rank of NCCL is lost?",
              2, "tests.gpu.node.kill", "--ranks", "2", "--shape", "tiny"),
    _loopback("2", "Do steps of 2 ranks on one GPU equal the oracle's, over NCCL?", 3, LAUNCHER, "2", "-m", STEPS),
    _loopback("resume", "Do killed runs of 4 ranks end as others do, on 2 ranks too?",
              3, "tests.gpu.node.resume", "--ranks", "4"),
    _loopback("commands", "Do preflight, score and asynchronous checkpoints work over NCCL?",
              3, "tests.gpu.node.commands", "--ranks", "2", "--shape", "tiny"),
    Part("small", "Does a real shape train, and are utilities in bf16 right?",
         _speed("small", "--shape", "0.6b", "--layers", "8", "--tokens", "8192", "--rounds", "2"),
         4, 110, 30),
    Part("speed_8b", "How fast is a step of the 8B shape, cut to 8 layers?",
         _speed("speed_8b", "--shape", "8b", "--layers", "8", "--rounds", "2", *FEW_METHODS), 5, 120, 50),
    Part("speed_0.6b", "How fast is a step of 0.6B?",
         _speed("speed_0.6b", "--shape", "0.6b", "--rounds", "3", *ALL_METHODS), 6, 150, 60),
    Part("memory", "Is the memory of a step what is estimated?", _tests("tests/gpu/test_memory.py"), 7, 110, 50),
    Part("kernel_rest", "Does the kernel with a tangent equal fp64 in fp16 and fp32?",
         _tests("tests/gpu/test_flash_tangent.py", "-k", "float16 and not bfloat16 or float32", num_workers=8),
         8, 120, 45),
    Part("profile_8b", "Which operators take the time of a step of the 8B shape?",
         _speed("profile_8b", "--shape", "8b", "--layers", "8", "--rounds", "1", "--profile", *FEW_METHODS),
         9, 150, 90),
    Part("speed_1.7b", "How fast is a step of 1.7B?",
         _speed("speed_1.7b", "--shape", "1.7b", "--rounds", "3", *FEW_METHODS), 8, 300, 60, is_default=False),
    Part("overlap", "Are all-gathers and reduce-scatters on separate streams right?",
         _tests("tests/gpu/test_overlap.py"), 8, 400, 60, is_default=False),
    Part("calibrate", "What do these numbers say of the plan of another run?",
         ("-m", "tests.gpu.calibrate"), 9, 200, 60, is_default=False),
    Part("gathers", "Are sequential all-gathers faster on all GPUs of this machine?",
         ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "gpu",
          *_speed("gathers", "--shape", "1.7b", "--rounds", "5", "--methods", "sft", "jvp, fused"),
          "--deepspeed-config", "zero3_bf16_large.json", "zero3_bf16_sequential.json"),
         9, 400, 90, num_gpus=2, is_default=False),
)  # fmt: skip
