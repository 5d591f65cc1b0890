"""Files of the Hugging Face hub, and why one cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from .errors import first_line


class NotOnHubError(Exception):
    """The hub, or its local cache, does not give out a file; the message is the reason alone."""


def download(name: str, file: str, kind: Literal["model", "dataset"] = "model") -> Path:
    """Return the path of a repository's file, cached or downloaded.

    Raises:
        NotOnHubError: for the caller to put into its own sentence.
    """
    from huggingface_hub import errors, hf_hub_download

    try:
        return Path(hf_hub_download(name, file, repo_type=kind))
    except errors.GatedRepoError:
        reason = "the hub gives access only to those who accepted its terms and logged in"
    except errors.RepositoryNotFoundError:
        reason = f"the hub has no such {kind}, or it is private"
    except errors.LocalEntryNotFoundError:
        reason = "it is not in the local cache and the hub cannot be reached"
    except errors.EntryNotFoundError:
        reason = "it has none"
    except Exception as error:  # whatever the network and the hub's client come up with
        reason = first_line(error)
    raise NotOnHubError(reason)
