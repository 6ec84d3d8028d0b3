"""Weights & Biases as a sink. What cannot be sent stays in the run's folder, for `wandb sync`."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vcore_ds.config.sections import TrackConfig
from vcore_ds.errors import first_line
from vcore_ds.track.console import Console

INIT_SECONDS = 60.0
"""Time to reach the server before the first step; after it the run continues offline."""

FINISH_SECONDS = 120.0
"""Time to send what is left at the end."""


class WandbLog:
    """A run on Weights & Biases, on rank 0 only. What WANDB_MODE, WANDB_ENTITY, WANDB_BASE_URL and WANDB_INIT_TIMEOUT
    say holds.

    Attributes:
        run_id: kept with the checkpoints, so that a resumed run continues in the same one.
    """

    def __init__(
        self,
        folder: Path,
        project: str,
        track: TrackConfig,
        config: Mapping[str, Any],
        console: Console,
        run_id: str | None = None,
    ):
        """Args:
        folder: the run's.
        config: the recipe's values.
        run_id: of the attempt before, None for a new run.
        """
        import wandb  # half a second, and only where it is asked for

        self.run_id = run_id or secrets.token_hex(4)
        init_seconds = float(os.environ.get("WANDB_INIT_TIMEOUT", INIT_SECONDS))
        settings = wandb.Settings(init_timeout=init_seconds, finish_timeout=FINISH_SECONDS, silent=True)
        options: dict[str, Any] = dict(
            project=project,
            name=folder.name,
            group=track.group,
            tags=track.tags,
            id=self.run_id,
            resume="allow",
            dir=str(folder),
            config=config,
            settings=settings,
        )
        try:
            self._run = wandb.init(**options)
        except (wandb.Error, OSError) as error:
            console.warn(
                f"run.wandb_project: Weights & Biases cannot be reached ({first_line(error)}); the run continues, and "
                f"is kept in {folder / 'wandb'}: send it later with `wandb sync {folder / 'wandb'}/offline-run-*`"
            )
            wandb.teardown()  # its service still holds the id for the attempt that has failed
            self._run = wandb.init(**options, mode="offline")
        # Steps after the last checkpoint come twice: by a step of our own, which may go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @property
    def url(self) -> str | None:
        """None offline."""
        return self._run.url

    def write(self, values: Mapping[str, float | int]) -> None:
        self._run.log(dict(values))

    def close(self) -> None:
        """Sends what is left, `FINISH_SECONDS` at most."""
        self._run.finish()
