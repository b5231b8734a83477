"""What schemathesis cannot guess: pictures, and the names of the models that are served."""

from __future__ import annotations

from typing import Any

import numpy as np
import schemathesis
from hypothesis import strategies as st

from poecaps.explorer import pictures

SIDES = st.integers(1, 40)


def _picture(height: int, width: int, value: int) -> bytes:
    return pictures.write(np.full((height, width, 1), value, np.uint8))


for _kind in ("image/png", "image/jpeg", "image/webp"):
    schemathesis.openapi.media_type(_kind, st.builds(_picture, SIDES, SIDES, st.integers(0, 255)))


@schemathesis.hook
def map_path_parameters(
    context: Any, path_parameters: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Ask for a model that is there, most of the time, and for its first experts and images."""
    if path_parameters and len(str(path_parameters.get("model"))) % 4:
        path_parameters["model"] = ("digits", "colours")[len(str(path_parameters["model"])) % 2]
    return path_parameters
