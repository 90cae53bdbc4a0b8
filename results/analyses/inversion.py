"""Reconstruct images from a site's messages as a curious server could (HarmoFL, Fig. 7; Geiping et al. 2020).

The server searches for a smooth image that would have produced the received tensors. The first attack uses two
amplitudes of HarmoFL: the amplitude of one image, and the average amplitude of all images. Sites send only the average,
in round 1. The second attack uses the gradient of one image with a known label at the initial weights, which is the
easiest case for an attacker. A site's real messages give an attacker less information, because they contain weights
after many steps on many images.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import Dataset

from medsilo.core.errors import MedsiloError
from medsilo.learning.amplitude import AmplitudeNorm
from medsilo.learning.compute import LossFunction
from medsilo.learning.loop import batches
from medsilo.learning.seeds import generator_for
from results.analyses.analysis import AnalysisResult, Question
from results.analyses.figures import COLOURS, MARKERS, panels
from results.analyses.finished import FinishedRun, drawn

CASES = 2  # number of attacked images of each site
# number of images of each site that serve as guesses by chance; the attacked image is not one of these images
OTHERS = 32
STEP, SMOOTH = 0.1, 1e-2  # the step size of the signed gradient and the weight of total variation, after Geiping et al.
Mismatch = Callable[[Tensor], Tensor]


# ---------------------------------------------------------------------------------------------------- the attacks
def total_variation(image: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels of [..., H, W]."""
    return image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean()


def reconstruct(mismatch: Mismatch, start: Tensor, low: float, high: float, iterations: int, smooth: float) -> Tensor:
    """Return the image, with values in [low, high], for which the mismatch plus the weighted total variation is
    smallest. Adam follows the sign of the gradient with a learning rate that falls to zero.
    """
    image = start.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([image], lr=STEP * (high - low))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for _ in range(iterations):
        objective = mismatch(image) + smooth * total_variation(image) / (high - low)
        (gradient,) = torch.autograd.grad(objective, image)
        image.grad = gradient.sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            image.clamp_(low, high)
    return image.detach()


def gradients(
    network: nn.Module, loss: LossFunction, images: Tensor, targets: Tensor, graph: bool = False
) -> list[Tensor]:
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    return list(torch.autograd.grad(loss(network(images), targets), weights, create_graph=graph))


def gradient_mismatch(network: nn.Module, loss: LossFunction, targets: Tensor, seen: Sequence[Tensor]) -> Mismatch:
    """Return 1 − cos(angle) for the angle between the observed gradient and a candidate's gradient (Geiping et al., Eq.
    4).
    """
    length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(seen))))

    def mismatch(images: Tensor) -> Tensor:
        own = gradients(network, loss, images, targets, graph=True)
        product = sum(((mine * theirs).sum() for mine, theirs in zip(own, seen, strict=True)), torch.zeros(()))
        return 1 - product / (length * torch.stack([g.square().sum() for g in own]).sum().sqrt() + 1e-12)

    return mismatch


def amplitude_mismatch(shared: Tensor) -> Mismatch:
    """Return ‖|F(x)| − A‖² / ‖A‖² over the shared frequencies of A."""

    def mismatch(images: Tensor) -> Tensor:
        return (amplitude(images[0], shared.shape) - shared).square().sum() / shared.square().sum()

    return mismatch


def amplitude(image: Tensor, shape: Sequence[int]) -> Tensor:
    """Return |F(x)| of [C, H, W] at the frequencies that HarmoFL shares."""
    return torch.fft.rfft2(image).abs()[tuple(slice(length) for length in shape)]


