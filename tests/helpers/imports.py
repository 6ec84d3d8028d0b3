"""What every rank imports; imported once by the server that ranks are forked from."""

import vcore_ds.run  # noqa: F401
