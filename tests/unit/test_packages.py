"""Attribution of source files to the package, in tests of host-device synchronisations and races."""

from deepspeed.runtime import engine

from tests.helpers.packages import path_in_package
from vcore_ds.method import weights


def test_a_clone_in_a_folder_named_like_the_package_is_not_the_package() -> None:
    assert path_in_package(weights.__file__) == "vcore_ds/method/weights.py"
    assert path_in_package(engine.__file__) == "deepspeed/runtime/engine.py"
    for file in ("tests/unit/test_packages.py", ".venv/lib/python3.11/site-packages/torch/_tensor.py"):
        assert path_in_package(f"/home/me/vcore_ds/{file}") == path_in_package(f"/home/me/deepspeed/{file}") == ""
