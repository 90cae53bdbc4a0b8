"""The vision transformer of timm and of Hugging Face, which can read weights in timm's layout and in Hugging Face's
layout.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from medsilo.extend import Network

Numbers = Annotated[tuple[float, ...], Field(min_length=1, max_length=64)]

# maps Hugging Face's names of a block's tensors in ViT and DINOv2 to timm's names
BLOCK = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.output.dense": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
}
WHOLE = {
    "embeddings.cls_token": "cls_token",
    "embeddings.register_tokens": "reg_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.weight": "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.bias": "patch_embed.proj.bias",
    "layernorm.weight": "norm.weight",
    "layernorm.bias": "norm.bias",
}
# name prefixes of those tensors in Hugging Face's files that do not affect a network's features
UNUSED = ("embeddings.mask_token", "pooler.", "classifier.", "decoder.", "lm_head.")
MARK = "embeddings.patch_embeddings.projection.weight"
QUERIES = re.compile(r"encoder\.layer\.(\d+)\.attention\.attention\.query\.(weight|bias)")


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        cases, tokens, width = x.shape
        parts = self.qkv(x).view(cases, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(*parts)
        return self.proj(found.transpose(1, 2).reshape(cases, tokens, width))


class Layers(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, settings: "TimmViT") -> None:
        super().__init__()
        width = settings.width
        self.norm1, self.norm2 = (nn.LayerNorm(width, settings.epsilon) for _ in range(2))
        self.attn, self.mlp = Attention(width, settings.heads), Layers(width, 4 * width)
        self.ls1, self.ls2 = (Scale(width) if settings.layer_scale else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class Patches(nn.Module):
    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Transformer(nn.Module):
    """Maps [B, channels, size, size] to [B, classes]; its tensors have the names that timm uses."""

    def __init__(self, settings: "TimmViT", channels: int, classes: int) -> None:
        super().__init__()
        width, self.mean_of_patches = settings.width, settings.pool == "mean"
        self.mean, self.std = ([*own] * channels if len(own) == 1 else [*own] for own in (settings.mean, settings.std))
        self.patch_embed = Patches(channels, width, settings.patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.reg_token = nn.Parameter(torch.zeros(1, settings.registers, width)) if settings.registers else None
        places = (settings.size // settings.patch) ** 2 + (0 if settings.registers else 1)
        self.pos_embed = nn.Parameter(torch.randn(1, places, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(settings) for _ in range(settings.depth)))
        norm, none = nn.LayerNorm(width, settings.epsilon), nn.Identity()
        self.norm: nn.Module = none if self.mean_of_patches else norm
        self.fc_norm: nn.Module = norm if self.mean_of_patches else none
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        mean, std = (x.new_tensor(own).view(-1, 1, 1) for own in (self.mean, self.std))
        x = self.patch_embed((x - mean) / std)
        first = self.cls_token.expand(len(x), -1, -1)
        if self.reg_token is None:
            x = torch.cat([first, x], 1) + self.pos_embed
        else:
            x = torch.cat([first, self.reg_token.expand(len(x), -1, -1), x + self.pos_embed], 1)
        others = 1 if self.reg_token is None else 1 + self.reg_token.shape[1]
        x = self.norm(self.blocks(x))
        return self.head(self.fc_norm(x[:, others:].mean(1) if self.mean_of_patches else x[:, 0]))


class TimmViT(Network):
    """The vision transformer of timm and of Hugging Face (ViT, DINOv2), which maps [B, channels, size, size] to [B,
    classes].

    The default sizes are those of ViT-S/16. The network first normalises inputs, which are between 0 and 1, to (x -
    mean) / std.
    """

    name: Literal["timm-vit"] = "timm-vit"
    size: int = Field(224, ge=8, le=1024, description="height and width of the images, equal to `task.size`")
    patch: int = Field(16, ge=2, le=64, description="height and width of a patch; must divide `size`")
    width: int = Field(384, ge=8, le=4096, description="number of features of a token; must be a multiple of `heads`")
    depth: int = Field(12, ge=1, le=64, description="number of transformer blocks")
    heads: int = Field(6, ge=1, le=64, description="number of attention heads in each block")
    registers: int = Field(0, ge=0, le=64, description="number of register tokens, for DINOv2 with registers")
    layer_scale: bool = Field(
        False, description="whether learned factors scale the outputs of each block, as in DINOv2"
    )
    pool: Literal["token", "mean"] = Field(
        "token", description="the embedding of an image: the class `token`, or the `mean` over the image's patches"
    )
    epsilon: float = Field(
        1e-6,
        ge=1e-12,
        le=1e-3,
        description="ε of the layer norms: 1e-6 in timm and DINOv2, 1e-12 in Hugging Face's ViT",
    )
    mean: Numbers = Field(
        (0.485, 0.456, 0.406), description="mean of each channel in pre-training, or one mean for all channels"
    )
    std: Numbers = Field(
        (0.229, 0.224, 0.225),
        description="standard deviation of each channel in pre-training, or one value for all channels",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.size % self.patch or self.width % self.heads:
            raise ValueError(
                f"size {self.size} is not a multiple of patch {self.patch}, or width {self.width} is not a multiple of "
                "heads"
            )
        if min(self.std) <= 0:
            raise ValueError("std: give numbers above 0")
        return self

    def conflicts(self, plan: Any, networks: Mapping[str, nn.Module]) -> Any:
        """Yield the reasons why the network does not fit a plan, for example because its normalisation is for another
        number of channels.
        """
        channels = plan.task.channels
        if wrong := [key for key in ("mean", "std") if len(getattr(self, key)) not in (1, channels)]:
            numbers = len(getattr(self, wrong[0]))
            yield f"network: {wrong[0]} has {numbers} numbers for {channels} channels; give one for each, or for all"
            return
        yield from super().conflicts(plan, networks)

    def build(self, channels: int, classes: int) -> nn.Module:
        return Transformer(self, channels, classes)

    def translated(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of a file under timm's names; names of Hugging Face are translated."""
        marks = [name for name in tensors if name.endswith(MARK)]
        if not marks:
            return tensors
        begin = len(marks[0]) - len(MARK)
        theirs = {name[begin:]: tensor for name, tensor in tensors.items() if name[:begin] == marks[0][:begin]}
        names = {name: WHOLE.get(name) or _of_block(name) for name in theirs if not name.startswith(UNUSED)}
        found = {ours: theirs[name] for name, ours in names.items() if ours}
        for name in filter(QUERIES.fullmatch, theirs):
            number, kind = QUERIES.fullmatch(name).groups()  # type: ignore[union-attr]
            parts = [theirs.get(name.replace("query", part)) for part in ("query", "key", "value")]
            if all(own is not None for own in parts):
                found[f"blocks.{number}.attn.qkv.{kind}"] = torch.cat(parts)  # type: ignore[arg-type]
        # in a file of timm with register tokens, the class token already includes its position embedding
        if {"reg_token", "cls_token", "pos_embed"} <= found.keys():
            place = found["pos_embed"]
            found |= {"cls_token": found["cls_token"] + place[:, :1], "pos_embed": place[:, 1:]}
        return found


def _of_block(name: str) -> str:
    """Translate Hugging Face's name for a tensor of a block to timm's name. For the tensors of queries, keys and
    values, return an empty text, because timm stores these three tensors as one. Return names of tensors outside of
    blocks unchanged.
    """
    told = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)", name)
    if not told:
        return name
    number, rest = told.groups()
    if rest.startswith("attention.attention."):
        return ""
    for theirs, ours in BLOCK.items():
        if rest == theirs or rest.startswith(f"{theirs}."):
            return f"blocks.{number}.{ours}{rest[len(theirs) :]}"
    return f"blocks.{number}.{rest}"
