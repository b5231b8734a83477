"""Models on the Hugging Face Hub: what `CapsuleNetwork.from_pretrained` and `push_to_hub` do.

Nothing here imports `huggingface_hub` before it is needed; `pip install 'poecaps[hub]'` brings it.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poecaps import card, models
from poecaps._files import read_json, write_json
from poecaps.network import CapsuleNetwork
from poecaps.training import record

if TYPE_CHECKING:
    import torch

FILES = ("config.json", "model.safetensors")
REPOSITORY = r"\w[\w.-]*/[\w.-]+"  # what a model on the Hub is called: its owner and its name
DOWNLOAD = ("revision", "cache_dir", "force_download", "local_files_only", "token")


def from_pretrained(
    model: str | os.PathLike[str], *, device: torch.device | str = "cpu", **options: Any
) -> CapsuleNetwork:
    """Open a network of the package, from a folder or from the Hub; see `CapsuleNetwork.from_pretrained`."""
    if models.is_shipped(model) or Path(model).is_dir():
        return models.load(model, device)
    if not re.fullmatch(REPOSITORY, os.fspath(model)):
        models.find(model)  # refuses it
    network: CapsuleNetwork = (
        _mixin().from_pretrained(os.fspath(model), device=device, **options).network
    )
    return network


def push_to_hub(
    network: CapsuleNetwork,
    repo_id: str,
    *,
    run: str | os.PathLike[str] | None = None,
    half: bool = False,
    licence: str = "unknown",
    **options: Any,
) -> str:
    """Put a network on the Hub, and return the address of the commit; see `CapsuleNetwork.push_to_hub`."""
    prepare = functools.partial(lay_out, network, run=run, name=repo_id, half=half, licence=licence)
    options = {"commit_message": "Add a model of poecaps"} | options
    return str(_mixin()(network, prepare).push_to_hub(repo_id, **options))


def lay_out(
    network: CapsuleNetwork,
    folder: str | os.PathLike[str],
    *,
    run: str | os.PathLike[str] | None = None,
    name: str | None = None,
    half: bool = False,
    licence: str = "unknown",
    shipped: bool = False,
) -> None:
    """Write a folder as the Hub expects it: config.json, model.safetensors, a model card and its picture.

    Parameters
    ----------
    network
        What to save.
    folder
        Where to; it is made if need be.
    run
        Folder of the run that the network comes from: of its record everything that is not of the machine is kept, and
        its evaluation goes into the card. A card that was edited there is taken as it is.
    name
        What the model is called; by default as its folder.
    half
        Whether the large tensors are rounded to float16; see `CapsuleNetwork.save`.
    licence
        Of the weights, as the Hub writes it, such as ``"mit"``.
    shipped
        Whether the model comes with poecaps.

    Raises
    ------
    FileNotFoundError
        If `run` holds no run.
    """
    folder, source = Path(folder), None if run is None else Path(run)
    if source is not None and not (source / record.RECORD).is_file():
        raise FileNotFoundError(f"{source} holds no run: there is no {record.RECORD} in it")
    network.save(folder, half=half)
    if source is not None:
        record.write(folder, record.without_machine(record.read(source)))
        if (source / card.MEASURED).is_file():
            measured = read_json(source / card.MEASURED)
            write_json(folder / card.MEASURED, measured | {"data": Path(measured["data"]).name})
        for file in (card.CARD, card.PICTURE):
            if (source / file).is_file():
                shutil.copyfile(source / file, folder / file)
    card.write(folder, network, name=name, licence=licence, shipped=shipped)


@functools.cache
def _mixin() -> Any:
    """Make the class through which huggingface_hub uploads and downloads."""
    try:
        from huggingface_hub import ModelHubMixin, snapshot_download
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        message = "the Hugging Face Hub needs huggingface_hub; pip install 'poecaps[hub]'"
        raise ModuleNotFoundError(message, name="huggingface_hub") from error

    class Shared(ModelHubMixin, library_name="poecaps"):  # type: ignore[misc, unused-ignore]
        """A network on its way to the Hub or from it."""

        def __init__(self, network: Any, prepare: Any = None) -> None:
            self.network, self.prepare = network, prepare

        def _save_pretrained(self, save_directory: Path) -> None:
            self.prepare(save_directory)

        @classmethod
        def _from_pretrained(cls, *, model_id: str, **options: Any) -> Any:
            wanted = {name: options[name] for name in DOWNLOAD if name in options}
            folder = snapshot_download(repo_id=model_id, allow_patterns=list(FILES), **wanted)
            return cls(CapsuleNetwork.load(folder, options["device"]))

    return Shared
