"""Exported programs give the results of the network, in PyTorch and in onnxruntime."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
import pytest
import torch

from poecaps import Architecture, CapsuleNetwork
from poecaps.export import export_encoder, export_generator, write_onnx
from poecaps.kernels.cpu import routing
from tests.systems import needs_links

if TYPE_CHECKING:
    from pathlib import Path

    from torch.export import ExportedProgram


@pytest.fixture(scope="module")
def network() -> CapsuleNetwork:
    """A network with all parts, and weights large enough that the votes disagree."""
    shape = Architecture(
        image_shape=(3, 21, 20),
        features=16,
        experts=((6, 5),),
        iterations=2,
        normalize="outputs",
        whiten=True,
        equalized_components=3,
        pixel_decoder=True,
        margin=4,
        even_overlap=True,
    )
    generator = torch.Generator().manual_seed(0)
    made = CapsuleNetwork(shape, generator=generator).eval()
    for layer in (*made.encoders, *made.decoders):
        layer.reset_parameters(std=2.0, generator=generator)
    with torch.no_grad():
        made.preprocessing.fit([made.activations(torch.rand(50, 3, 21, 20, generator=generator))])
    return made


@pytest.fixture(scope="module")
def programs(network: CapsuleNetwork) -> tuple[ExportedProgram, ExportedProgram]:
    """Without a warning that programs without operators are slower: none else can be ONNX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "MIN_MULTIPLICATIONS", 0)
        found = export_encoder(network), export_generator(network)
    assert all(layer.backend is None for layer in (*network.encoders, *network.decoders))
    return found


@pytest.fixture
def images(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(7, 3, 21, 20, generator=generator)


@torch.no_grad()
def test_an_exported_program_computes_the_same(
    network: CapsuleNetwork,
    programs: tuple[ExportedProgram, ExportedProgram],
    images: torch.Tensor,
    tmp_path: Path,
) -> None:
    encoder, generator = programs
    torch.export.save(encoder, tmp_path / "encoder.pt2")
    encode = torch.export.load(tmp_path / "encoder.pt2").module()
    decode = generator.module()
    for count in (1, 7):
        codes = network.encode(images[:count])
        torch.testing.assert_close(encode(images[:count]), codes)
        torch.testing.assert_close(decode(codes), network.decode(codes))


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*:FutureWarning"
)  # torch's exporter calls a function that torch has deprecated
@torch.no_grad()
@needs_links
def test_onnxruntime_computes_the_same(
    network: CapsuleNetwork,
    programs: tuple[ExportedProgram, ExportedProgram],
    images: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, program in zip(("encoder", "generator"), programs, strict=True):
        monkeypatch.setattr(f"poecaps.export.export_{name}", lambda _, program=program: program)
    files = write_onnx(network, tmp_path / "new" / "folder")
    for file in files:  # again, where somebody else has placed links
        file.replace(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    write_onnx(network, tmp_path / "new" / "folder")
    assert sorted(file.name for file in files[0].parent.iterdir()) == [
        "encoder.onnx",
        "generator.onnx",
    ]
    assert not any(file.is_symlink() for file in files)
    encoder, generator = (
        onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]) for file in files
    )
    for count in (1, 7):
        codes = network.encode(images[:count])
        assert codes.std() > 0.05
        (found,) = encoder.run(["codes"], {"images": images[:count].numpy()})
        np.testing.assert_allclose(found, codes.numpy(), atol=1e-5)
        (drawn,) = generator.run(["images"], {"codes": codes.numpy()})
        np.testing.assert_allclose(drawn, network.decode(codes).numpy(), atol=1e-4)


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_a_missing_package_is_named(
    network: CapsuleNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"^ONNX needs {missing}; pip install 'poecaps\[onnx\]'$"
    ):
        write_onnx(network, tmp_path / "out")
    assert not (tmp_path / "out").exists()
