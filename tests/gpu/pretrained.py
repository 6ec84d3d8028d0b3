"""Accuracy of utilities on this device, for the quickstart's pretrained model, by `vcore-ds fidelity`.

python -m tests.gpu.pretrained
"""

import sys

from vcore_ds.commands.cli import main
from vcore_ds.commands.quickstart.session import DATA, RECIPE
from vcore_ds.commands.quickstart.traces import prepare_quickstart_data

if __name__ == "__main__":
    data = prepare_quickstart_data(DATA)
    overrides = [f"model.path={data.model}", f"data.train_path={data.train}"]
    sys.exit(main(["fidelity", str(RECIPE), *overrides, "--output", str(DATA.parent / "gpu" / "fidelity")]))
