"""Options that several commands share, as annotated types for tyro.

Their help texts are single lines: in a completion script of tyro 1.0.16, each line of a help text
would be offered as a completion.
"""

from __future__ import annotations

from typing import Annotated

from tyro.conf import arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from poecaps.data.idx import Split

Model = Annotated[
    str,
    arg(
        metavar="RUN",
        help="Folder of a trained model, or the name of a model of the package, such as mnist "
        "(poecaps info lists them), whose results are written to the current folder, for example "
        "as mnist-joint.png. For a folder with such a name write ./mnist.",
    ),
]
OptionalModel = Annotated[
    str | None,
    arg(
        metavar="[RUN]",
        help="Folder of a trained model, or the name of a model of the package.",
        help_behavior_hint="(optional)",
    ),
]
Data = Annotated[
    str | None,
    arg(
        metavar="DATA",
        help="Name of a dataset, or path of a file or folder of images.",
        help_behavior_hint="(default: the training data of the model; for a model of the package "
        "whose dataset is not on this machine, the sample of it in the package)",
    ),
]
DataPath = Annotated[
    str | None,
    arg(
        metavar="FOLDER",
        help="Folder that contains a full named dataset.",
        help_behavior_hint="(default: search)",
    ),
]
OptionalSplit = Annotated[
    Split | None,
    arg(
        metavar="{train,test}",
        help="Which part of the data; without a test part, test is what training has held out, and "
        "train the rest.",
        help_behavior_hint="(default: test if there is one)",
    ),
]
Device = Annotated[
    str,
    arg(
        metavar="DEVICE", help="cpu, cuda, cuda:1, mps, or auto for an NVIDIA GPU if there is one."
    ),
]


def output(kind: str, default: str) -> object:
    """Annotate an option `--out` with the kind of file and its default path."""
    return arg(metavar="FILE", help=f"{kind} to write.", help_behavior_hint=f"(default: {default})")


registry = ConstructorRegistry()


@registry.primitive_rule
def _none(type_info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[None] | None:
    """Show an optional number as `None|INT` in the help, instead of tyro's `{None}|INT`."""
    if type_info.type is not type(None):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="None",
        choices=("None",),
        instance_from_str=lambda _: None,
        is_instance=lambda value: value is None,
        str_from_instance=lambda _: ["None"],
    )
