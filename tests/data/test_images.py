import gzip
import struct

import numpy as np
import pytest
from datasets import Dataset, Features, Image
from PIL import Image as Picture

from fedtailor.data import images
from fedtailor.data.packages import fashion_mnist
from fedtailor.errors import InputError
from fedtailor.inference.examples import picture_examples


def idx(values):
    shape = struct.pack(f">{values.ndim}I", *values.shape)
    return b"\0\0\x08" + bytes([values.ndim]) + shape + values.tobytes()


@pytest.mark.parametrize("name", ["a-idx3-ubyte", "a-idx3-ubyte.gz"])
def test_idx_round_trip(name, digits, tmp_path):
    values = digits.inputs.values[:5, 0]
    data = idx(values)
    (tmp_path / name).write_bytes(gzip.compress(data, mtime=0) if name.endswith("gz") else data)
    assert np.array_equal(images.read_idx(tmp_path / name), values)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a", b"text", "it begins otherwise"),
        ("a", b"\0\0\x08\x03\0\0", "requires a buffer"),
        ("a", idx(np.zeros((2, 3), np.uint8))[:-1], r"of size 5 into shape \(2,3\)"),
        ("a.gz", b"text", "Not a gzipped file|end-of-s"),
        (
            "a.gz",
            gzip.compress(idx(np.zeros(99, np.uint8)), mtime=0)[:20],
            "[Nn]ot a gzipped file|end-of-stream",
        ),
    ],
)
def test_bad_idx_files(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=f"{name} is not a whole IDX file of bytes: .*({message})"):
        images.read_idx(tmp_path / name)


def test_fashion_mnist_files_are_read_if_they_are_there():
    columns = fashion_mnist()
    if columns is not None:
        assert (columns.num_train, columns.num_test) == (60_000, 10_000)
        assert columns.read(np.arange(3)).shape == (3, 1, 28, 28)
        assert columns.labels[:3] == [9, 0, 0]
        assert columns.classes[9] == "Ankle boot"


def table(pictures):
    return Dataset.from_dict({"image": pictures}, features=Features({"image": Image()}))


def test_images_are_decoded_once_to_a_mapped_file(digits, tmp_path, monkeypatch):
    values = digits.inputs.values[:6]
    pictures = table([Picture.fromarray(value[0]) for value in values])
    decoded = images.decode(pictures, "image")
    assert np.array_equal(decoded, values)
    assert isinstance(decoded, np.memmap)
    monkeypatch.setattr(images, "_write", None)
    assert np.array_equal(images.decode(pictures, "image"), values)


def test_colour_has_three_channels_and_takes_grey(digits, tmp_path):
    grey = Picture.fromarray(digits.inputs.values[0, 0])
    colour = Picture.new("RGB", (8, 8), (1, 2, 3))
    decoded = images.decode(table([colour, grey]), "image")
    assert decoded.shape == (2, 3, 8, 8)
    assert decoded[0, :, 0, 0].tolist() == [1, 2, 3]
    assert np.array_equal(decoded[1, 2], digits.inputs.values[0, 0])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (Picture.new("L", (8, 9)), "one size: row 1 of column 'image' is 8x9, row 0 is 8x8; data"),
        (Picture.new("RGB", (8, 8)), "be grey, .*: row 1 of column 'image' is RGB"),
    ],
)
def test_images_of_different_sizes_are_refused(second, message, tmp_path):
    with pytest.raises(InputError, match=message):
        images.decode(table([Picture.new("L", (8, 8)), second]), "image")
    assert list((tmp_path / "images").iterdir()) == []


