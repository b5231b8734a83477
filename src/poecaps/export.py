"""Export of a trained network to other programs: `torch.export` and ONNX.

The encoder, from images to codes, and the generator, from codes to images, are two programs, both
for any batch size. ``pip install 'poecaps[onnx]'`` installs the packages that ONNX needs.
"""

from __future__ import annotations

import importlib
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from poecaps._modules import device_of
from poecaps.layer import CapsuleRouting

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

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
        Call it as ``program.module()(images)``, save it with `torch.export.save`, compile it, or
        convert it to ONNX. It does not need poecaps. Layers that name a backend, as in
        ``network.encoders[0].backend = "simd"``, are operators of poecaps in it: faster, but it
        needs poecaps, and cannot become ONNX.
    """
    return _export(_Encoder(network), network.architecture.image_shape)


def export_generator(network: CapsuleNetwork) -> ExportedProgram:
    """Export `CapsuleNetwork.decode`: (B, J, D) → (B, C, H, W), for any B.

    The densities of codes are not exported: draw codes with `CapsuleNetwork.sample`, or squash
    random numbers, and pass them to the program.

    Parameters
    ----------
    network
        Trained; it is put into evaluation mode.
    """
    return _export(_Generator(network), network.architecture.experts[-1])


def _export(program: nn.Module, shape: tuple[int, ...]) -> ExportedProgram:
    program.eval()
    example = torch.rand(2, *shape, device=device_of(program))
    # Strict mode keeps len(tensor) symbolic; non-strict mode would fix the batch size there.
    batch = {0: torch.export.Dim("batch")}
    with torch.no_grad(), _portable(program):
        return torch.export.export(program, (example,), dynamic_shapes=(batch,), strict=True)


@contextmanager
def _portable(program: nn.Module) -> Iterator[None]:
    """Let layers that name no backend be exported as the reference, for programs and for ONNX."""
    layers = [
        each
        for each in program.modules()
        if isinstance(each, CapsuleRouting) and each.backend is None
    ]
    for layer in layers:
        layer.backend = "reference"
    try:
        yield
    finally:
        for layer in layers:
            layer.backend = None


def write_onnx(network: CapsuleNetwork, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write `encoder.onnx` and `generator.onnx` into a folder.

    The input of the encoder is called ``images`` and its output ``codes``; for the generator it is
    the other way round. The packages onnx and onnxscript must be installed.

    Parameters
    ----------
    network
        Trained; it is put into evaluation mode.
    folder
        Created if it does not exist.

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
    names = ("images", "codes"), ("codes", "images")
    for file, program, (given, result) in zip(files, programs, names, strict=True):
        exported = torch.onnx.export(
            program, dynamo=True, input_names=[given], output_names=[result], verbose=False
        )
        assert exported is not None  # noqa: S101 (None only if torch is given a file to write)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            exported.save(Path(temporary) / file.name)
            for part in Path(temporary).iterdir():  # large weights are in a file of their own
                part.replace(folder / part.name)  # never through a symbolic link
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
