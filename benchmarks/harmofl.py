"""Measure the time of HarmoFL's AmplitudeNorm relative to numpy code for single images, and the time of a perturbed
step relative to a plain step.

    python benchmarks/harmofl.py

The numpy code implements the paper's equations for every image and channel: the transform, its absolute value, its
angle, and the inverse transform. AmplitudeNorm and the numpy code process the same float32 images with the same
amplitude. The program first compares the results of both implementations, and then times both with as many threads as
the machine has cores. The goals are speed-ups of 5 for the whole spectrum and of 50 for the frozen mean. A perturbed
step may take at most as long as 2.1 plain steps.
"""

from collections.abc import Callable

import numpy as np
import torch
from timing import fastest_in_turn, note, run
from torch import Tensor, nn

from medsilo.learning.amplitude import AmplitudeNorm
from medsilo.learning.perturbation import PerturbedOptimizer
from medsilo.models.architectures import DenseNet121, SmallCnn, UNet

BATCHES = ((16, 3, 384, 384), (128, 3, 96, 96))
NETWORKS = (
    ("densenet121 8x3x96x96", DenseNet121(), (8, 3, 96, 96)),
    ("unet 8x3x128x128", UNet(), (8, 3, 128, 128)),
    ("small-cnn 16x3x48x48", SmallCnn(), (16, 3, 48, 48)),
)
REPEATS, STEPS = 5, 25
LEAST = {None: 5.0, 0.0: 50.0}  # minimum required speed-up for each band of frequencies
MOST = 2.1


def by_image(images: np.ndarray, amplitude: np.ndarray, decay: float, frozen: bool, band: float | None) -> np.ndarray:
    """Compute the paper's equations 2 to 4 for one image after the other; update `amplitude` in place if `frozen` is
    false.
    """
    if not frozen:
        mean = np.mean([[np.abs(np.fft.fft2(channel)) for channel in image] for image in images], axis=0)
        amplitude *= 1 - decay
        amplitude += decay * mean
    out = np.empty_like(images)
    for number, image in enumerate(images):
        for channel, values in enumerate(image):
            spectrum = np.fft.fft2(values)
            phase, taken = np.angle(spectrum), np.abs(spectrum)
            if band is None:
                taken = amplitude[channel]
            else:
                taken[0, 0] = amplitude[channel, 0, 0]
            out[number, channel] = np.fft.ifft2(taken * np.exp(1j * phase)).real
    return out


def amplitudes() -> bool:
    print(f"AmplitudeNorm, {torch.get_num_threads()} threads: milliseconds per batch, fastest of {REPEATS}")
    print(f"{'batch':<18} {'band':<6} {'':<8} {'numpy':>8} {'medsilo':>8} {'ratio':>8}")
    fine = True
    for shape in BATCHES:
        images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        array = images.numpy()
        for band in (None, 0.0):
            for frozen in (False, True):
                norm = AmplitudeNorm(shape[1:], band=band)
                norm(images)
                whole = np.mean([np.abs(np.fft.fft2(image)) for image in array], axis=0)
                if frozen:
                    norm.freeze()
                expected = by_image(array, whole, norm.decay, frozen, band)
                np.testing.assert_allclose(norm(images).numpy(), expected, rtol=0, atol=1e-4)

                def reference(amplitude=whole, frozen=frozen, band=band, array=array) -> object:
                    return by_image(array, amplitude, 0.1, frozen, band)

                slow, fast = fastest_in_turn(reference, lambda norm=norm, images=images: norm(images), REPEATS)
                goal = LEAST[band] if frozen or band is None else 0.0
                fine &= slow / fast >= goal
                name = "x".join(map(str, shape))
                kind, which = "frozen" if frozen else "learning", "all" if band is None else "mean"
                verdict = f"  goal {goal:.0f}: {'met' if slow / fast >= goal else 'MISSED'}" if goal else ""
                times = f"{slow * 1e3:>8.1f} {fast * 1e3:>8.1f} {slow / fast:>7.1f}x"
                print(f"{name:<18} {which:<6} {kind:<8} {times}{verdict}")
                note(f"harmofl: amplitudes {name} {which} {kind}", fast / slow)
    return fine


def steps() -> bool:
    print(f"\nA perturbed step in plain steps (two passes are 2.0), fastest of {STEPS}; goal: at most {MOST}")
    print(f"{'network':<28} {'plain ms':>9} {'perturbed ms':>13} {'ratio':>7}")
    fine = True
    for name, network, shape in NETWORKS:
        torch.manual_seed(0)
        model, inputs = network.build(shape[1], 2), torch.rand(shape)
        plain = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        perturbed = PerturbedOptimizer(plain, 0.05, module=model)
        closure = closure_of(model, plain, inputs)

        def one(plain=plain, closure=closure) -> None:
            closure()
            plain.step()

        def two(perturbed=perturbed, closure=closure) -> None:
            perturbed.step(closure)

        single, double = fastest_in_turn(one, two, STEPS)
        fine &= double / single <= MOST
        verdict = "met" if double / single <= MOST else "MISSED"
        note(f"harmofl: perturbed step, {name}", double / single)
        print(f"{name:<28} {single * 1e3:>9.1f} {double * 1e3:>13.1f} {double / single:>6.2f}x  {verdict}")
    return fine


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) ** 2).mean()
        loss.backward()
        return loss.detach()

    return closure


def main() -> int:
    met = [amplitudes(), steps()]
    return 0 if all(met) else 1


if __name__ == "__main__":
    run(main, globals(), BATCHES=((2, 3, 12, 12),), NETWORKS=NETWORKS[2:], REPEATS=1, STEPS=1)
