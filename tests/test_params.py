import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtailor import params
from fedtailor.params import Params

SHAPES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4),
    st.lists(st.integers(1, 3), max_size=3).map(tuple),
    min_size=1,
    max_size=4,
)


def tree(shapes: dict[str, tuple[int, ...]], seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def equal(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(a[n].equal(b[n]) for n in a)


@given(SHAPES)
def test_flat_and_unflat_are_inverse(shapes: dict[str, tuple[int, ...]]) -> None:
    one = tree(shapes, 0)
    vector = params.flat(one)
    assert vector.shape == (params.count(one),)
    assert equal(params.unflat(vector, one), one)


@given(SHAPES, st.integers(1, 4))
def test_stack_and_row_are_inverse(shapes: dict[str, tuple[int, ...]], c: int) -> None:
    trees = [tree(shapes, seed) for seed in range(c)]
    stacked = params.stack(trees)
    assert all(
        equal(a, b) for a, b in ((params.row(stacked, at), one) for at, one in enumerate(trees))
    )


@given(SHAPES)
def test_split_loses_nothing(shapes: dict[str, tuple[int, ...]]) -> None:
    one = tree(shapes, 0)
    left, right = params.split(one, lambda name: "a" in name)
    assert not left.keys() & right.keys()
    assert equal({n: {**left, **right}[n] for n in one}, one)


@given(SHAPES, st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
def test_encoding_keeps_every_bit(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    one = {name: value.to(dtype) for name, value in tree(shapes, 0).items()}
    assert equal(params.decode(params.encode(one)), one)


@given(SHAPES)
def test_arithmetic(shapes: dict[str, tuple[int, ...]]) -> None:
    a, b = tree(shapes, 0), tree(shapes, 1)
    back = params.subtract(params.add(a, b), b)
    assert all(torch.allclose(back[n], a[n], atol=1e-5) for n in a)
    assert equal(params.scale(a, 2.0), params.add(a, a))


def test_trees_with_other_names_are_refused() -> None:
    with pytest.raises(KeyError, match="differ in"):
        params.add({"a": torch.zeros(1)}, {"b": torch.zeros(1)})


def test_what_is_decoded_begins_where_pytorch_would_put_it() -> None:
    data = params.encode({"a": torch.ones(3), "bc": torch.ones(5)})
    shifted = params.decode(data)
    assert all(value.data_ptr() % params.ALIGNMENT == 0 for value in shifted.values())
    view = torch.arange(20.0)[1:]
    assert params.aligned({"x": view})["x"].equal(view)
    assert params.aligned({"x": view})["x"].data_ptr() % params.ALIGNMENT == 0
    turned = torch.arange(6.0).view(2, 3).T
    assert params.aligned({"x": turned})["x"].equal(turned)
    assert params.aligned({"x": turned})["x"].is_contiguous()
    plain = torch.ones(4)
    assert params.aligned({"x": plain})["x"] is plain


def test_values_above_a_bound_are_named() -> None:
    fine = {"key": torch.tensor(2**62), "none": torch.zeros(0), "x": torch.full((4,), -9e17)}
    assert params.too_large(fine, 1e18) is None
    for dtype, value in ((torch.float32, -1.1e18), (torch.bfloat16, 1e30), (torch.float64, 1e300)):
        assert params.too_large({**fine, "y": torch.tensor([0, value], dtype=dtype)}, 1e18) == "y"
    assert params.too_large({"half": torch.full((9999,), 6e4, dtype=torch.float16)}, 1e18) is None
    for value in (torch.nan, torch.inf):
        assert params.too_large({"y": torch.tensor([value])}, 1e18) == "y"
