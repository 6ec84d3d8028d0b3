"""Models and data sets on the Hugging Face hub."""

from pathlib import Path
from typing import Literal

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.paths import can_be_hub_id

CONNECTION_SECONDS = 10.0


def check_on_hub(name: str, kind: Literal["model", "dataset"], where: str = "", *, asks: bool = True) -> None:
    """Raise UserError for a name that is no file or folder, is not in the hub's cache, and cannot be on the hub, is not
    there, or cannot be looked up now: for a mistyped folder, libraries retry each of their requests for over a minute.
    `where` begins the message. `asks`: whether the hub may be contacted; else an id that it may have passes."""
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"
    if Path(name).exists() or cached.is_dir():
        return
    missing = f"{where}{name}: no such folder (looked from {Path.cwd()})"
    if not can_be_hub_id(name):
        raise UserError(f"{missing}, and not a hub id (owner/name)")
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{missing}, and not in the cache of the hub, which is not asked where HF_HUB_OFFLINE is set")
    if not asks:
        return
    from huggingface_hub import HfApi  # half a second
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=CONNECTION_SECONDS)
    except RepositoryNotFoundError:
        raise UserError(f"{missing}, and not on the hub, or private (`hf auth login`)") from None
    except HfHubHTTPError:  # such as a gated model: the library says what to do
        return
    except Exception as error:  # of the HTTP client, whose classes depend on its version
        raise UserError(
            f"{missing}, and the hub cannot be reached: {first_line(error)}; download it "
            "elsewhere (`hf download`) and name its folder"
        ) from None
