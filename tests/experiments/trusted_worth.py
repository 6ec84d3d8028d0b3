"""When trusted traces alone are not enough, on a real model: SmolLM2-135M-Instruct, LoRA, word problems.

    python -m tests.experiments.trusted_worth run                         what is missing
    python -m tests.experiments.trusted_worth report                      the tables of docs/reports/whole-traces.md

Settings, rows, sizes, measures and predictions are on the page, committed before the first reported run. All runs are
in one process in fp32: training is a loop in PyTorch, selection uses `vcore_ds.token_utilities`. Results are appended
to trusted_worth.jsonl, and finished runs are skipped."""

import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from launch_scripts.wrong_traces import NAMES, STORIES, THINGS
from tests.experiments.settings import read_results
from tests.experiments.task import measure_trace_separation
from tests.helpers.commands import REPOSITORY
from vcore_ds import probe_direction, token_utilities
from vcore_ds.commands.page import Table
from vcore_ds.common.statistics import cell, paired
from vcore_ds.data.answers import final_answer

MODEL = REPOSITORY / "runs" / "quickstart_data" / "SmolLM2-135M-Instruct"
RESULTS = Path(__file__).with_suffix(".jsonl")
SEEDS = (0, 1, 2, 3, 4)
NUM_TRAIN, NUM_SPOILED, NUM_TRUSTED, NUM_PROBLEMS = 32, 19, 8, 36
NUM_STEPS, BATCH, LEARNING_RATE = 8, 4, 2e-3
NUM_KEPT = NUM_TRAIN // 4
MAX_NEW_TOKENS = 48

ADDED_FIRST = (
    "{name} has {start} {thing}, finds {more} and gives away {less}. How many does {name} have?",
    "A box has {start} {thing}. {name} puts in {more} and takes out {less}. How many are in it?",
)
TOGETHER = (
    "{name} has {start} {thing}. A friend has {less} fewer. How many do both have together?",
    "A box has {start} {thing}, a bag has {less} fewer. How many are in both together?",
)
TYPES = (STORIES, ADDED_FIRST, TOGETHER)  # types of problems; the first is the one of launch_scripts/wrong_traces.py


@dataclass(frozen=True)
class Setting:
    num_types: int = 1
    num_trusted_spoiled: int = 0
    # How authors spoil a trace: they add instead of subtracting (wrong rule), or copy the right answer
    spoiled: str = "wrong rule"


SETTINGS = {
    "a quarter of the trusted traces wrong": Setting(num_trusted_spoiled=2),
    "trusted traces of one type of three": Setting(num_types=3),
    "copied answers": Setting(spoiled="copied answer"),
    "all trusted traces right": Setting(),
}
SFT, SELECTION, POOL = ROWS = ("sft", "sft, quarter of highest utility", "sft on the pool alone")


@dataclass(frozen=True)
class Trace:
    prompt: str
    solution: str
    answer: str
    spoiled_answer: str
    is_spoiled: bool
    type: int


def make_data(setting: Setting, seed: int) -> dict[str, list[Trace]]:
    """Training, trusted and evaluated traces, determined by the seed. No two have the same type and numbers."""
    problems = [_problems(seed, kind) for kind in range(len(TYPES))]
    author = random.Random(f"authors {seed}")

    def take(number: int, num_types: int, num_spoiled: int) -> list[Trace]:
        errs = [i < num_spoiled for i in range(number)]
        author.shuffle(errs)
        return [_trace(*next(problems[i % num_types]), errs[i], setting) for i in range(number)]

    return {
        "train": take(NUM_TRAIN, setting.num_types, NUM_SPOILED),
        "trusted": take(NUM_TRUSTED, 1, setting.num_trusted_spoiled),
        "problems": take(NUM_PROBLEMS, setting.num_types, 0),
    }