def test_images_of_any_size_become_squares_as_in_predictions(tmp_path):
    draw = np.random.default_rng(0)
    sizes = [(5, 9), (1, 1), (300, 40), (6, 6)]
    several = [Picture.fromarray(draw.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]
    several.append(several[0].convert("L"))
    several.append(several[2].convert("RGBA"))
    decoded = images.decode(table(several), "image", 6)
    assert decoded.shape == (6, 3, 6, 6)
    assert np.array_equal(decoded, picture_examples(several, (3, 6, 6)).values)


RAMP = np.linspace(0, 1, 256).reshape(16, 16)  # the mean is half of the range
BYTES = np.rint(RAMP * 255).astype(np.uint8)
GREY = Picture.fromarray(BYTES)


def with_alpha(mode):
    """Half of the columns are transparent, which is white; what they hide is black."""
    picture = Picture.fromarray(np.where(np.arange(16) < 8, BYTES, 0).astype(np.uint8))
    picture = picture.convert(mode)
    picture.putalpha(Picture.fromarray(np.tile(np.arange(16) < 8, (16, 1)).astype(np.uint8) * 255))
    return picture


def saved(picture, path, **options):
    picture.save(path, **options)
    return path


@pytest.mark.parametrize(
    ("name", "picture", "mean"),
    [
        ("a.png", Picture.fromarray(np.rint(RAMP * 65535).astype(np.uint16)), 127.5),
        ("a.tif", Picture.fromarray(np.rint(RAMP * 65535).astype(">u2")), 127.5),
        ("a.tif", Picture.fromarray(RAMP.astype(np.float32)), 127.5),
        ("a.tif", Picture.fromarray(BYTES.astype(np.int32)), 127.5),
        ("a.png", GREY.convert("P"), 127.5),
        ("a.tif", GREY.convert("RGB").convert("CMYK"), 127.5),
        ("a.png", GREY.point(lambda v: v > 127 and 255).convert("1"), 127.5),
        ("a.png", with_alpha("L"), (BYTES[:, :8].mean() + 255) / 2),
        ("a.png", with_alpha("RGB"), (BYTES[:, :8].mean() + 255) / 2),
    ],
)
def test_a_picture_of_any_mode_is_converted_by_its_range(name, picture, mean, tmp_path):
    path = str(saved(picture, tmp_path / name))
    decoded = images.decode(table([path]), "image")
    assert abs(decoded.mean() - mean) < 0.5
    predicted = picture_examples([path], decoded.shape[1:]).values
    assert np.array_equal(predicted, decoded)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a.tif", lambda p: saved(Picture.fromarray((RAMP * 255).astype(np.float32)), p),
         "is a picture of floats with values from 0 to 255; allowed: 0 to 1"),
        ("a.tif", lambda p: saved(Picture.fromarray((RAMP * 65535).astype(np.int32)), p),
         "32-bit whole numbers with values from 0 to 65535; allowed: 0 to 255"),
        ("a.tif", lambda p: saved(Picture.fromarray(np.full((16, 16), np.nan, np.float32)), p),
         "values from nan to nan"),
        ("a.tif", lambda p: saved(GREY, p, tiffinfo={339: 2}), "its bytes have a sign"),
        ("a.gif", lambda p: saved(GREY, p, save_all=True, append_images=[GREY.rotate(90)]),
         "it holds several pictures"),
        ("a.png", lambda p: p.write_bytes(b""), "no picture that can be read"),
        ("a.png", lambda p: p.write_bytes(b"no picture"), "it is none of BMP, GIF, JPEG"),
        ("a.png", lambda p: p.write_bytes(saved(GREY, p).read_bytes()[:50]), "can be read: "),
        ("a.png", lambda p: saved(Picture.new("1", (10_000, 9_000)), p), "bomb"),
        ("a.png", lambda p: None, "can't read|no file"),
    ],
)  # fmt: skip
def test_a_picture_that_cannot_be_converted_is_refused_by_name(name, make, message, tmp_path):
    path = tmp_path / name
    make(path)
    first = str(saved(GREY, tmp_path / "0.png"))
    for read in (
        lambda: images.decode(table([first, str(path)]), "image"),
        lambda: picture_examples([path], (1, 16, 16)),
    ):
        with pytest.raises(InputError, match=message) as error:
            read()
        assert name in str(error.value)
        assert "\n" not in str(error.value)


def test_a_row_without_a_picture_is_named(tmp_path):
    with pytest.raises(InputError, match="row 1 of column 'image' has no picture"):
        images.decode(table([GREY, None]), "image")
