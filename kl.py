"""Three estimators of a KL divergence, and what each of them does to the gradient.

Report §4.1, Fig. 4 (claim R6): RL is regularised by KL(q‖p) = E_q[−log r], r = p/q, with samples from q (the policy) and p the
reference. Per sample, with z = log r = log p(x) − log q(x):

    k1 = −z             unbiased
    k2 = z² / 2         biased by about KL²/2
    k3 = e^z − 1 − z    unbiased, never negative; its variance explodes when p and q part

Composer 2 uses k1. The value of an estimator and its gradient are two questions: k1 differentiated in a loss
has zero expected gradient (E_q ∇log q = 0) and regularises nothing; as a detached number in the reward its policy
gradient is exact. Sources: Schulman, "Approximating KL divergence" (2020); Tang & Munos,
arXiv 2506.09477. (The caption of Fig. 4 says KL(p‖q), the text KL(q‖p); for two unit-variance Gaussians both are δ²/2.)

    python kl.py                  the tables and a plot in the terminal
    python kl.py --plot fig4.png  Figure 4, where matplotlib is installed

No value is ever clamped: a clamp has zero gradient exactly where a penalty is needed.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor


def _masked(z: Tensor, mask: Tensor | None) -> Tensor:
    """0 where the mask is off, before anything is exponentiated: 0 · ∞ would be NaN in the gradient."""
    return z if mask is None else torch.where(mask.bool(), z, torch.zeros_like(z))


def k1(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """−z for z = log p − log q at samples of q; shape of z, 0 where masked. Mean KL, variance 2 KL for Gaussians."""
    return -_masked(z, mask)


def k2(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """z²/2. Biased; its gradient is that of the KL for a single token."""
    return _masked(z, mask) ** 2 / 2


def k3(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """e^z − 1 − z through expm1: the naive form loses every digit below |z| ≈ 1e-4 and can go negative."""
    z = _masked(z, mask)
    return torch.expm1(z) - z


def exact_kl(logits_q: Tensor, logits_p: Tensor) -> Tensor:
    """KL(q‖p) over the last dimension, in nats, from full logits: what the estimators estimate, without variance."""
    log_q, log_p = logits_q.log_softmax(-1), logits_p.log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def gaussian(delta: float) -> dict[str, tuple[float, float]]:
    """(mean, variance) of each estimator for q = N(0, 1), p = N(δ, 1), in closed form.

    z ~ N(−D, 2D) with D = δ²/2. Var k2 = 2D² + 2D³; Var k3 = e^{2D} − 1 − 2D, because E e^{2z} = e^{2D} and Cov(e^z, z) = 2D.
    """
    D = delta**2 / 2
    return {"k1": (D, 2 * D), "k2": (D + D**2 / 2, 2 * D**2 + 2 * D**3), "k3": (D, math.expm1(2 * D) - 2 * D)}


def crossover() -> float:
    """The KL at which Var k3 = Var k1 (0.628 nats): below, k3 is the better estimator of the value; above, k1. Bisection."""
    low, high = 0.1, 2.0
    while high - low > 1e-12:
        D = (low + high) / 2
        low, high = (D, high) if math.expm1(2 * D) - 4 * D < 0 else (low, D)
    return low


def gradient_errors(seed: int = 0, scale: float = 0.7) -> dict[str, float]:
    """Relative error of E[gradient] against ∇KL(π‖π_ref), by enumerating all sequences of two tokens from three.

    The second token's distribution depends on the first, so a per-token loss misses that early tokens change later states.
    """
    g = torch.Generator().manual_seed(seed)
    theta = torch.randn(4, 3, generator=g, dtype=torch.float64)
    ref = (theta + scale * torch.randn(4, 3, generator=g, dtype=torch.float64)).log_softmax(-1)
    theta.requires_grad_()

    def logps(table: Tensor) -> Tensor:  # [9, 2]: both tokens of all sequences
        return torch.stack([torch.stack((table[0, a], table[1 + a, b])) for a in range(3) for b in range(3)])

    logp, logp_ref = logps(theta.log_softmax(-1)), logps(ref)
    z = logp_ref - logp
    total, p, sg = z.sum(1), logp.sum(1).exp(), z.detach()
    ways = {
        "k1, differentiated in the loss": k1(z).sum(1),
        "k2 per token, in the loss": k2(z).sum(1),
        "k3 per token, in the loss": k3(z).sum(1),
        "k3 of the whole sequence, in the loss": k3(total),
        "k2 of the whole sequence, in the loss": k2(total),
        "k1 as a number in the reward": k1(sg).sum(1) * logp.sum(1),
        "k1 to go, as a number": (k1(sg).flip(1).cumsum(1).flip(1) * logp).sum(1),
    }
    (true,) = torch.autograd.grad((p * -total).sum(), theta, retain_graph=True)
    errors = {}
    for name, value in ways.items():
        (grad,) = torch.autograd.grad(
            (p.detach() * value).sum(), theta, retain_graph=True
        )  # expectation under π
        errors[name] = float((grad - true).norm() / true.norm())
    return errors


def regularised_run(way: str, steps: int = 300, beta: float = 1.0, seed: int = 0) -> float:
    """KL to the reference after training a bandit of eight arms with reward for arm 0 and a penalty: way none, loss or reward."""
    g = torch.Generator().manual_seed(seed)
    theta, ref = torch.zeros(8, requires_grad=True), torch.zeros(8).log_softmax(-1)
    for _ in range(steps):
        logp = theta.log_softmax(-1)
        arms = torch.multinomial(logp.detach().exp(), 256, replacement=True, generator=g)
        reward, estimate = (arms == 0).float(), k1(ref[arms] - logp[arms])
        if way == "reward":
            reward = reward - beta * estimate.detach()
        value = -((reward - reward.mean()) * logp[arms]).mean() + (
            beta * estimate.mean() if way == "loss" else 0.0
        )
        (grad,) = torch.autograd.grad(value, theta)
        with torch.no_grad():
            theta -= 2.0 * grad
    return float(exact_kl(theta.detach(), ref))


def plot(path: str) -> None:
    """Figure 4: variance of the estimators over the KL, from the closed forms."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit(
            "kl.py: error: --plot needs matplotlib (pip install matplotlib); the table is printed without it"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    deltas = [0.05 * i for i in range(1, 90)]
    for name in ("k1", "k2", "k3"):
        pyplot.semilogy([d * d / 2 for d in deltas], [gaussian(d)[name][1] for d in deltas], label=name)
    pyplot.xlabel("KL, nats")
    pyplot.ylabel("variance of one sample")
    pyplot.legend()
    pyplot.savefig(path, dpi=150)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="write Figure 4 (needs matplotlib)")
    if (path := parser.parse_args().plot) is not None:
        return plot(path)
    print(
        "q = N(0, 1), p = N(δ, 1): mean and variance of one sample, closed form | Monte Carlo with 400,000 samples"
    )
    print(
        f"{'δ':>5} {'KL':>6}   "
        + "   ".join(f"{k + ' mean':>9} {'variance':>19}" for k in ("k1", "k2", "k3"))
    )
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for delta in (0.1, 0.5, 1.0, 1.5, 2.0, 3.0):
        z, row = delta * x - delta**2 / 2, f"{delta:5} {delta**2 / 2:6.3f}   "
        for name, estimator in (("k1", k1), ("k2", k2), ("k3", k3)):
            mean, variance = gaussian(delta)[name]
            measured = (
                f"{estimator(z).var():.3g}" if delta <= 1.5 else "rare"
            )  # dominated by x ≈ 2δ: samples mislead
            row += f"{mean:9.4f} {variance:10.4g} | {measured:>6}   "
        print(row)
    print(
        f"k3 has the smaller variance up to a KL of {crossover():.3f} nats, k1 beyond\n\nvariance over KL (each column 0.5 nats):"
    )
    for power in range(5, -4, -1):
        line = "".join(
            next(
                (
                    n[1]
                    for n in ("k3", "k2", "k1")
                    if round(math.log10(gaussian(math.sqrt(d))[n][1])) == power
                ),
                " ",
            )
            + "  "
            for d in range(1, 13)
        )
        print(f"  1e{power:+d} | {line}")
    print("\nrelative error of the expected gradient (two tokens, enumerated; mean of 20 problems):")
    runs = [gradient_errors(s) for s in range(20)]
    for name in runs[0]:
        print(f"    {name:38} {sum(r[name] for r in runs) / len(runs):.3f}")
    print("\na bandit pulled towards one of eight arms; KL to the uniform start after 300 steps:")
    used = dict(none="not used", loss="differentiated in the loss", reward="in the reward")
    for way, text in used.items():
        print(f"    k1 {text:28} {regularised_run(way):.3f}")



if __name__ == "__main__":
    main()
