"""Files of a network: saving and loading, half precision, damaged and foreign files."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import poecaps
from poecaps import CapsuleNetwork, ModelError
from poecaps.code_density import DOMAINS
from poecaps.serialization import (
    FORMAT,
    VERSION,
    _tensor_digest,
    load_state,
    read_metadata,
    read_tensors,
    write_tensors,
)
from poecaps.training.checkpoint import CHECKPOINT
from tests.networks import TINY, tiny_network, untrained


@pytest.fixture
def network(generator: torch.Generator) -> CapsuleNetwork:
    return tiny_network(generator)


def test_a_saved_network_is_loaded(
    network: CapsuleNetwork, tmp_path: Path, generator: torch.Generator
) -> None:
    network.save(tmp_path / "model")
    loaded = CapsuleNetwork.load(tmp_path / "model")
    assert loaded.architecture == network.architecture
    images = torch.rand(2, 1, 20, 19, generator=generator)
    assert torch.equal(loaded.reconstruct(images), network.reconstruct(images))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    loaded.reconstruct(images).numpy()  # no gradient to detach
    loaded.requires_grad_().reconstruct(images).sum().backward()
    assert loaded.encoders[0].weight.grad is not None
    assert not loaded.training


@pytest.fixture
def saved(network: CapsuleNetwork, tmp_path: Path) -> Path:
    network.save(tmp_path)
    return tmp_path


@pytest.fixture
def lively(generator: torch.Generator) -> CapsuleNetwork:
    """A network whose codes vary between images, as those of a trained one."""
    images = torch.rand(200, 1, 20, 19, generator=generator)
    return untrained(replace(TINY, whiten=True, equalized_components=3), images, generator)


def test_half_precision_changes_codes_and_images_little(
    lively: CapsuleNetwork, tmp_path: Path, generator: torch.Generator
) -> None:
    """Codes by less than 0.5 %, pixels by less than 5 of 255 levels, on average by 0.25."""
    lively.save(tmp_path, half=True)
    loaded = CapsuleNetwork.load(tmp_path)
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.float32}
    images = torch.rand(50, 1, 20, 19, generator=generator)

    def compare(ours: Tensor, theirs: Tensor) -> None:
        assert not torch.equal(ours, theirs)  # weights were rounded
        assert ours.std(0).mean() > 0.02  # images vary
        assert (ours - theirs).abs().max() < 5 / 255
        assert (ours - theirs).abs().mean() < 0.25 / 255

    with torch.no_grad():
        code = lively.encode(images)
        assert (loaded.encode(images) - code).norm() < 0.005 * code.norm()
        compare(lively.reconstruct(images), loaded.reconstruct(images))
        for domain in DOMAINS:
            ours, theirs = (
                each.generate(50, domain, generator=torch.Generator().manual_seed(3))
                for each in (lively, loaded)
            )
            compare(ours, theirs)


def test_half_precision_rounds_large_tensors_but_no_sensitive_ones(
    lively: CapsuleNetwork, tmp_path: Path
) -> None:
    lively.save(tmp_path / "whole")
    lively.save(tmp_path / "half", half=True)
    whole, half = (
        (tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "half")
    )
    assert 0.5 < half / whole < 0.65  # 0.51 for a network of the usual size
    written, _ = read_tensors(tmp_path / "half" / "model.safetensors")
    rounded = {name for name, tensor in written.items() if tensor.dtype == torch.float16}
    assert {
        "autoencoder.conv2_weight",
        "encoders.0.weight",
        "decoders.0.weight",
        "code_density.joint.mixture.factors",
    } <= rounded
    exact = lively.state_dict()
    for name in written.keys() - rounded:
        assert torch.equal(written[name], exact[name])
    sensitive = {
        name
        for name in exact
        if name.startswith("preprocessing.")
        or name.endswith((".mean", ".means", ".weights", ".balance"))
    }
    assert "preprocessing.factors" in sensitive
    assert len(sensitive) > 8
    assert not sensitive & rounded


def test_numbers_too_large_for_half_precision_raise_an_error(
    network: CapsuleNetwork, tmp_path: Path
) -> None:
    with torch.no_grad():
        network.decoders[0].weight[1, 2, 3, 4] = -70_000.0  # type: ignore[operator]
    with pytest.raises(
        ValueError, match=r"decoders\.0\.weight reaches 7e\+04, but .* float16 is 65504"
    ):
        network.save(tmp_path / "model", half=True)
    assert not (tmp_path / "model").exists()
    network.save(tmp_path / "model")


def test_tensors_too_small_for_half_precision_stay_in_float32(
    network: CapsuleNetwork, tmp_path: Path
) -> None:
    with torch.no_grad():
        network.encoders[0].weight.mul_(1e-6)  # type: ignore[operator]
    network.save(tmp_path, half=True)
    loaded = CapsuleNetwork.load(tmp_path)
    assert torch.equal(
        loaded.state_dict()["encoders.0.weight"], network.state_dict()["encoders.0.weight"]
    )
    assert not torch.equal(
        loaded.state_dict()["decoders.0.weight"], network.state_dict()["decoders.0.weight"]
    )


def test_undeclared_half_precision_raises_an_error(saved: Path, network: CapsuleNetwork) -> None:
    """In a model as well as in a checkpoint."""
    tensors, about = read_tensors(saved / "model.safetensors")
    lost = tensors | {"encoders.0.weight": tensors["encoders.0.weight"].half()}
    write_tensors(saved / "model.safetensors", lost, about)
    with pytest.raises(
        ModelError, match=r"encoders\.0\.weight is .* of float16, but must be .* of float32"
    ):
        CapsuleNetwork.load(saved)
    with pytest.raises(
        ModelError, match=r"encoders\.0\.weight is .* of float16, but must be .* of float32"
    ):
        load_state(network, lost, saved / "checkpoint.safetensors")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_or_truncated_file_raises_one_error(saved: Path, name: str) -> None:
    content = (saved / name).read_bytes()
    for length in (0, 1, 7, 100, len(content) // 2, len(content) - 2):
        (saved / name).write_bytes(content[:length])
        with pytest.raises(ModelError, match=name):
            CapsuleNetwork.load(saved)


def test_weights_are_needed_and_have_everything(saved: Path, network: CapsuleNetwork) -> None:
    (saved / "config.json").unlink()
    assert CapsuleNetwork.load(saved).architecture == network.architecture
    (saved / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"a trained model: model\.safetensors is missing"):
        CapsuleNetwork.load(saved)


def as_version_2(path: Path) -> None:
    """Write a file again as format version 2 had it: only its tensors have a checksum."""
    import safetensors.torch

    tensors, about = read_tensors(path)
    about = {name: value for name, value in about.items() if name != "architecture"}
    metadata = {"about": json.dumps(about | {"version": 2}), "sha256": _tensor_digest(tensors)}
    path.write_bytes(safetensors.torch.save(tensors, metadata))


def test_a_model_of_format_version_2_is_read(saved: Path, network: CapsuleNetwork) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"version": 2}))
    as_version_2(saved / "model.safetensors")
    loaded = CapsuleNetwork.load(saved)
    assert loaded.architecture == network.architecture
    assert all(
        torch.equal(value, loaded.state_dict()[name])
        for name, value in network.state_dict().items()
    )
    flip(saved / "model.safetensors", -5)
    with pytest.raises(ModelError, match="does not match its checksum"):
        CapsuleNetwork.load(saved)


@pytest.mark.parametrize("checksum", [None, 3, "", "0" * 64, "\u00e9"])
def test_a_file_without_a_valid_checksum_raises_an_error(saved: Path, checksum: Any) -> None:
    """Both in the form of this version and in that of version 2."""
    path = saved / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name in ("digest", "sha256"):
        about = {"about": header["__metadata__"]["about"], name: checksum}
        text = json.dumps(header | {"__metadata__": about}, separators=(",", ":")).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
            CapsuleNetwork.load(saved)


def test_config_and_weights_must_agree(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["architecture"]["iterations"] = 2
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config\.json differs from the architecture in model\."):
        CapsuleNetwork.load(saved)


def flip(path: Path, byte: int) -> None:
    """Change a bit of a file."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def test_an_altered_weight_is_detected(saved: Path) -> None:
    flip(saved / "model.safetensors", -5)
    with pytest.raises(ModelError, match="does not match its checksum"):
        CapsuleNetwork.load(saved)