def without_phase(shared: Tensor, shape: Sequence[int]) -> Tensor:
    """Return [C, H, W], the inverse transform of the amplitude with all phases set to 0."""
    spectrum = torch.zeros(*shape[:-1], shape[-1] // 2 + 1, dtype=torch.complex64, device=shared.device)
    spectrum[tuple(slice(length) for length in shared.shape)] = shared.to(spectrum.dtype)
    return torch.fft.irfft2(spectrum, s=list(shape[-2:]))


# ---------------------------------------------------------------------------------------------------- the scores
def psnr(image: Tensor, truth: Tensor, span: float) -> float:
    """Return the peak signal-to-noise ratio in dB; for identical images, the ratio is infinite."""
    error = float((image.double() - truth.double()).square().mean())
    return 10 * math.log10(span**2 / error) if error else math.inf


def ssim(image: Tensor, truth: Tensor, span: float) -> float:
    from monai.metrics.regression import SSIMMetric  # MONAI is slow to import

    window = min(11, (min(truth.shape[-2:]) - 1) // 2 * 2 + 1)
    similarity = SSIMMetric(2, data_range=span, win_size=window)(image[None], truth[None])
    return float(similarity)  # type: ignore[arg-type]


MEASURES = {"psnr": psnr, "ssim": ssim}
Scores = dict[str, dict[str, float]]


def aligned(image: Tensor, truth: Tensor) -> Tensor:
    """Of all circular shifts of the image and of the image rotated by 180°, return the one nearest to the true image.

    An amplitude determines neither an image's position nor its rotation by 180°, but a human viewer recognises the
    image anyway.
    """
    candidates = []
    for turned in (image, image.flip(-1, -2)):
        fit = torch.fft.irfft2(torch.fft.rfft2(truth) * torch.fft.rfft2(turned).conj(), s=list(truth.shape[-2:])).sum(0)
        down, right = divmod(int(fit.argmax()), fit.shape[1])
        candidates.append(torch.roll(turned, (down, right), (-2, -1)))
    return min(candidates, key=lambda candidate: float((candidate - truth).square().sum()))


# ---------------------------------------------------------------------------------------------------- the analysis
def inversions(runs: Sequence[FinishedRun], asked: Question) -> AnalysisResult:
    """Attack some training images of each site, and compare the attack's scores with scores of guesses that use no
    attack.
    """
    if len(runs) > 1:
        raise MedsiloError("inversion depends on the plan and the data, not on the training: give one run")
    run = runs[0]
    shape = run.plan.task.shape
    if shape is None or len(shape) != 3:
        raise MedsiloError(f"inversion looks for flat images of one size; task {run.plan.task.name} has none")
    attacks = [attack for site in run.sites for attack in _attacks(run, site, asked)]
    rows = list(attacks[0]["scores"])
    means = {row: {key: _mean([one["scores"][row][key] for one in attacks]) for key in MEASURES} for row in rows}
    figures = {"inversion": _draw_scores(rows, attacks)}
    if run.plan.task.synthetic or asked.settings.pictures:
        figures["inversion-images"] = _draw_images(attacks)
    images = [{"site": one["site"], "scores": _listed(one["scores"])} for one in attacks]
    data = {"mean": _listed(means), "images": images}
    lines = [f"{row:<46} PSNR {both['psnr']:6.2f} dB  SSIM {both['ssim']:.3f}" for row, both in means.items()]
    return AnalysisResult(data, figures, lines)


def _attacks(run: FinishedRun, site: str, asked: Question) -> list[dict[str, Any]]:
    compute = asked.settings.compute()
    train = run.data(site, asked.settings).train
    cases = drawn(train, OTHERS, asked.seed, site)
    pool = [(cases[place][0].to(compute.device), cases[place][1]) for place in range(len(cases))]
    images = torch.stack([image for image, _ in pool])
    low, high = float(images.min()), float(images.max())
    span = high - low
    networks = {name: network.to(compute.device) for name, network in run.plan.build_networks().items()}
    model = networks["model"].eval()
    shared = site_amplitude(run, site, train, asked) if run.plan.algorithm.amplitude else None
    found = []
    for place, (truth, target) in enumerate(pool[: asked.cases or CASES]):
        generator = generator_for(asked.seed, "inversion", site, place)
        noise = torch.rand(truth.shape, generator=generator).to(truth) * span + low

        def solve(mismatch: Mismatch, start: Tensor = noise[None]) -> Tensor:
            return reconstruct(mismatch, start, low, high, asked.iterations, SMOOTH)[0]

        targets = target[None].to(compute.device)
        seen = gradients(model, run.plan.task.goal.loss, truth[None], targets)
        guesses = {"its gradient": solve(gradient_mismatch(model, run.plan.task.goal.loss, targets, seen))}
        if shared is not None:
            alone = amplitude(truth, shared.shape)
            guesses["its amplitude, no phase"] = without_phase(alone, truth.shape).clamp(low, high)
            guesses["its amplitude, phase sought"] = solve(amplitude_mismatch(alone))
            guesses["average amplitude, no phase"] = without_phase(shared, truth.shape).clamp(low, high)
            guesses["average amplitude, phase sought"] = solve(amplitude_mismatch(shared))
        others = torch.cat([images[:place], images[place + 1 :]])
        guesses |= {"chance: noise": noise, "chance: mean of the site's other images": others.mean(0)}
        scores = {name: score(guess, truth, span) for name, guess in guesses.items()}
        each = [score(other, truth, span) for other in others]
        for name, pick in (("another image, on average", _mean), ("the most alike other image", max)):
            scores[f"chance: {name}"] = {key: pick([one[key] for one in each]) for key in MEASURES}
        found.append({"site": site, "scores": scores, "pictures": {"image": truth} | guesses, "range": (low, high)})
    return found


def site_amplitude(run: FinishedRun, site: str, train: Dataset, asked: Question) -> Tensor:
    """Return the average amplitude that the site would send in round 1 if the plan did not set `training.truncate`."""
    compute = asked.settings.compute()
    layer = run.plan.algorithm.input_layer(run.plan.build_networks())
    if not isinstance(layer, AmplitudeNorm):
        raise MedsiloError(f"{run.plan.algorithm.name} sends no amplitude")
    layer.to(compute.device).train()
    for epoch in range(run.plan.training.local_epochs):
        order = generator_for(run.plan.seed, site, "shuffle", 1, epoch)
        for inputs, _ in batches(train, run.plan.training.batch_size, compute, order):
            layer(inputs)
    return layer.used.clone()


def score(guess: Tensor, truth: Tensor, span: float) -> dict[str, float]:
    """Return the PSNR and the SSIM of a guess, each the better of the values with and without alignment to the true
    image. Random guesses are scored in the same way, so that their scores show what an attack adds.
    """
    images = (guess, aligned(guess, truth))
    return {name: max(measure(image, truth, span) for image in images) for name, measure in MEASURES.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _listed(scores: Scores) -> dict[str, dict[str, float | str]]:
    """Replace infinite numbers by the text "inf", because JSON has no infinity."""
    return {
        row: {key: "inf" if math.isinf(value) else value for key, value in both.items()} for row, both in scores.items()
    }


def _draw_scores(rows: Sequence[str], attacks: Sequence[dict[str, Any]]) -> Figure:
    figure, ((left, right),) = panels(1, 2, 4.6, 0.45 * len(rows) + 0.6)
    sites = list(dict.fromkeys(attack["site"] for attack in attacks))
    for attack in attacks:
        look = sites.index(attack["site"])
        for panel, key in ((left, "psnr"), (right, "ssim")):
            values = [attack["scores"][row][key] for row in rows]
            marker, colour = MARKERS[look % len(MARKERS)], COLOURS[look % len(COLOURS)]
            panel.scatter(values, range(len(rows)), s=22, marker=marker, c=colour, alpha=0.8, label=attack["site"])
    left.set(yticks=range(len(rows)), yticklabels=rows, xlabel="PSNR in dB")
    right.set(yticks=range(len(rows)), yticklabels=[], xlabel="SSIM")
    for panel in (left, right):
        panel.invert_yaxis()
        panel.grid(axis="y", alpha=0.3)
    handles = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    right.legend(handles.values(), handles.keys(), fontsize=7)
    return figure


def _draw_images(attacks: Sequence[dict[str, Any]]) -> Figure:
    figure, axes = panels(len(attacks), len(attacks[0]["pictures"]), 1.5, 1.6)
    for attack, line in zip(attacks, axes, strict=True):
        low, high = attack["range"]
        for panel, (name, picture) in zip(line, attack["pictures"].items(), strict=True):
            shown = ((picture.cpu() - low) / (high - low)).clamp(0, 1).numpy()
            panel.imshow(shown.transpose(1, 2, 0) if len(shown) == 3 else shown[0], cmap="gray", vmin=0, vmax=1)
            panel.set(xticks=[], yticks=[])
            panel.set_title(name.replace(", ", ",\n").replace(": ", ":\n").replace("site's ", "site's\n"), fontsize=7)
        line[0].set_ylabel(attack["site"], fontsize=7)
    return figure
