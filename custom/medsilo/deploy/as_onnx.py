"""A network as an ONNX file, for programs that have no PyTorch."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from torch import nn

from medsilo.deploy.supermodel import SuperModel
from medsilo.learning.layers import judges_by_batch

FILE = "model.onnx"
INPUT, OUTPUT = "image", "scores"
BATCH = 3  # cases that it is tried with
NEAR = 1e-3  # of the largest score: further off than this, the file is not the network


def write_onnx(network: nn.Module, shape: tuple[int, ...], path: Path, called: str = INPUT) -> str:
    """Write a network that reads cases of this shape, any number at once; return why not where that can't be.

    called: the input's name.

    The file is tried with ONNX Runtime, and kept only where it finds what the network finds.
    """
    if isinstance(network, SuperModel):
        return "which network of a super model answers depends on the image"
    if judges_by_batch(network):
        return "the network's norms look at the whole batch"
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        return "install medsilo[onnx]"
    images = torch.rand(BATCH, *shape, generator=torch.Generator().manual_seed(0))
    network = network.cpu().eval()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _quietly():
            torch.onnx.export(
                network,
                (images,),
                path,
                input_names=[called],
                output_names=[OUTPUT],
                dynamic_shapes=({0: torch.export.Dim("cases", min=1, max=1 << 16)},),
                external_data=False,
                dynamo=True,
            )
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            alike = all(_alike(network, session, cases, called) for cases in (images, images[:1]))
    except Exception as error:  # exporter and runtime raise anything over what they don't know
        path.unlink(missing_ok=True)
        return f"PyTorch's exporter does not know one of the network's operations ({type(error).__name__})"
    if not alike:
        path.unlink()
        return "ONNX Runtime found something else than the network"
    return ""


@torch.inference_mode()
def _alike(network: nn.Module, session: object, images: torch.Tensor, called: str) -> bool:
    expected = network(images)
    (found,) = session.run([OUTPUT], {called: images.numpy()})  # type: ignore[attr-defined]
    return bool((torch.from_numpy(found) - expected).abs().max() <= NEAR * expected.abs().max())


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep what the exporter says of its steps from the screen."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
