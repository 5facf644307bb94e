"""Gates: every activation at its own pieces is itself, on others it follows them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from fedtailor.errors import InputError
from fedtailor.layers.activation_patterns import Gates, MaxPool, Smooth
from fedtailor.methods.fedsq import _packed, _unpacked


class Net(nn.Module):
    """An activation, a module or a function, between two layers."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)
            nn.init.normal_(self.first.weight, std=2.0)  # so that every piece is met
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activation(self.first(x)))


X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
PIECEWISE: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "nn.ReLU": nn.ReLU,
    "nn.ReLU in place": lambda: nn.ReLU(inplace=True),
    "nn.ReLU6": nn.ReLU6,
    "nn.ReLU6 in place": lambda: nn.ReLU6(inplace=True),
    "nn.LeakyReLU": lambda: nn.LeakyReLU(0.2),
    "nn.PReLU": lambda: nn.PReLU(12),
    "nn.RReLU": nn.RReLU,
    "nn.Hardtanh": lambda: nn.Hardtanh(-2.0, 0.5),
    "nn.Hardsigmoid": nn.Hardsigmoid,
    "nn.Threshold": lambda: nn.Threshold(0.1, 3.0),
    "F.relu": lambda: F.relu,
    "torch.relu": lambda: torch.relu,
    "Tensor.relu": lambda: Tensor.relu,
    "Tensor.relu_": lambda: lambda x: (x + 0).relu_(),
    "F.relu6": lambda: F.relu6,
    "F.leaky_relu": lambda: lambda x: F.leaky_relu(x, 0.3),
    "F.threshold": lambda: lambda x: F.threshold(x, -0.5, 1.0),
    "clamp": lambda: lambda x: x.clamp(-1.0, 2.0),
    "clip": lambda: lambda x: torch.clip(x, max=1.0),
    "clamp by keyword": lambda: lambda x: torch.clamp(input=x, min=0.0),
    "clamp_min": lambda: lambda x: x.clamp_min(0.5),
    "clamp_max": lambda: lambda x: torch.clamp_max(x, 0.5),
    "abs": lambda: torch.abs,
}
SMOOTH: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    **{f"nn.{name}": getattr(nn, name) for name in (
        "GELU", "SiLU", "Mish", "ELU", "SELU", "CELU", "Softplus", "Hardswish", "Sigmoid", "Tanh",
        "LogSigmoid", "Softsign", "Tanhshrink",
    )},
    "nn.SiLU in place": lambda: nn.SiLU(inplace=True),
    "Tensor.sigmoid_": lambda: lambda x: (x + 0).sigmoid_(),
    **{f"transformers {name}": lambda name=name: ACT2FN[name] for name in (
        "gelu", "gelu_new", "gelu_fast", "quick_gelu", "gelu_python", "mish", "relu2",
    )},
}  # fmt: skip
ALL = {**PIECEWISE, **SMOOTH}


def gates_of(model: nn.Module, smooth: Smooth, pool: MaxPool) -> Gates:
    trained = [n.rpartition(".")[0] for n, p in model.named_parameters() if p.requires_grad]
    return Gates(model, trained, smooth, pool)


def gated(
    activation: Callable[[Tensor], Tensor], smooth: Smooth = "first-order", pool: MaxPool = "own"
) -> tuple[nn.Module, Gates]:
    model = (activation if isinstance(activation, Net) else Net(activation)).eval()
    return model, gates_of(model, smooth, pool)


def run(model: nn.Module, gates: Gates, state: dict[str, Tensor], x: Tensor = X) -> Tensor:
    """The forward pass of ``state``, gated by the model's own parameters."""

    def structural() -> None:
        with torch.no_grad():
            model(x)

    gates.replay([], structural)
    return torch.func.functional_call(model, state, (x,))


