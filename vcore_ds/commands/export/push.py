"""`vcore-ds export --push`: commit a result to a repository on the hub, without local paths."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HTTPError  # the HTTP library's own
from peft.utils import CONFIG_NAME

from vcore_ds.common.errors import UserError
from vcore_ds.models.model_identity import BaseModel, is_hub_id


def check_repository(repository: str, *, update: bool) -> HfApi:
    """Return the hub's API, before an export, which takes minutes.

    Raises UserError where the name is invalid, the hub cannot be reached or refuses the token, or the repository exists
    without `update`.
    """
    if not is_hub_id(repository):
        raise UserError(f"--push: found {repository}; expected OWNER/NAME, a repository on the hub")
    api = HfApi()
    with _explaining(repository):
        api.whoami()
        exists = api.repo_exists(repository)
    if exists and not update:
        raise UserError(
            f"--push: {repository}: there is a repository of that name; name another one, or add --update to commit to "
            "it"
        )
    return api


def push_folder(api: HfApi, folder: Path, repository: str, base: BaseModel, *, public: bool, update: bool) -> str:
    """Create the repository, private unless `public`, commit all files of `folder` at once, and return its address.

    An adapter's configuration is committed with the base model's id on the hub, or its name, in place of its path.

    Raises UserError where the hub cannot be reached or refuses; nothing is visible then.
    """
    files: dict[str, bytes | Path] = {path.name: path for path in sorted(folder.iterdir())}
    if CONFIG_NAME in files:
        config = json.loads((folder / CONFIG_NAME).read_bytes()) | {"base_model_name_or_path": base.public_name}
        files[CONFIG_NAME] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    with _explaining(repository):
        # Without `private` the owner's settings decide, and make most repositories public.
        api.create_repo(repository, private=not public, exist_ok=update)
        operations = [CommitOperationAdd(name, content) for name, content in files.items()]
        api.create_commit(repository, operations, commit_message="Result of a run of vcore_ds")
    return f"{api.endpoint}/{repository}"


@contextmanager
def _explaining(repository: str) -> Iterator[None]:
    try:
        yield
    except (OSError, HTTPError, ValueError) as error:  # no token, no connection, a refusal; ValueError of the card
        raise UserError(
            f"--push: {repository}: {' '.join(str(error).split())}. Expected a connection to the hub (HF_ENDPOINT) and "
            "a token that may write there (hf auth login, or HF_TOKEN). The same command pushes an export again"
        ) from None
