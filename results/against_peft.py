"""Hold a ViT with adapters against peft's: output, gradients and merged weights, also of the convolution of patches.

Runs alone, in an environment with peft, which brings packages that every import of MONAI would load, too:
    PYTHONPATH=custom python -m results.against_peft
"""

import copy
import importlib.util

found = importlib.util.find_spec  # a build of torchvision that does not fit torch would end the import of peft
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] == "torchvision" else found(name, *rest)

import torch  # noqa: E402
from peft import LoraConfig, inject_adapter_in_model  # noqa: E402
from torch import nn  # noqa: E402

from medsilo.learning.layers import head_layers  # noqa: E402
from medsilo_adapters.low_rank import Adapters, adapt, adapters_of, merged_weight  # noqa: E402
from medsilo_adapters.transformers import ViT  # noqa: E402


def main() -> None:
    """Assert that both are one."""
    torch.manual_seed(0)
    ours = ViT(size=32, patch=8, width=32, depth=2).build(3, 2).eval()
    theirs = copy.deepcopy(ours)
    adapt(ours, Adapters(rank=3, alpha=5.0), head_layers(ours))
    layers = {name: layer for name, layer in ours.named_modules() if adapters_of(layer)}
    kinds = [type(layer).__name__ for layer in layers.values()]
    assert kinds == ["Conv2d"] + 8 * ["Linear"], kinds  # attention's fused projection is one
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=5, target_modules=list(layers), lora_dropout=0.0), theirs)
    pairs = []
    for name, layer in layers.items():
        other = theirs.get_submodule(name)
        nn.init.normal_(adapters_of(layer)[0][1].weight, std=0.1)
        for mine, its in zip(adapters_of(layer)[0], (other.lora_A["default"], other.lora_B["default"]), strict=True):
            its.weight.data.copy_(mine.weight.data)
            pairs.append((mine.weight, its.weight))
    outputs = [network(torch.linspace(-2, 2, 3 * 3 * 32 * 32).view(3, 3, 32, 32).sin()) for network in (ours, theirs)]
    for output in outputs:
        nn.functional.cross_entropy(output, torch.tensor([0, 1, 1])).backward()
    assert (outputs[0] - outputs[1]).abs().max() <= 1e-6
    for mine, its in pairs:
        assert mine.grad.abs().max() > 1e-4 and (mine.grad - its.grad).abs().max() <= 1e-6
    for name, layer in layers.items():
        other = theirs.get_submodule(name)
        other.merge()
        assert (merged_weight(layer) - other.base_layer.weight).abs().max() <= 1e-6, name
    print(f"{len(layers)} layers: output, gradients and merged weights are peft's, to 1e-6")


if __name__ == "__main__":
    main()
