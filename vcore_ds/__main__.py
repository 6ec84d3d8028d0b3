"""The command line, as `python -m vcore_ds` and for launchers: `deepspeed --module vcore_ds train RECIPE`."""

from vcore_ds.commands.cli import run

if __name__ == "__main__":
    run()