def _problems(seed: int, kind: int) -> Iterator[tuple[int, str, int, int, int]]:
    generator, seen = random.Random(f"{seed} {kind}"), set()
    while True:
        start = 10 * generator.randint(2, 9)
        less, more = 10 * generator.randint(1, start // 10 - 1), generator.randint(1, 9)
        story, name, thing = map(generator.choice, (TYPES[kind], NAMES, THINGS))
        numbers = (start, less) if TYPES[kind] is TOGETHER else (start, less, more)  # 36 pairs, of which 32 are needed
        if numbers not in seen:
            seen.add(numbers)
            yield kind, story.format(name=name, thing=thing, start=start, less=less, more=more), start, less, more


def _trace(kind: int, problem: str, start: int, less: int, more: int, is_spoiled: bool, setting: Setting) -> Trace:
    right, wrong = (_solve(kind, start, less, more, sign) for sign in ("-", "+"))
    copied = (f"The answer is \\boxed{{{right[1]}}}.", right[1])
    spoiled = wrong if setting.spoiled == "wrong rule" else copied
    prompt = f"<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
    return Trace(prompt, (spoiled if is_spoiled else right)[0], right[1], spoiled[1], is_spoiled, kind)


def _solve(kind: int, start: int, less: int, more: int, sign: str) -> tuple[str, str]:
    """A worked solution and its answer; with the sign `+` by the wrong rule."""
    change = -less if sign == "-" else less
    if kind == 1:
        middle, total = start + more, start + more + change
        steps = f"{start} + {more} = {middle}. {middle} {sign} {less} = {total}."
    else:
        middle, other = start + change, start if kind == 2 else more
        total = middle + other
        steps = f"{start} {sign} {less} = {middle}. {middle} + {other} = {total}."
    return f"{steps} The answer is \\boxed{{{total}}}.", str(total)


class Learner:
    """The model with a new adapter: training, scores and answers."""

    def __init__(self, base: Any, tokenizer: Any, seed: int):
        torch.manual_seed(seed)
        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model: PeftModel = get_peft_model(base, lora)
        self.model.config.use_cache = False
        self._tokenizer, self._seed = tokenizer, seed
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=LEARNING_RATE, weight_decay=0.0)

    def close(self) -> None:
        """Remove the adapter from the model."""
        self.model.unload()

    def batch(self, traces: Sequence[Trace]) -> dict[str, Tensor]:
        """A right-padded batch; causal attention hides the padding from the tokens before it."""
        rows = []
        for trace in traces:
            prompt, solution = (
                self._tokenizer(text, add_special_tokens=False).input_ids
                for text in (trace.prompt, f"{trace.solution}<|im_end|>")
            )
            rows.append((prompt + solution, [-100] * len(prompt) + solution))
        longest = max(len(tokens) for tokens, _ in rows)
        end = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        return {
            "input_ids": torch.tensor([tokens + [end] * (longest - len(tokens)) for tokens, _ in rows]),
            "labels": torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows]),
        }

    def train(self, traces: Sequence[Trace]) -> None:
        """Take `NUM_STEPS` steps. Each epoch has every trace once, in a new order."""
        schedule = get_cosine_schedule_with_warmup(self._optimizer, 0, NUM_STEPS)
        order: list[int] = []
        generator = random.Random(f"order {self._seed}")
        for _ in range(NUM_STEPS):
            while len(order) < BATCH:
                order += generator.sample(range(len(traces)), len(traces))
            taken, order = order[:BATCH], order[BATCH:]
            self.losses([traces[i] for i in taken]).mean().backward()
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            schedule.step()

    def losses(self, traces: Sequence[Trace]) -> Tensor:
        """Mean loss of the tokens of each trace, `[B]`."""
        batch = self.batch(traces)
        labels = batch["labels"][:, 1:]
        rows, columns = (labels != -100).nonzero(as_tuple=True)
        causal_lm = self.model.get_base_model()
        hidden = causal_lm.model(batch["input_ids"][:, :-1]).last_hidden_state
        losses = torch.nn.functional.cross_entropy(
            causal_lm.lm_head(hidden[rows, columns]), labels[rows, columns], reduction="none"
        )
        return torch.stack([losses[rows == row].mean() for row in range(len(traces))])

    def utilities(self, traces: Sequence[Trace], trusted: Sequence[Trace]) -> Tensor:
        """Mean utility of the tokens of each trace along the gradient of the trusted traces, `[B]`."""
        batch = self.batch(traces)
        utilities = token_utilities(self.model, batch, probe_direction(self.model, [self.batch(trusted)]))
        return utilities.sum(1) / (batch["labels"] != -100).sum(1)

    @torch.no_grad()
    def answer(self, problems: Sequence[Trace]) -> list[str]:
        """Greedy answers."""
        end = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._tokenizer.padding_side = "left"
        inputs = self._tokenizer([problem.prompt for problem in problems], return_tensors="pt", padding=True)
        self.model.eval()
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        ends = {"max_new_tokens": MAX_NEW_TOKENS, "eos_token_id": end, "pad_token_id": end}
        outputs = self.model.generate(**inputs, **greedy, **ends, use_cache=True)
        self.model.train()
        answers = outputs[:, inputs["input_ids"].shape[1] :]
        return self._tokenizer.batch_decode(answers, skip_special_tokens=True)


