"""Create small vision transformers of timm and of Hugging Face with random weights, and compute the transformers'
outputs for two images.

    python -m tests.oracles.backbones     # needs timm and transformers; writes tests/fixtures/backbones

tests/unit/deploy/test_embedding.py compares medsilo's network with the stored outputs.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FIXTURES = Path(__file__).parents[1] / "fixtures" / "backbones"


def drawn(model: nn.Module) -> nn.Module:
    """Draw all weights at random, so that no weight keeps its initial 0 or 1."""
    with torch.no_grad():
        for own in model.parameters():
            own.copy_(torch.randn_like(own) * 0.2 + (own if own.ndim == 1 else 0))
    return model.eval()


def keep(folder: Path, name: str, model: nn.Module, images: Tensor, features: Tensor) -> None:
    # a tensor has different names in Hugging Face's files and in Hugging Face's models
    if hasattr(model, "save_pretrained"):
        with TemporaryDirectory() as place:
            model.save_pretrained(place)
            (folder / f"{name}.safetensors").write_bytes((Path(place) / "model.safetensors").read_bytes())
    else:
        save_file({key: own.contiguous() for key, own in model.state_dict().items()}, folder / f"{name}.safetensors")
    save_file({"images": images, "features": features.contiguous()}, folder / f"{name}.features.safetensors")


@torch.no_grad()
def main(folder: Path) -> None:
    from timm.models.vision_transformer import VisionTransformer
    from transformers import (
        Dinov2Config,
        Dinov2Model,
        Dinov2WithRegistersConfig,
        Dinov2WithRegistersModel,
        ViTConfig,
        ViTForImageClassification,
        ViTModel,
    )

    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    images = torch.rand(2, 3, 16, 16)
    numbers = {"img_size": 16, "patch_size": 8, "embed_dim": 8, "depth": 2, "num_heads": 2}
    model = drawn(VisionTransformer(**numbers, num_classes=5))
    keep(folder, "timm", model, images, model.forward_head(model.forward_features(images), pre_logits=True))
    several = {"init_values": 1e-5, "reg_tokens": 2, "no_embed_class": True}
    model = drawn(VisionTransformer(**numbers, num_classes=0, **several))
    keep(folder, "timm-registers", model, images, model(images))
    model = drawn(VisionTransformer(**numbers, num_classes=0, global_pool="avg"))
    keep(folder, "timm-mean", model, images, model(images))

    numbers = {"image_size": 16, "patch_size": 8, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = drawn(ViTModel(ViTConfig(**numbers, intermediate_size=32)))
    keep(folder, "hf-vit", model, images, model(images).last_hidden_state[:, 0])
    model = drawn(ViTForImageClassification(ViTConfig(**numbers, intermediate_size=32, num_labels=3)))
    keep(folder, "hf-classifier", model, images, model.vit(images).last_hidden_state[:, 0])
    model = drawn(Dinov2Model(Dinov2Config(**numbers)))
    keep(folder, "hf-dinov2", model, images, model(images).last_hidden_state[:, 0])
    model = drawn(Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**numbers, num_register_tokens=2)))
    keep(folder, "hf-registers", model, images, model(images).last_hidden_state[:, 0])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURES)
