"""`lasting_imports`: no search for garbage inside, and none among what is left; an ordinary process afterwards."""

import subprocess
import sys

CODE = """
import gc
from vcore_ds.imports import lasting_imports

try:
    with lasting_imports():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
        raise ImportError
except ImportError:
    pass
assert gc.isenabled() and gc.get_freeze_count() > 1000
assert not any(kept is made for kept in gc.get_objects())
frozen = gc.get_freeze_count()
with lasting_imports():
    assert gc.isenabled()
    later = [[] for _ in range(1000)]
assert gc.get_freeze_count() <= frozen and any(kept is later for kept in gc.get_objects())
"""


def test_what_is_made_inside_is_left_alone_and_only_once() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
