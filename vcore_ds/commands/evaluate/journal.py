"""Answers as they come, on the disk, so that an evaluation that was killed resumes."""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from vcore_ds.files.aside import written_aside
from vcore_ds.models.generation import StopReason


@dataclass(frozen=True)
class Request:
    """One answer to draw."""

    problem_id: str
    sample: int
    prompt: str
    """The whole prompt, rendered by the chat template."""
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        return self.problem_id, self.sample


@dataclass(frozen=True)
class Generation:
    """What the model answered."""

    output: str
    stop_reason: StopReason
    num_tokens: int
    """The end token included."""


class Journal:
    """The answers of one task: a line of JSON each, flushed to the disk, on which progress is reported."""

    def __init__(self, path: Path, task: str, num_requests: int):
        """Reads the answers that an earlier attempt has left; a line that was cut off is removed. Raises OSError."""
        self._path, self._task, self._num_requests = path, task, num_requests
        self._found: dict[tuple[str, int], Generation] = {}
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
        for line in lines:
            with suppress(ValueError, TypeError, KeyError):
                values = json.loads(line)
                key = values.pop("problem_id"), values.pop("sample")
                self._found[key] = Generation(**values)
        with written_aside(path) as unfinished:
            unfinished.write_text("".join(map(_line, self._found, self._found.values())), encoding="utf-8")
        self._started = self._said = time.perf_counter()
        self._num_before = len(self._found)
        if self._num_before:
            print(f"{task}: {self._num_before:,} of {num_requests:,} answers are there already", flush=True)

    def get(self, request: Request) -> Generation | None:
        return self._found.get(request.key)

    def append(self, requests: Sequence[Request], generations: Sequence[Generation]) -> None:
        """Adds answers; what is there already stays. Raises OSError."""
        new = {
            request.key: generation
            for request, generation in zip(requests, generations, strict=True)
            if request.key not in self._found
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, new, new.values())))
            file.flush()
            os.fsync(file.fileno())
        self._found |= new
        self._say_progress()

    def _say_progress(self) -> None:
        """Every ten seconds, and at the end."""
        now, num_done = time.perf_counter(), len(self._found)
        if now - self._said < 10 and num_done < self._num_requests:
            return
        self._said = now
        minutes = (now - self._started) / 60
        left = minutes / (num_done - self._num_before) * (self._num_requests - num_done)
        print(
            f"{self._task}: {num_done:,} of {self._num_requests:,} answers, {minutes:.1f} min"
            + (f", about {left:.1f} min left" if num_done < self._num_requests else ""),
            flush=True,
        )


def _line(key: tuple[str, int], generation: Generation) -> str:
    return json.dumps({"problem_id": key[0], "sample": key[1], **asdict(generation)}, ensure_ascii=False) + "\n"
