"""The GPT that the course trains: a decoder-only transformer, in one file that is read in five minutes.

Shapes, in the letters that everybody uses: B sequences, T tokens each, C numbers for each token (the width), V tokens
in the vocabulary; a head sees D = C / heads of the C numbers.

What is not here: dtypes. The model is float32 through and through; whoever trains it says what is rounded (chapter 04).

References: Radford et al., Language models are unsupervised multitask learners (GPT-2, 2019), for the architecture and
the scaled initialisation of residual projections; Karpathy, nanoGPT (2022), for the sizes of the presets; Press and
Wolf, arXiv:1608.05859, for tied weights.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """The size of a GPT.

    vocab_size: V, different tokens. context: the largest T. layers: blocks. heads: they divide `width`. width: C.
    dropout: probability of a zero while training. bias: whether linear layers and norms have one (GPT-2 does).
    fused_attention: one call of `scaled_dot_product_attention`; else the same in five operations that can be watched.
    """

    vocab_size: int = 65
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0
    bias: bool = False
    fused_attention: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "heads", "width"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is a whole number from 1 on, not {value!r}")
        if self.width % self.heads:
            raise ValueError(f"the width is shared among the heads: {self.heads} heads do not divide {self.width}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is a probability below 1, not {self.dropout!r}")


# nanoGPT's: for a laptop's CPU, for tiny Shakespeare on a GPU, and the smallest GPT-2. "baby256" is "baby" with rows
# that blocks of 256 divide (chapter 12). `batch` sequences at a time.
PRESETS: dict[str, dict] = {
    "baby": {"layers": 4, "heads": 4, "width": 128, "context": 64, "dropout": 0.0, "bias": False, "batch": 12},
    "baby256": {"layers": 4, "heads": 4, "width": 256, "context": 64, "dropout": 0.0, "bias": False, "batch": 12},
    "shakespeare_char": {
        "layers": 6, "heads": 6, "width": 384, "context": 256, "dropout": 0.2, "bias": False, "batch": 64,
    },
    "gpt2": {"layers": 12, "heads": 12, "width": 768, "context": 1024, "dropout": 0.0, "bias": True, "batch": 12},
}  # fmt: skip


def preset(name: str, **changes: object) -> GPTConfig:
    """The configuration called `name` ("baby", "baby256", "shakespeare_char", "gpt2"), with `changes` to its fields.

    Raises ValueError that lists the presets there are.
    """
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}. The presets are: {', '.join(PRESETS)}")
    fields = {field.name for field in dataclasses.fields(GPTConfig)}
    return GPTConfig(**{key: value for key, value in {**PRESETS[name], **changes}.items() if key in fields})


class Attention(nn.Module):
    """Causal self-attention: every token asks all tokens up to itself, in several heads at once."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.fused, self.dropout = config.heads, config.fused_attention, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)
        self.out_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)  # three times (B, T, C)
        # Each head its own part: (B, heads, T, D).
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # (B, heads, T, D)
        else:
            scores = q @ k.transpose(2, 3) / math.sqrt(C // self.heads)  # (B, heads, T, T)
            future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
            weights = F.softmax(scores.masked_fill(future, -math.inf), dim=-1)
            y = F.dropout(weights, dropout, self.training) @ v  # (B, heads, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side again
        return self.out_dropout(self.out(y))


class MLP(nn.Module):
    """What each token works out alone: up to four times the width, bend, and down again."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.gelu(self.up(x))))  # (B, T, C)


class Block(nn.Module):
    """Attention and MLP, each added to what flows past it: the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))  # (B, T, C)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A GPT of the size that `config` says, with fresh weights from torch's random generator."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.token_embedding.weight = self.head.weight  # tied: what a token looks like going in and coming out
        self.apply(_initialise)
        for name, weight in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                # 2 * layers of these are added up in the residual stream: so its variance does not grow with depth.
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(logits, loss). tokens, targets: int64 (B, T), T at most `config.context`.

        With targets: logits (B, T, V) and the mean cross-entropy, a 0-d tensor. Without: logits of the last position
        alone, (B, 1, V), which is all that generating needs, and None.
        """
        T = tokens.shape[1]
        if self.config.context < T:
            raise ValueError(f"{T} tokens do not fit into a context of {self.config.context}: give the last ones")
        positions = torch.arange(T, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, C)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, -1:]), None  # (B, 1, V)
        logits = self.head(x)  # (B, T, V)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`tokens`, int64 (B, T) with T from 1 on, and `count` more after them: (B, T + count).

        temperature: above 0; small means the likeliest. top_k: choose among that many. generator: of the device.
        Dropout is as the model's mode says: call `.eval()` first.
        """
        for _ in range(count):
            logits, _ = self(tokens[:, -self.config.context :])
            logits = logits[:, -1].float() / temperature  # (B, V)
            if top_k is not None:
                least = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
                logits = logits.masked_fill(logits < least, -math.inf)
            following = torch.multinomial(F.softmax(logits, dim=-1), 1, generator=generator)  # (B, 1)
            tokens = torch.cat((tokens, following), dim=1)
        return tokens

    def size(self) -> int:
        """How many numbers are trained; tied weights count once."""
        return sum(parameter.numel() for parameter in self.parameters())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