def test_files_of_other_programs_and_later_versions_raise_an_error(saved: Path) -> None:
    tensors, about = read_tensors(saved / "model.safetensors")
    write_tensors(saved / "model.safetensors", tensors, about | {"version": 99})
    with pytest.raises(ModelError, match=r"\(format version 99\), .* version 3; upgrade poecaps"):
        CapsuleNetwork.load(saved)
    write_tensors(saved / "model.safetensors", tensors, {"format": "other"})
    with pytest.raises(ModelError, match="was not written by poecaps"):
        CapsuleNetwork.load(saved)
    few = {"preprocessing.mean": tensors["preprocessing.mean"]}
    write_tensors(saved / "model.safetensors", few, about)
    with pytest.raises(ModelError, match=r"does not match its architecture: .* is missing"):
        CapsuleNetwork.load(saved)


EARLIER = (
    r"^{} was written by an earlier version of poecaps \(format version 1\), "
    r"which this version cannot read; train it again$"
)


def test_a_model_of_format_version_1_is_read() -> None:
    """The numbers are those of the version of poecaps that trained and saved the model."""
    network = CapsuleNetwork.load(Path(__file__).parent / "version-1")
    images = torch.linspace(0, 1, 220).view(2, 1, 10, 11)
    code = network.encode(images)
    expected = [[0.427769, 0.719438], [0.353766, 0.585635]]
    torch.testing.assert_close(code.norm(dim=-1), torch.tensor(expected), rtol=1e-4, atol=0)
    decoded = network.decode(code)
    torch.testing.assert_close(
        decoded[:, 0, 4, 5], torch.tensor([0.743320, 0.744492]), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(
        network.free_energy(images), torch.tensor([-1.848967, -2.136988]), rtol=1e-4, atol=0
    )
    assert network.architecture.kernel_size == 3
    assert network.architecture.equalized_components == 2


def test_files_of_different_format_versions_raise_an_error(saved: Path) -> None:
    as_version_2(saved / "model.safetensors")
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"version": 1}))
    with pytest.raises(ModelError, match=r"config\.json and model\..* different format versions"):
        CapsuleNetwork.load(saved)


