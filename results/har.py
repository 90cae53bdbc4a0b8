"""Read the recorded activity of 20 people (UCI HAR), put the time steps in the right order, and shift the sensors on
request.
"""

from pathlib import Path

import numpy as np

from medsilo.core.errors import DataError
from medsilo.learning.seeds import seed_for

# three kinds of signals with three axes each: acceleration of the body, rotation, and acceleration with gravity
SENSORS, STEPS, AXES = 9, 128, 3
LARGEST_GAIN = 2.0
SITE_FILES = "subject_*.npz"


def in_order(windows: np.ndarray) -> np.ndarray:
    """Return windows [n, sensors, steps]; in the stored values, steps may come before sensors.

    The available copy has the numbers of an array [n, steps, sensors] under the wrong shape [n, sensors, steps], so
    each row mixes all sensors. A sensor's values hardly change within a fiftieth of a second, so the right order has
    the smaller differences between steps.
    """
    values = windows.astype(np.float32)
    turned = np.ascontiguousarray(values.reshape(len(values), STEPS, SENSORS).transpose(0, 2, 1))
    return min(values, turned, key=_roughness)


def _roughness(windows: np.ndarray) -> float:
    return float(np.abs(np.diff(windows, axis=2)).mean())


def shifted(windows: np.ndarray, seed: int, site: str) -> np.ndarray:
    """Return windows as a device with a different mounting and a different calibration would record them.

    At each site, all sensors share one permutation and one choice of signs for their three axes. Each kind of sensor
    has a gain between a half and two. A site's permutation, signs and gains depend only on the seed and the site's
    name.
    """
    draw = np.random.default_rng(seed_for(seed, "shift", site))
    order = draw.permutation(AXES)
    signs = draw.choice((-1.0, 1.0), AXES)
    gains = LARGEST_GAIN ** draw.uniform(-1, 1, SENSORS // AXES)
    kinds = windows.reshape(len(windows), SENSORS // AXES, AXES, windows.shape[2])
    moved = kinds[:, :, order] * signs[None, None, :, None] * gains[None, :, None, None]
    return moved.reshape(windows.shape).astype(np.float32)


def write_windows(source: Path, target: Path, shift: int | None) -> Path:
    """Write all people's files with their time steps in order, and with shifted sensors if `shift` is a seed; return
    the files' folder.
    """
    files = sorted(source.glob(SITE_FILES))
    if not files:
        raise DataError(f"no {SITE_FILES} in the data folder; --data names the folder with har_uci", str(source))
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        with np.load(file, allow_pickle=False) as stored:
            arrays = dict(stored)
        for part in ("x_train", "x_test"):
            arrays[part] = in_order(arrays[part])
            if shift is not None:
                arrays[part] = shifted(arrays[part], shift, file.stem)
        np.savez(target / file.name, **arrays)
    return target
