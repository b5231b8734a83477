"""The command `cluster`."""

from __future__ import annotations

import csv
import io
from pathlib import Path  # noqa: TC003 (tyro reads the annotations)
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional  # noqa: TC002 (tyro reads the annotations)

from poecaps import _checks as checks
from poecaps import plotting
from poecaps._files import atomic_write
from poecaps.applications import Clusters, clusters_of
from poecaps.cli.loading import encode_images, load_images, open_model
from poecaps.cli.options import Data, DataPath, Device, Model, OptionalSplit, output
from poecaps.cli.outputs import default_output, say

if TYPE_CHECKING:
    from poecaps.data import ImageSet


def cluster(
    run: Positional[Model],
    *,
    data: Data = None,
    data_path: DataPath = None,
    split: OptionalSplit = None,
    columns: int = 20,
    out: Annotated[Path | None, output(".csv file", "RUN/clusters.csv")] = None,
    device: Device = "auto",
) -> None:
    """Sort images by their most active expert, into a table and a contact sheet.

    The table is a .csv file with a line for each image: its file or number, the expert, the firing
    probability of the expert, the margin to the second expert and, for labelled data, the label.
    The contact sheet is a .png file beside it: for each expert, the images for which it has the
    largest margin.

    Parameters
    ----------
    columns
        Images of each expert on the contact sheet.
    """
    checks.require_int("--columns", columns, 1)
    out = out or default_output(run, "clusters.csv")
    if out.suffix.lower() != ".csv":
        raise ValueError(f"--out must name a .csv file, but is {out}")
    network = open_model(run, device, "codes")
    images = load_images(network, run, data, data_path, split)
    clusters = clusters_of(encode_images(network, images))
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as file:
        file.write(_table(images, clusters).encode(errors="backslashreplace"))
    groups = {}
    for expert, count in enumerate(clusters.expert.bincount().tolist()):
        if count:
            members = (clusters.expert == expert).nonzero().squeeze(1)
            best = members[clusters.margin[members].argsort(descending=True)[:columns]]
            groups[f"{expert}: {count:,}"] = images.batch(best)
    title = "Images by expert (expert: number of images)"
    sheet = plotting.contact_sheet(groups, out.with_suffix(".png"), title=title)
    say(out)
    say(sheet)
    say(f"{len(groups)} of {network.architecture.experts[-1][0]} experts are the most active one")


def _table(images: ImageSet, clusters: Clusters) -> str:
    """Format a line for each image."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    labelled = images.labels is not None
    writer.writerow(["image", "expert", "firing", "margin", *(["label"] if labelled else [])])
    rows = zip(
        clusters.expert.tolist(), clusters.firing.tolist(), clusters.margin.tolist(), strict=True
    )
    for number, (expert, firing, margin) in enumerate(rows):
        name = images.files[number] if images.files else number
        label = [] if images.labels is None else [_label(images, int(images.labels[number]))]
        writer.writerow([name, expert, f"{firing:.4f}", f"{margin:.4f}", *label])
    return text.getvalue()


def _label(images: ImageSet, label: int) -> str | int:
    return images.label_names[label] if images.label_names else label
