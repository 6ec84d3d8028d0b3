"""`vcore-ds export --push`: a result as a repository on the hub, in one commit, without a path of this machine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,  # the HTTP library's own, for what is no answer of the hub
    OfflineModeIsEnabled,
)
from peft.utils import CONFIG_NAME

from vcore_ds.errors import UserError, first_line
from vcore_ds.files.base_model import BaseModel, is_hub_id

_STATUS = {
    401: "the hub does not know its token; log in again (hf auth login), or set HF_TOKEN",
    402: "the account has no room for it; see https://huggingface.co/settings/billing",
    403: "the token may not write there; take one with write access to this owner",
    409: "there is a repository of that name; name another one, or add --update to commit to it",
}
"""What the hub's refusals mean, by HTTP status."""


def check_repository(repository: str, *, update: bool) -> HfApi:
    """The hub, where `repository` can be made, or (`update`) may be there.

    Before an export, which takes minutes.

    Raises:
        UserError: the name is none, there is no token, the hub cannot be reached or refuses, or the repository is
            there.
    """
    if not is_hub_id(repository):
        raise UserError(f"--push: found {repository}; expected OWNER/NAME, a repository on the hub")
    if get_token() is None:
        raise UserError(
            "--push: found no token for the hub; expected one with write access: log in (hf auth login), or set "
            "HF_TOKEN"
        )
    api = HfApi()
    with _explained(repository):
        api.whoami()
        if api.repo_exists(repository) and not update:
            raise UserError(f"--push: {repository}: {_STATUS[409]}")
    return api


def push_folder(api: HfApi, folder: Path, repository: str, base: BaseModel, *, public: bool, update: bool) -> str:
    """Makes the repository, private unless `public`, and commits all files of `folder` at once; returns its address.

    The base model in an adapter's configuration becomes its id on the hub, or its name where that is not known; the
    files here stay as they are.

    Raises:
        UserError: the hub cannot be reached, or refuses. What was uploaded before that is not visible.
    """
    operations = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content: Path | bytes = path
        if path.name == CONFIG_NAME:
            config = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": base.public_name}
            content = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
        operations.append(CommitOperationAdd(path.relative_to(folder).as_posix(), content))
    with _explained(repository):
        # Without `private` the hub makes what the owner's settings say, mostly a public one.
        api.create_repo(repository, private=not public, exist_ok=update)
        try:
            api.create_commit(repository, operations, commit_message="Result of a run of vcore_ds")
        except ValueError as error:  # how huggingface_hub words a card that the hub refuses
            raise UserError(f"--push: {repository}: the hub refuses the model card: {error}") from None
    return f"{api.endpoint}/{repository}"


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = _STATUS.get(status, f"the hub answered {status}: {first_line(error)}")
        raise UserError(f"--push: {repository}: {said}") from None
    except OfflineModeIsEnabled:
        raise UserError(
            f"--push: {repository}: found HF_HUB_OFFLINE=1 (or TRANSFORMERS_OFFLINE=1); expected it to be unset"
        ) from None
    except (HTTPError, ConnectionError, TimeoutError) as error:
        raise UserError(
            f"--push: {repository}: the hub cannot be reached ({first_line(error)}); expected a connection to "
            "https://huggingface.co, or to what HF_ENDPOINT says. The exported folder can be pushed later: run the "
            "same command on a machine with a connection"
        ) from None
