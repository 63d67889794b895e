"""Puts exports on the Hugging Face Hub: each checkpoint is a revision of one repository, and main is the newest one.

A revision is a branch with the name of the checkpoint's folder, such as step_000012000. A tag would not do: it stays at
its first commit, and a checkpoint may be pushed again, with a license or after an upload that was cut off.
A branch begins at the repository's first commit, and its export comes in one commit: cut off in between, it holds
nothing. A copy of main would hold another step's weights.

huggingface_hub takes the token from HF_TOKEN or from `hf auth login`, and the Hub's address from HF_ENDPOINT.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmlp_scale.checkpoint.format import STEP_FOLDER, folder_name
from gmlp_scale.errors import InputError


def open_repository(name: str) -> str:
    """OWNER/NAME of a model repository for `name`, which may lack the owner. One that is not there is created, public.

    Raises:
        InputError: there is no token, or it may not write there, or the name is none.
        ConnectionError: the Hub is out of reach or fails.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise InputError(f"no token for the Hub, to write {name}: set HF_TOKEN, or run `hf auth login`")
    with _errors_of_the_hub(name):
        return HfApi().create_repo(name, exist_ok=True).repo_id


def push(folder: Path, repository: str, step: int) -> None:
    """Uploads an export as the step's revision, and as main too unless a later step is there. Raises as above."""
    from huggingface_hub import HfApi

    hub, revision = HfApi(), folder_name(step)
    with _errors_of_the_hub(repository):
        first_commit = hub.list_repo_commits(repository)[-1].commit_id
        hub.create_branch(repository, branch=revision, revision=first_commit, exist_ok=True)
        branches = [branch.name for branch in hub.list_repo_refs(repository).branches]
        is_newest = revision == max(name for name in branches if STEP_FOLDER.fullmatch(name))
        for branch in [revision, "main"] if is_newest else [revision]:
            message = f"The checkpoint after step {step}"
            hub.upload_folder(repo_id=repository, folder_path=folder, revision=branch, commit_message=message)


@contextmanager
def _errors_of_the_hub(name: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    try:
        yield
    except HFValidationError as error:
        raise InputError(str(error)) from error
    except (HTTPError, ConnectionError, TimeoutError, RuntimeError) as error:
        found = error
        if isinstance(error, RuntimeError) and error.__cause__:
            found = error.__cause__  # an upload's, which says more
        if isinstance(found, HfHubHTTPError):
            raise _refusal(name, found) from error
        raise ConnectionError(
            f"the Hub was not reached to write {name} ({type(found).__name__}: {found}): check that this machine has a "
            "network, and HF_ENDPOINT if it is set. Then export again, to another --output if it was given"
        ) from error


def _refusal(name: str, error: OSError) -> OSError | InputError:
    """What to raise for a HfHubHTTPError, which has the Hub's answer."""
    code, found = error.response.status_code, error.server_message or " ".join(str(error).split())
    if code in (401, 403):
        return InputError(
            f"the Hub does not let this token write {name} ({code}: {found}): give a token that may, in HF_TOKEN or by "
            "`hf auth login`, or the name of a repository of yours"
        )
    if 400 <= code < 500 and code not in (408, 429):
        return InputError(f"the Hub refuses {name} ({code}: {found}): change what it names")
    return ConnectionError(f"the Hub failed to take {name} ({code}: {found}): try again later")
