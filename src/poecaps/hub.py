"""Models on the Hugging Face Hub: download and upload.

`huggingface_hub` is imported when it is first needed; ``pip install 'poecaps[hub]'`` installs it.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poecaps import card, models
from poecaps._files import ModelError, atomic_write, read_bytes, write_json
from poecaps.network import CapsuleNetwork
from poecaps.serialization import CONFIG, WEIGHTS
from poecaps.training import record

if TYPE_CHECKING:
    import torch

__all__ = ["from_pretrained", "push_to_hub", "write_repository"]
REPOSITORY = r"\w[\w.-]*/[\w.-]+"  # owner and name


def from_pretrained(
    model: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
    token: str | bool | None = None,
) -> CapsuleNetwork:
    """Load a model of the package, from a folder or from the Hugging Face Hub, frozen as by `load`.

    Parameters
    ----------
    model
        Name of a model that comes with poecaps, such as ``"mnist"``, a folder written by
        `CapsuleNetwork.save` or by a training run, or the name of a repository on the Hub, such as
        ``"me/digits"``.
    device
        Device of the model.
    revision, cache_dir, force_download, local_files_only, token
        For the Hub; see `huggingface_hub.snapshot_download`.

    Raises
    ------
    FileNotFoundError
        If there is no such model, and the name cannot be that of a repository.
    ModuleNotFoundError
        If `model` is not a folder and huggingface_hub is not installed.
    ModelError
        If its files are damaged, not written by poecaps, or of another format version.
    """
    is_local = models.is_shipped(model) or Path(model).is_dir()
    if is_local or not re.fullmatch(REPOSITORY, os.fspath(model)):
        return models.load(model, device)
    folder = _huggingface_hub().snapshot_download(
        repo_id=os.fspath(model),
        allow_patterns=[CONFIG, WEIGHTS],
        revision=revision,
        cache_dir=cache_dir,
        force_download=force_download,
        local_files_only=local_files_only,
        token=token,
    )
    return CapsuleNetwork.load(folder, device)


def push_to_hub(
    network: CapsuleNetwork,
    repo_id: str,
    *,
    run: str | os.PathLike[str] | None = None,
    half: bool = False,
    licence: str = "unknown",
    private: bool | None = None,
    token: str | bool | None = None,
    branch: str | None = None,
    create_pr: bool | None = None,
    commit_message: str = "Add a model of poecaps",
) -> str:
    """Upload a network to the Hugging Face Hub, with a model card and a picture of its samples.

    Parameters
    ----------
    network
        Trained.
    repo_id
        Name of the repository, such as ``"me/digits"``; created if it does not exist.
    run
        Folder of the training run of the network. The card then states how it was trained and,
        after `poecaps evaluate`, its measures. Paths and names of the machine are left out.
    half
        Whether the large tensors are rounded to float16; see `CapsuleNetwork.save`.
    licence
        Licence of the weights in the notation of the Hub, such as ``"mit"``.
    private, token, branch, create_pr, commit_message
        For the Hub; see `huggingface_hub.HfApi.create_repo` and `upload_folder`.

    Returns
    -------
    str
        The address of the commit.

    Raises
    ------
    ModuleNotFoundError
        If huggingface_hub is not installed.
    FileNotFoundError
        If `run` is not the folder of a run.
    """
    api = _huggingface_hub().HfApi(token=token)
    with tempfile.TemporaryDirectory(prefix="poecaps-") as folder:
        write_repository(network, folder, run=run, name=repo_id, half=half, licence=licence)
        repository = api.create_repo(repo_id=repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=folder,
            commit_message=commit_message,
            revision=branch,
            create_pr=create_pr,
        )
    return str(commit)


def write_repository(
    network: CapsuleNetwork,
    folder: str | os.PathLike[str],
    *,
    run: str | os.PathLike[str] | None = None,
    name: str | None = None,
    half: bool = False,
    licence: str = "unknown",
    shipped: bool = False,
) -> None:
    """Write a folder in the form of a repository on the Hub.

    It contains config.json, model.safetensors, a model card and the picture of the card.

    Parameters
    ----------
    network
        The network to save.
    folder
        Created if it does not exist.
    run
        Folder of the training run of the network. Its record is copied without information about
        the machine, and its evaluation is shown in the card. A card that was edited is copied
        unchanged.
    name
        Name of the model; by default that of the folder.
    half
        Whether the large tensors are rounded to float16; see `CapsuleNetwork.save`.
    licence
        Licence of the weights in the notation of the Hub, such as ``"mit"``.
    shipped
        Whether the model comes with poecaps.

    Raises
    ------
    FileNotFoundError
        If `run` is not the folder of a run.
    """
    folder, source = Path(folder), None if run is None else Path(run)
    if source is not None and not (source / record.RECORD).is_file():
        raise FileNotFoundError(f"{source} does not contain a run: {record.RECORD} is missing")
    for each in () if source is None else (source / card.CARD, source / card.PICTURE):
        if each.is_symlink():  # in a run from elsewhere, it may lead to any file of this user
            raise ModelError(f"{each} is a symbolic link, so it is not copied; put the file there")
    network.save(folder, half=half)
    if source is not None:
        record.write(folder, record.without_machine(record.read(source)))
        measured = card.read_measured(source)
        if measured is not None:
            write_json(folder / card.MEASURED, measured | {"data": Path(measured["data"]).name})
        for file in (card.CARD, card.PICTURE):
            if (source / file).is_file():
                with atomic_write(folder / file) as copy:
                    copy.write(read_bytes(source / file))
    card.write(folder, network, name=name, licence=licence, shipped=shipped)


def _huggingface_hub() -> Any:
    """Import huggingface_hub, or raise an error that names the extra to install."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        message = "the Hugging Face Hub needs huggingface_hub; pip install 'poecaps[hub]'"
        raise ModuleNotFoundError(message, name="huggingface_hub") from error
    return huggingface_hub