def run_rows(new_learner: Callable[[], Learner], setting: Setting, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the results of all rows of a setting and seed."""
    data = make_data(setting, seed)
    train = data["train"]
    traces, measured = {SFT: train, POOL: data["trusted"]}, {}
    for row in ROWS:
        start = time.process_time()
        learner = new_learner()
        learner.train(traces[row])
        result = {"row": row, "cpu_seconds": time.process_time() - start, **measured.get(row, {})}
        yield result | evaluate(learner, data["problems"], setting)
        if row == SFT:
            start = time.process_time()
            utilities = learner.utilities(train, data["trusted"])
            seconds = time.process_time() - start
            kept = utilities.argsort(descending=True)[:NUM_KEPT]
            traces[SELECTION] = [train[i] for i in kept.tolist()]
            with torch.no_grad():
                losses = learner.losses(train)
            separation = _measure_separation(train, utilities, losses, kept, setting.num_types)
            measured[SELECTION] = {"cpu_seconds_score": seconds, **separation}
        learner.close()


def _measure_separation(
    traces: Sequence[Trace], utilities: Tensor, losses: Tensor, kept: Tensor, num_types: int
) -> dict[str, Any]:
    """How well utilities, and losses, tell spoiled traces from right ones."""
    is_spoiled = torch.tensor([trace.is_spoiled for trace in traces])
    kinds = torch.tensor([trace.type for trace in traces])
    by_type = [(utilities[kinds == kind], is_spoiled[kinds == kind]) for kind in range(num_types)]
    return {
        "auc": measure_trace_separation(utilities, is_spoiled),
        "auc_by_type": [measure_trace_separation(*one) for one in by_type],
        "auc_of_loss": measure_trace_separation(-losses, is_spoiled),
        "right_share_kept": float((~is_spoiled[kept]).float().mean()),
        "kept_by_type": torch.bincount(kinds[kept], minlength=num_types).tolist(),
    }


def evaluate(learner: Learner, problems: Sequence[Trace], setting: Setting) -> dict[str, Any]:
    """Share of right answers, in total and by type, and of answers like those of spoiled traces."""
    outputs = learner.answer(problems)
    answers = [final_answer(output, "math") if "\\boxed" in output else None for output in outputs]
    right = np.array([answer == problem.answer for answer, problem in zip(answers, problems, strict=True)])
    if setting.spoiled == "wrong rule":
        spoiled = [answer == problem.spoiled_answer for answer, problem in zip(answers, problems, strict=True)]
    else:
        spoiled = [re.search(r"\d = \d", output) is None for output in outputs]
    kinds = np.array([problem.type for problem in problems])
    return {
        "right": float(right.mean()),
        "right_by_type": [float(right[kinds == kind].mean()) for kind in range(setting.num_types)],
        "spoiled": float(np.mean(spoiled)),
        "outputs": outputs[:3],
    }


def run() -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for name, setting in SETTINGS.items():
        for seed in SEEDS:
            done = {r["row"] for r in read_results(RESULTS) if (r["setting"], r["seed"]) == (name, seed)}
            if done == set(ROWS):
                continue
            for result in run_rows(lambda seed=seed: Learner(base, tokenizer, seed), setting, seed):
                print(name, seed, result, flush=True)
                if result["row"] not in done:
                    with RESULTS.open("a") as file:
                        file.write(json.dumps({"setting": name, "seed": seed, **result}) + "\n")


def report() -> None:
    results = read_results(RESULTS)
    for name in SETTINGS:
        by_row = {row: {r["seed"]: r for r in results if (r["setting"], r["row"]) == (name, row)} for row in ROWS}
        if not by_row[SFT]:
            continue
        right = {row: {seed: 100 * r["right"] for seed, r in sorted(by_row[row].items())} for row in ROWS}
        table = []
        for row, by_seed in by_row.items():
            cells = [row, cell(list(right[row].values()), 0)]
            for other in (SFT, POOL):
                differences = paired(right[row], right[other])
                cells.append("" if row == other else cell(differences, 0, difference=True))
            by_type = 100 * np.mean([result["right_by_type"] for result in by_seed.values()], axis=0)
            cells += [", ".join(f"{value:.0f}" for value in values) for values in (right[row].values(), by_type)]
            table.append([*cells, cell([100 * result["spoiled"] for result in by_seed.values()], 0)])
        head = ["row", "right answers, %", "to `sft`", "to the pool alone", "seeds", "by type", "spoiled, %"]
        print(f"### {name}\n\n{Table('', head, table).markdown()}")
        for result in by_row[SELECTION].values():
            print({key: result[key] for key in ("seed", "auc", "auc_by_type", "auc_of_loss", "right_share_kept")})
        print()


if __name__ == "__main__":
    {"run": run, "report": report}[sys.argv[1]]()
