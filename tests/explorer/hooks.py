"""What schemathesis cannot guess: pictures, states of chains, and the names of the models."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import schemathesis
from hypothesis import strategies as st

from poecaps.explorer import pictures

SIDES = st.integers(1, 40)
CHAIN_SIZE = 6 * 6 * 8  # numbers of a chain of the model walks
BASE64 = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")


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
        names = ("digits", "colours", "walks")
        path_parameters["model"] = names[len(str(path_parameters["model"])) % 3]
    return path_parameters


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Send states that chains of the model walks can have, most of the time, and train nothing."""
    if isinstance(body, dict) and isinstance(body.get("source"), str):
        body["source"] = "nothing"
    chain = body.get("chain") if isinstance(body, dict) else None
    position = chain.get("position") if isinstance(chain, dict) else None
    if isinstance(chain, dict) and isinstance(position, str) and not set(position) - BASE64:
        chains = len(position) % 5  # none is not valid
        state = np.full((chains, CHAIN_SIZE), 0.5, "<f4")
        chain["position"] = base64.b64encode(state.tobytes()).decode()
    return body
