"""A trained network for other programs: `torch.export` and ONNX.

The encoder, from images to codes, and the generator, from codes to images, are two programs, for any number of images
at a time. ``pip install 'poecaps[onnx]'`` brings what ONNX needs.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    import os

    from torch import Tensor
    from torch.export import ExportedProgram

    from poecaps.network import CapsuleNetwork

__all__ = ["export_encoder", "export_generator", "write_onnx"]


class _Encoder(nn.Module):
    def __init__(self, network: CapsuleNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network.encode(images)


class _Generator(nn.Module):
    def __init__(self, network: CapsuleNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, codes: Tensor) -> Tensor:
        return self.network.decode(codes)


def export_encoder(network: CapsuleNetwork) -> ExportedProgram:
    """Export `CapsuleNetwork.encode`: (B, C, H, W) → (B, J, D), for any B.

    Parameters
    ----------
    network
        Trained; it is put into evaluation mode.

    Returns
    -------
    torch.export.ExportedProgram
        To be called as ``program.module()(images)``, saved with `torch.export.save`, compiled, or turned into ONNX.
    """
    return _export(_Encoder(network), network, network.architecture.image_shape)


def export_generator(network: CapsuleNetwork) -> ExportedProgram:
    """Export `CapsuleNetwork.decode`: (B, J, D) → (B, C, H, W), for any B.

    What draws codes stays behind: draw them with `CapsuleNetwork.sample`, or with random numbers of your own that are
    squashed, and give them to the program.

    Parameters
    ----------
    network
        Trained; it is put into evaluation mode.
    """
    return _export(_Generator(network), network, network.architecture.experts[-1])


def _export(program: nn.Module, network: CapsuleNetwork, shape: tuple[int, ...]) -> ExportedProgram:
    program.eval()
    example = torch.rand(2, *shape, device=network.preprocessing.mean.device)
    # Strict, because it follows len(tensor); the other way takes the number of images for a constant there.
    batch = {0: torch.export.Dim("batch")}
    with torch.no_grad():
        return torch.export.export(program, (example,), dynamic_shapes=(batch,), strict=True)


def write_onnx(network: CapsuleNetwork, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write `encoder.onnx` and `generator.onnx` into a folder.

    The encoder's input is called ``images`` and its output ``codes``, and for the generator it is the other way round.
    Needs the packages onnx and onnxscript.

    Parameters
    ----------
    network
        Trained; it is put into evaluation mode.
    folder
        Where to; it is made if need be.

    Returns
    -------
    The two files.

    Raises
    ------
    ModuleNotFoundError
        If onnx or onnxscript is not installed.
    """
    _require("onnx")
    _require("onnxscript")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "encoder.onnx", folder / "generator.onnx"
    programs = export_encoder(network), export_generator(network)
    for file, program, names in zip(
        files, programs, (("images", "codes"), ("codes", "images")), strict=True
    ):
        made = torch.onnx.export(
            program, dynamo=True, input_names=names[:1], output_names=names[1:], verbose=False
        )
        assert made is not None  # noqa: S101 (it is None only where torch writes a file itself)
        made.save(file)
    return files


def _require(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(
            f"ONNX needs {module}; pip install 'poecaps[onnx]'", name=module
        ) from error