def moved(model: nn.Module) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(2)
    return {
        n: p.detach() + 0.5 * torch.randn(p.shape, generator=drawn)
        for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("name", ALL)
def test_at_the_start_the_network_and_its_gradient_are_the_plain_ones(name: str) -> None:
    model, gates = gated(ALL[name]())
    state = {n: p.detach() for n, p in model.named_parameters()}

    def plain(w: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, w, (X,))

    got, expected = run(model, gates, state), plain(state)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    ours = torch.func.grad(lambda w: run(model, gates, w).square().sum())(state)
    theirs = torch.func.grad(lambda w: plain(w).square().sum())(state)
    for n in state:
        torch.testing.assert_close(ours[n], theirs[n], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", PIECEWISE)
def test_away_from_the_start_each_element_stays_on_its_piece(name: str) -> None:
    activation = PIECEWISE[name]()
    model, gates = gated(activation)
    state = moved(model)
    got = run(model, gates, state)

    def phi(z: Tensor) -> Tensor:
        if "PReLU" in name:
            return F.prelu(z, state["activation.weight"].to(z.dtype))
        return activation(z * 1.0)

    z_SK = model.first(X).detach().double().requires_grad_()
    z_QK = F.linear(X, state["first.weight"], state["first.bias"]).double()
    value = phi(z_SK)
    (slope,) = torch.autograd.grad(value.sum(), z_SK)  # of the piece
    weight, bias = state["last.weight"].double(), state["last.bias"].double()
    expected = F.linear((value + slope * (z_QK - z_SK)).detach(), weight, bias)
    np.testing.assert_allclose(got.detach(), expected, rtol=1e-3, atol=1e-3)
    assert (got - F.linear(phi(z_QK), weight, bias)).abs().max() > 0.1  # not on its own pieces


def test_gelu_follows_its_tangent() -> None:
    model, gates = gated(nn.GELU())
    state = moved(model)
    z0 = (X @ model.first.weight.T + model.first.bias).detach().double().numpy()
    z = F.linear(X, state["first.weight"], state["first.bias"]).double().numpy()
    cdf = 0.5 * (1 + torch.erf(torch.tensor(z0) / 2**0.5)).numpy()
    density = np.exp(-(z0**2) / 2) / np.sqrt(2 * np.pi)
    h = z0 * cdf + (cdf + z0 * density) * (z - z0)
    expected = h @ state["last.weight"].double().numpy().T + state["last.bias"].double().numpy()
    np.testing.assert_allclose(run(model, gates, state).numpy(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("activation", [nn.GELU(), ACT2FN["gelu_new"], nn.SiLU(), nn.Softplus()])
def test_the_hard_mask_is_relus(activation: nn.Module) -> None:
    model, gates = gated(activation, smooth="mask")
    state = moved(model)
    mask = model.first(X) > 0
    h = mask * F.linear(X, state["first.weight"], state["first.bias"])
    torch.testing.assert_close(
        run(model, gates, state), F.linear(h, state["last.weight"], state["last.bias"])
    )


def test_the_hard_mask_of_gelu_starts_up_to_0_17_away() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.GELU())
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    gates = gates_of(model, "mask", "own")
    z = torch.linspace(-8, 8, 100_001)[:, None]
    gap = run(model, gates, dict(model.named_parameters()), z) - F.gelu(z)
    assert gap.abs().max().item() == pytest.approx(0.17, abs=0.001)


def test_what_is_no_rectifier_has_no_hard_mask() -> None:
    model, gates = gated(nn.Tanh(), smooth="mask")
    state = {n: p.detach() for n, p in model.named_parameters()}
    assert run(model, gates, state).equal(model(X))


class Pooled(nn.Module):
    def __init__(self, pool: Callable[[Tensor], Tensor], dims: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.conv, self.pool, self.last = conv(1, 3, 3), pool, conv(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pool(torch.relu(self.conv(x))))


POOLS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "max_pool1d": (1, lambda x: F.max_pool1d(x, 2)),
    "nn.MaxPool2d": (2, nn.MaxPool2d(2, stride=1)),
    "torch.max_pool2d": (2, lambda x: torch.max_pool2d(x, 2)),
    "with indices": (2, lambda x: F.max_pool2d(x, 2, return_indices=True)[0]),
    "max_pool3d": (3, lambda x: F.max_pool3d(x, 2)),
    "adaptive 1": (1, nn.AdaptiveMaxPool1d(2)),
    "adaptive 2": (2, nn.AdaptiveMaxPool2d(2)),
    "adaptive 3": (3, nn.AdaptiveMaxPool3d(2)),
}


def bend(kind: MaxPool, dims: int, pool: Callable[[Tensor], Tensor]) -> float:
    """How far the outputs are from affine along a line in one layer's weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model, x = Pooled(pool, dims), torch.randn(4, 1, *[7] * dims)
        step = torch.randn(model.conv.weight.shape)
    gates = gates_of(model, "first-order", kind)
    start = {n: p.detach() for n, p in model.named_parameters()}
    assert run(model, gates, start, x).equal(model(x))
    a, b, c = (
        run(model, gates, {**start, "conv.weight": start["conv.weight"] + t * step}, x)
        for t in (0.0, 2.0, 4.0)
    )
    return (b - (a + c) / 2).abs().max().item()


@pytest.mark.parametrize("name", POOLS)
def test_a_structural_pool_makes_the_network_affine_in_a_layers_weights(name: str) -> None:
    assert bend("structural", *POOLS[name]) < 1e-4
    assert bend("own", *POOLS[name]) > 1e-2


def test_several_clients_at_once() -> None:
    for kind in ("own", "structural"):
        model = Pooled(nn.MaxPool2d(2), 2)
        gates = gates_of(model, "first-order", kind)  # type: ignore[arg-type]
        states = [moved(model), {n: -v for n, v in moved(model).items()}]
        xs = torch.randn(2, 4, 1, 7, 7)
        stacked = {n: torch.stack([s[n] for s in states]) for n in states[0]}
        got = torch.func.vmap(lambda w, x: run(model, gates, w, x))(stacked, xs)  # noqa: B023
        for at, state in enumerate(states):
            torch.testing.assert_close(got[at], run(model, gates, state, xs[at]))


def test_nothing_is_gated_below_the_first_trained_layer() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    gates = gates_of(model, "first-order", "own")
    state = {n: p.detach() for n, p in model.named_parameters()}
    with gates.comparing() as agreement:
        run(model, gates, state)
    assert len(agreement) == 1
    model, gates = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), None
    model[0].requires_grad_(False)
    gates = gates_of(model, "first-order", "own")
    passes = 0

    def structural() -> None:
        nonlocal passes
        passes += 1
        model(X)

    for _ in range(3):
        gates.replay([], structural)
        model(X)
    assert passes == 1  # with nothing to gate there is nothing to ask for


def test_without_a_record_the_model_is_as_it_was() -> None:
    model, gates = gated(nn.ReLU())
    state = moved(model)
    run(model, gates, state)
    plain = F.linear(
        torch.relu(F.linear(X, state["first.weight"], state["first.bias"])),
        state["last.weight"],
        state["last.bias"],
    )
    assert torch.func.functional_call(model, state, (X,)).equal(plain)
    with pytest.raises(RuntimeError, match="shapes"):
        run(model, gates, state, X[:, :2])
    assert torch.func.functional_call(model, state, (X,)).equal(plain)


@pytest.mark.parametrize(
    "activation",
    [
        torch.exp,
        torch.erf,
        torch.sin,
        nn.Hardshrink(),
        lambda z: z * (z > 0),
        lambda z: torch.maximum(z, -z),
        lambda z: torch.max(z, -z),
        lambda z: torch.min(input=z, other=-z),
        lambda z: z.max(-z),
        lambda z: F.glu(torch.cat([z, z], -1)),
        lambda z: nn.functional.logsigmoid(z) + torch.special.erf(z),
    ],
)
def test_what_cannot_be_gated_is_refused_by_name(activation: Callable[[Tensor], Tensor]) -> None:
    model, gates = gated(activation)
    state = moved(model)
    with pytest.raises(InputError, match=r"can't gate '\w+' in (Net|Hardshrink); .*: abs, .*relu6"):
        torch.func.grad(lambda w: run(model, gates, w).sum())(state)
    run(model, gates, state)  # the gates are free again; without a gradient nothing is trained


def test_a_recurrent_layer_is_refused() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(6, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x[:, None])[0]

    model = Recurrent()
    gates = gates_of(model, "first-order", "own")
    state = dict(model.named_parameters())
    with pytest.raises(InputError, match="can't gate 'gru' in GRU"):
        run(model, gates, state)


def test_pools_and_what_does_not_depend_on_trained_layers_may_use_any_function() -> None:
    class Masked(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.first(x))
            weights = torch.exp(x[:, :1]) * (x[:, :1] > 0)
            pooled = h.max(1, keepdim=True).values + h.max() + torch.max(h, dim=1, keepdim=True)[0]
            return self.last(pooled * h * weights / weights.sum().clamp(min=1))

    model, gates = gated(Masked(nn.Identity()))
    state = moved(model)
    torch.func.grad(lambda w: run(model, gates, w).sum())(state)


def test_agreement_is_the_share_of_elements_on_their_own_piece() -> None:
    model, gates = gated(nn.ReLU6())
    state = moved(model)
    z_SK = model.first(X).detach().numpy()
    z_QK = F.linear(X, state["first.weight"], state["first.bias"]).numpy()
    expected = (np.digitize(z_SK, [0, 6]) == np.digitize(z_QK, [0, 6])).mean()
    with gates.comparing() as agreement:
        run(model, gates, state)
    assert [a.item() for a in agreement] == [pytest.approx(expected)]
    assert 0.5 < expected < 0.95


def test_agreement_leaves_out_tokens_that_are_not_real() -> None:
    model, gates = gated(nn.GELU())
    state = moved(model)
    x = X.view(16, 4, 6)
    real = torch.ones(16, 4)
    real[:, 2:] = 0
    shares = []
    for part, mask in ((x, real), (x[:, :2], None)):
        with gates.comparing(mask) as agreement:
            run(model, gates, state, part)
        shares.append(agreement[0].item())
    assert shares[0] == pytest.approx(shares[1])
    with gates.comparing() as agreement:
        run(model, gates, state, x)
    assert agreement[0].item() != pytest.approx(shares[0], abs=1e-4)


def test_what_is_packed_gates_without_a_structural_pass() -> None:
    for activation, pool in ((nn.ReLU6(), "own"), (nn.LeakyReLU(), "own"), (None, "structural")):
        model = Net(activation) if activation is not None else Pooled(nn.MaxPool2d(2), 2)
        x = X if activation is not None else torch.randn(4, 1, 7, 7)
        gates = gates_of(model, "first-order", pool)  # type: ignore[arg-type]
        with gates.recording():
            model(x)
        packed = _packed(gates.tape)
        assert {v.dtype for v in packed.values()} <= {torch.uint8, torch.int32}
        state = moved(model)
        gates.replay(_unpacked(packed), lambda: pytest.fail("the structural pass ran"))
        got = torch.func.functional_call(model, state, (x,))
        assert got.equal(run(model, gates, state, x))


def test_a_smooth_activation_is_not_packed() -> None:
    model, gates = gated(nn.GELU())
    with gates.recording():
        model(X)
    assert _packed(gates.tape) == {}
