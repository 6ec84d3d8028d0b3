"""What a run says after its first step of the time that the others take."""

import pytest

from vcore_ds.commands.quickstart.session import SHORTER
from vcore_ds.train.console import Console
from vcore_ds.train.loop import LONG_SECONDS, say_rest


@pytest.mark.parametrize(
    ("seconds", "advice", "begin"),
    [
        (59.0, SHORTER, ""),
        (60.0, SHORTER, "Time: 9 more steps in about 1m00s, until 2"),
        (LONG_SECONDS, SHORTER, "Time: 9 more steps in about 15m00s, until 2"),
        (LONG_SECONDS + 1, SHORTER, "warning: 9 more steps in about 15m01s, until 2"),
        (LONG_SECONDS + 1, "", "Time: 9 more steps in about 15m01s, until 2"),
    ],
)
def test_a_long_run_is_told_at_once(
    seconds: float, advice: str, begin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say_rest(Console(enabled=True), seconds, 9, advice)
    said = capsys.readouterr().out
    assert said.startswith(begin) and bool(said) == bool(begin)
    is_long = begin.startswith("warning")
    for key in ("schedule.num_steps=", "data.cutoff_length=", "batch.global_size="):
        assert (key in said) == is_long