def test_other_files_of_format_version_1_raise_one_clear_error(saved: Path) -> None:
    path = saved / "model.safetensors"
    tensors, _ = read_tensors(path)
    write_tensors(path, tensors, {}, version=1)
    for read in (read_tensors, read_metadata):
        with pytest.raises(ModelError, match=EARLIER.format(re.escape(str(path)))):
            read(path)


def test_a_checkpoint_of_format_version_1_raises_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / CHECKPOINT
    write_tensors(path, {}, {"config": {"painter": {}}, "task": 0, "step": 0}, version=1)
    with pytest.raises(ModelError, match=EARLIER.format(re.escape(str(path)))):
        poecaps.resume(tmp_path)


def test_metadata_are_read_without_the_tensors(network: CapsuleNetwork, tmp_path: Path) -> None:
    for half in (False, True):
        network.save(tmp_path, half=half)
        path = tmp_path / "model.safetensors"
        assert read_metadata(path) == read_tensors(path)[1]
        assert read_metadata(path).get("half", False) is half
        flip(path, -5)
        assert read_metadata(path).get("half", False) is half  # no checksum is computed


@given(content=st.binary(max_size=200))
def test_metadata_of_random_bytes_raise_an_error(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    for prefix in (b"", len(content).to_bytes(8, "little")):
        path.write_bytes(prefix + content)
        with pytest.raises(ModelError):
            read_metadata(path)


@pytest.mark.parametrize("about", ["[]", "null", "{", "3"])
def test_a_file_without_valid_metadata_raises_an_error(saved: Path, about: str) -> None:
    import safetensors.torch

    content = (saved / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    tensors = safetensors.torch.load(content)
    metadata = header["__metadata__"] | {"about": about}
    (saved / "model.safetensors").write_bytes(safetensors.torch.save(tensors, metadata))
    with pytest.raises(ModelError, match=r"was not written by poecaps|is damaged"):
        CapsuleNetwork.load(saved)


def test_invalid_weights_raise_an_error(saved: Path) -> None:
    tensors, about = read_tensors(saved / "model.safetensors")
    for wrong in (
        tensors["preprocessing.mean"].double(),
        tensors["preprocessing.mean"].int(),
        tensors["preprocessing.mean"] * torch.nan,
    ):
        write_tensors(saved / "model.safetensors", tensors | {"preprocessing.mean": wrong}, about)
        with pytest.raises(
            ModelError, match=r"preprocessing.mean is (.* of (float64|int32)|not finite)"
        ):
            CapsuleNetwork.load(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": 10**9}, "does not match its architecture|invalid architecture"),
        ({"features": "many"}, "invalid architecture"),
        ({"image_shape": 5}, "invalid architecture"),
        ({"image_shape": [1, 2, 3]}, "invalid architecture"),
        ({"normalize": "sideways"}, "invalid architecture"),
        ({"surprise": 1}, "must have the fields .*, but surprise is unknown"),
        ({"experts": []}, "invalid architecture"),
        ({"joint_components": 0}, "invalid architecture"),
        ({"scale": "x"}, "invalid architecture"),
    ],
)
def test_an_invalid_config_raises_an_error_before_memory_is_allocated(
    saved: Path, changes: dict[str, Any], message: str
) -> None:
    tensors, about = read_tensors(saved / "model.safetensors")
    about["architecture"] |= changes
    write_tensors(saved / "model.safetensors", tensors, about)
    (saved / "config.json").unlink()
    with pytest.raises(ModelError, match=message):
        CapsuleNetwork.load(saved)


def test_a_file_from_before_even_overlap_decodes_as_it_did(
    generator: torch.Generator, tmp_path: Path
) -> None:
    shape, codes = replace(TINY, margin=4), torch.rand(2, *TINY.experts[-1], generator=generator)
    old = CapsuleNetwork(shape, generator=generator).eval()
    even = CapsuleNetwork(replace(shape, even_overlap=True)).eval()
    even.load_state_dict(old.state_dict())
    even.save(tmp_path / "even")
    old.save(tmp_path / "old")
    tensors, about = read_tensors(tmp_path / "old" / "model.safetensors")
    del about["architecture"]["even_overlap"]
    write_tensors(tmp_path / "old" / "model.safetensors", tensors, about)
    (tmp_path / "old" / "config.json").unlink()
    for name, network in (("old", old), ("even", even)):
        loaded = CapsuleNetwork.load(tmp_path / name)
        assert torch.equal(loaded.decode(codes), network.decode(codes))
    assert not torch.allclose(old.decode(codes), even.decode(codes))


@given(content=st.binary(max_size=200))
def test_random_bytes_raise_an_error(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_bytes(content)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError):
        CapsuleNetwork.load(folder)
    (folder / "config.json").write_text(
        json.dumps({"format": FORMAT, "version": VERSION, "architecture": asdict(TINY)})
    )
    with pytest.raises(ModelError):
        CapsuleNetwork.load(folder)


def test_a_failed_write_leaves_the_old_model_intact(
    saved: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = CapsuleNetwork.load(saved).state_dict()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        CapsuleNetwork(TINY, generator=generator).save(saved)
    monkeypatch.undo()
    after = CapsuleNetwork.load(saved).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sorted(file.name for file in saved.iterdir()) == ["config.json", "model.safetensors"]
