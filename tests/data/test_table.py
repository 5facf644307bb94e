"""Images at another size."""

import numpy as np

from fedtailor.data.table import Images


def test_resized_images_keep_their_kind_and_what_they_show() -> None:
    bright = np.zeros((2, 1, 8, 8), dtype=np.uint8)
    bright[1, 0, :4] = 255
    larger = Images(bright).resized(16, 12).values
    assert larger.shape == (2, 1, 16, 12)
    assert larger.dtype == np.uint8
    assert larger[0].max() == 0
    assert larger[1, 0, :5].min() > 200
    assert larger[1, 0, 11:].max() < 50
    floats = Images(bright.astype(np.float32) / 255).resized(4, 4).values
    assert floats.dtype == np.float32
    assert 0 <= floats.min() <= floats.max() <= 1
