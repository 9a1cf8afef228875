"""kl.py: worked vectors, stability, closed forms against samples, and what each estimator's gradient is."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kl


def test_smallest_vector() -> None:
    """π = (.5, .5), reference (.8, .2): values and expected gradients by hand."""
    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.8, 0.2], dtype=torch.float64).log()
    logp = theta.log_softmax(-1)
    z, p = ref - logp, logp.detach().exp()
    exact = kl.exact_kl(theta, ref)
    assert exact.item() == pytest.approx(0.223144, abs=1e-6)
    (true,) = torch.autograd.grad(exact, theta, retain_graph=True)
    assert true.tolist() == pytest.approx([-0.346574, 0.346574], abs=1e-6)
    expect = {"k1": (0.0, 0.223144), "k2": (-0.346574, 0.265123), "k3": (-0.3, 0.223144)}
    for name, (first, value) in expect.items():
        mean = (p * getattr(kl, name)(z)).sum()
        (g,) = torch.autograd.grad(mean, theta, retain_graph=True)
        assert mean.item() == pytest.approx(value, abs=1e-6) and g.tolist() == pytest.approx(
            [first, -first], abs=1e-6
        )
    (g,) = torch.autograd.grad((p * kl.k1(z).detach() * logp).sum(), theta)
    assert torch.allclose(g, true)


def test_k3_keeps_its_digits_and_is_never_negative() -> None:
    z = torch.tensor([1e-4, -1e-4, 1e-5, -3e-8, 0.0])
    assert (kl.k3(z) >= 0).all()
    assert kl.k3(z)[0].item() == pytest.approx(5e-9, rel=1e-2)
    assert (z.exp() - 1 - z)[1] < 0  # the naive form


def test_nothing_is_clamped() -> None:
    z = torch.tensor([3.0, 20.0], requires_grad=True)
    kl.k3(z).sum().backward()
    assert z.grad[0].item() == pytest.approx(math.e**3 - 1, rel=1e-5) and z.grad[1] > 1e8


def test_masked_infinities_do_no_harm() -> None:
    z = torch.tensor([200.0, math.inf, -0.2], requires_grad=True)
    for f in (kl.k1, kl.k2, kl.k3):
        z.grad = None
        value = f(z, torch.tensor([0, 0, 1])).sum()
        value.backward()
        assert torch.isfinite(value) and torch.isfinite(z.grad).all() and z.grad[:2].tolist() == [0, 0]


def test_tool_tokens_stay_out_of_the_sum() -> None:
    pi, ref, mask = torch.tensor([-1.0, -5, -1]), torch.tensor([-1.2, -1, -1.1]), torch.tensor([1, 0, 1])
    assert kl.k1(ref - pi, mask).sum().item() == pytest.approx(0.3)


@pytest.mark.parametrize("delta", (0.3, 1.0, 1.4))
def test_closed_forms_against_samples(delta: float) -> None:
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = delta * x - delta**2 / 2
    for name, (mean, variance) in kl.gaussian(delta).items():
        sample = getattr(kl, name)(z)
        assert sample.mean().item() == pytest.approx(mean, rel=0.02) and sample.var().item() == pytest.approx(
            variance, rel=0.12
        )


def test_crossover() -> None:
    D = kl.crossover()
    assert D == pytest.approx(0.628216, abs=1e-6)
    below, above = (kl.gaussian(math.sqrt(2 * x)) for x in (D * 0.9, D * 1.1))
    assert below["k3"][1] < below["k1"][1] and above["k3"][1] > above["k1"][1]


def test_gradient_table() -> None:
    for seed in range(5):
        e = kl.gradient_errors(seed)
        assert e["k1, differentiated in the loss"] == pytest.approx(1.0)
        for exact in (
            "k1 as a number in the reward",
            "k1 to go, as a number",
            "k2 of the whole sequence, in the loss",
        ):
            assert e[exact] < 1e-9
        for wrong in (
            "k3 of the whole sequence, in the loss",
            "k3 per token, in the loss",
            "k2 per token, in the loss",
        ):
            assert e[wrong] > 0.01


def test_k1_in_the_loss_regularises_nothing() -> None:
    none, loss, reward = (kl.regularised_run(way, steps=150) for way in ("none", "loss", "reward"))
    assert abs(loss - none) < 0.05 and reward < 0.3 * none


def test_plot_without_matplotlib_says_what_to_do() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; sys.argv = ['kl.py', '--plot', 'x.png']; import kl; kl.main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(kl.__file__).parent, capture_output=True, text=True
    )
    assert (
        done.returncode != 0
        and "pip install matplotlib" in done.stderr
        and len(done.stderr.splitlines()) == 1
    )
