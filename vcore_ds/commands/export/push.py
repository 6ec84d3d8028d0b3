"""`vcore-ds export --push`: a result as a repository on the hub, in one commit, without a path of this machine."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError  # the HTTP library's own
from peft.utils import CONFIG_NAME

from vcore_ds.common.errors import UserError
from vcore_ds.models.model_identity import BaseModel, is_hub_id


def check_repository(repository: str, *, update: bool) -> HfApi:
    """The hub, where `repository` can be made, or (`update`) may exist. Called before an export, which takes minutes.

    Raises:
        UserError: the name is none, the hub does not know the token or cannot be reached, or the repository exists.
    """
    if not is_hub_id(repository):
        raise UserError(f"--push: found {repository}; expected OWNER/NAME, a repository on the hub")
    api = HfApi()
    with _explained(repository):
        api.whoami()
        exists = api.repo_exists(repository)
    if exists and not update:
        raise UserError(
            f"--push: {repository}: there is a repository of that name; name another one, or add --update to commit to "
            "it"
        )
    return api


def push_folder(api: HfApi, folder: Path, repository: str, base: BaseModel, *, public: bool, update: bool) -> str:
    """Makes the repository, private unless `public`, and commits all files of `folder` at once; returns its address.

    The base model in an adapter's configuration becomes its id on the hub, or its name where that is not known; the
    files here stay as they are.

    Raises:
        UserError: the hub cannot be reached, or refuses. What was uploaded before that is not visible.
    """
    with _explained(repository), TemporaryDirectory() as temporary:
        links = shutil.copytree(folder.absolute(), Path(temporary, "links"), copy_function=os.symlink)
        config = links / CONFIG_NAME
        if config.is_file():
            values = json.loads(config.read_text(encoding="utf-8")) | {"base_model_name_or_path": base.public_name}
            config.unlink()
            config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        # Without `private` the hub makes what the owner's settings say, mostly a public one.
        api.create_repo(repository, private=not public, exist_ok=update)
        api.upload_folder(repo_id=repository, folder_path=links, commit_message="Result of a run of vcore_ds")
    return f"{api.endpoint}/{repository}"


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    try:
        yield
    except (OSError, HTTPError, ValueError) as error:  # no token, no connection, a refusal; ValueError of the card
        raise UserError(
            f"--push: {repository}: {' '.join(str(error).split())}. Expected a connection to the hub (HF_ENDPOINT) and "
            "a token that may write there (hf auth login, or HF_TOKEN). An exported folder is pushed by repeating the "
            "command"
        ) from None
