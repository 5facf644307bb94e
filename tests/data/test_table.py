"""Images at another size, and what rows read take of memory."""

from pathlib import Path

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


def test_rows_of_a_large_file_do_not_stay_in_memory(tmp_path: Path) -> None:
    shape = (1 << 14, 3, 32, 32)
    np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.uint8, shape=shape).flush()
    images = Images(np.load(tmp_path / "x.npy", mmap_mode="r"))

    def mapped() -> int:
        """Kilobytes of files in memory."""
        lines = Path("/proc/self/status").read_text().splitlines()
        (found,) = (line.split()[1] for line in lines if line.startswith("RssFile:"))
        return int(found)

    images.batch(np.arange(8))
    before = mapped()
    for start in range(0, len(images), 64):
        images.batch(np.arange(start, start + 64))
    assert mapped() - before < images.values.nbytes / 4 / 1024
