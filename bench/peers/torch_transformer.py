"""The encoder-decoder Transformer of Frit's `mt-base` and `mt-big` cases in PyTorch: what the GPU training peers run.

Post-LN or pre-LN, ReLU, one table for source, target and output, embeddings times sqrt(H) plus sinusoidal positions (all sines, then all cosines), as transformers'
MarianMTModel and Frit have them. Dropout on embeddings and every sublayer's output, after the activation, and on attention probabilities. Queries, keys and
values of self-attention are one product, keys and values of cross-attention another, as a careful user writes them.
"""
import dataclasses, math

import torch
import torch.nn as nn
import torch.nn.functional as F

IGNORED = -100  # label of a padded position: what cross_entropy leaves out


@dataclasses.dataclass
class Sizes:
    encoder_layers: int = 6
    decoder_layers: int = 6
    width: int = 512
    heads: int = 8
    ffn: int = 2048
    vocabulary: int = 32768
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation_dropout: float = 0.1
    label_smoothing: float = 0.1
    pad: int = 0
    max_positions: int = 512
    learned_positions: bool = False
    scale_embedding: bool = True
    activation: str = "relu"
    pre_norm: bool = False


def mt_sizes(name, **changes):
    """mt-base, mt-big, and mt-tiny, which only tests these scripts."""
    width, heads, ffn, layers, p = {"mt-base": (512, 8, 2048, 6, 0.1), "mt-big": (1024, 16, 4096, 6, 0.3), "mt-tiny": (32, 2, 64, 2, 0.1)}[name]
    given = dict(width=width, heads=heads, ffn=ffn, encoder_layers=layers, decoder_layers=layers, dropout=p, attention_dropout=p, activation_dropout=p)
    if name == "mt-tiny":
        given["vocabulary"] = 101
    return Sizes(**{**given, **changes})


class Attention(nn.Module):
    """materialised: scores, softmax and dropout as operators of their own, what the papers compare with; else scaled_dot_product_attention."""

    def __init__(self, s, heads, causal, cross, materialised):
        super().__init__()
        self.heads, self.causal, self.p, self.materialised = heads, causal, s.attention_dropout, materialised
        if cross:
            self.q, self.kv = nn.Linear(s.width, s.width), nn.Linear(s.width, 2 * s.width)
        else:
            self.qkv = nn.Linear(s.width, 3 * s.width)
        self.cross = cross
        self.out = nn.Linear(s.width, s.width)

    def forward(self, x, memory, mask):
        """Shapes: x [B, L, H]; memory [B, S, H]; mask bool [B, 1, 1, S], true where a key counts, or None."""
        B, L, H = x.shape
        if self.cross:
            q, (k, v) = self.q(x), self.kv(memory).chunk(2, -1)
        else:
            q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.view(B, -1, self.heads, H // self.heads).transpose(1, 2) for t in (q, k, v))
        p = self.p if self.training else 0.0
        if self.materialised:
            scores = (q @ k.transpose(-2, -1)) * (H // self.heads) ** -0.5
            if self.causal:
                scores = scores.masked_fill(torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            y = F.dropout(F.softmax(scores, -1), p, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(B, L, H))


class Layer(nn.Module):
    def __init__(self, s, decoder, materialised):
        super().__init__()
        self.p, self.p_activation, self.pre_norm = s.dropout, s.activation_dropout, s.pre_norm
        self.act = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu, "gelu_new": lambda t: F.gelu(t, approximate="tanh")}[s.activation]
        self.self_attention = Attention(s, s.heads, decoder, False, materialised)
        self.self_norm = nn.LayerNorm(s.width)
        self.cross_attention = Attention(s, s.heads, False, True, materialised) if decoder else None
        self.cross_norm = nn.LayerNorm(s.width) if decoder else None
        self.fc1, self.fc2, self.norm = nn.Linear(s.width, s.ffn), nn.Linear(s.ffn, s.width), nn.LayerNorm(s.width)

    def forward(self, x, memory, mask):
        # Padding stands behind the real positions, so that a decoder's causal mask is enough for its self-attention.
        own = None if self.cross_attention is not None else mask
        x = self.sublayer(x, self.self_norm, lambda n: self.self_attention(n, None, own))
        if self.cross_attention is not None:
            x = self.sublayer(x, self.cross_norm, lambda n: self.cross_attention(n, memory, mask))
        return self.sublayer(x, self.norm, lambda n: self.fc2(F.dropout(self.act(self.fc1(n)), self.p_activation, self.training)))

    def sublayer(self, x, norm, f):
        drop = lambda y: F.dropout(y, self.p, self.training)
        return x + drop(f(norm(x))) if self.pre_norm else norm(x + drop(f(x)))


class Transformer(nn.Module):
    """forward gives the label-smoothed cross entropy of a batch: its mean over labels, or with reduction="sum" the sum."""

    def __init__(self, sizes, materialised=False, padded=True, reduction="mean"):
        super().__init__()
        s = self.sizes = sizes
        self.padded, self.reduction = padded, reduction
        self.embedding = nn.Embedding(s.vocabulary, s.width)
        nn.init.normal_(self.embedding.weight, std=s.width ** -0.5)
        if s.learned_positions:
            self.positions = nn.Parameter(torch.randn(s.max_positions, s.width) * s.width ** -0.5)
        else:
            half = torch.arange(s.width // 2, dtype=torch.float64)
            angle = torch.arange(s.max_positions, dtype=torch.float64)[:, None] / 10000 ** (2 * half / s.width)
            self.register_buffer("positions", torch.cat([angle.sin(), angle.cos()], 1).float())
        self.encoder = nn.ModuleList(Layer(s, False, materialised) for _ in range(s.encoder_layers))
        self.decoder = nn.ModuleList(Layer(s, True, materialised) for _ in range(s.decoder_layers))
        self.encoder_norm, self.decoder_norm = (nn.LayerNorm(s.width) if s.pre_norm else nn.Identity() for _ in range(2))

    def embed(self, ids):
        scale = math.sqrt(self.sizes.width) if self.sizes.scale_embedding else 1.0
        return F.dropout(self.embedding(ids) * scale + self.positions[: ids.size(1)], self.sizes.dropout, self.training)

    def forward(self, source, target, labels):
        """Shapes: source [B, S]; target, labels [B, T]; int64. Source positions that hold the pad id are masked if the model was made padded."""
        mask = (source != self.sizes.pad)[:, None, None, :] if self.padded else None
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory, None, mask)
        memory = self.encoder_norm(memory)
        h = self.embed(target)
        for layer in self.decoder:
            h = layer(h, memory, mask)
        logits = F.linear(self.decoder_norm(h), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=self.sizes.label_smoothing, ignore_index=IGNORED, reduction=self.reduction)


def marian_names(sizes):
    """For each parameter of Transformer, the names under which a Marian model directory holds it: several where one product takes several matrices."""
    names = {"embedding.weight": ["model.shared.weight"]}
    for side, n in (("encoder", sizes.encoder_layers), ("decoder", sizes.decoder_layers)):
        for i in range(n):
            ours, theirs = f"{side}.{i}.", f"model.{side}.layers.{i}."
            parts = {
                "self_attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "self_attention.out": ["self_attn.out_proj"],
                "self_norm": ["self_attn_layer_norm"], "fc1": ["fc1"], "fc2": ["fc2"], "norm": ["final_layer_norm"],
            }
            if side == "decoder":
                parts |= {"cross_attention.q": ["encoder_attn.q_proj"], "cross_attention.kv": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
                          "cross_attention.out": ["encoder_attn.out_proj"], "cross_norm": ["encoder_attn_layer_norm"]}
            for part, sources in parts.items():
                for kind in ("weight", "bias"):
                    names[f"{ours}{part}.{kind}"] = [f"{theirs}{source}.{kind}" for source in sources]
        if sizes.pre_norm:
            names |= {f"{side}_norm.{kind}": [f"model.{side}.layer_norm.{kind}"] for kind in ("weight", "bias")}
    return names


def load_marian(model, tensors):
    """Copies a Marian directory's tensors (a dict) into the model. Raises ValueError naming what is missing, left over or of another kind."""
    tensors = dict(tensors)
    bias = tensors.pop("final_logits_bias", None)
    if bias is not None and bias.count_nonzero():
        raise ValueError("final_logits_bias is not zero: this model has no such bias")
    for side in ("encoder", "decoder"):  # sinusoidal: made here
        tensors.pop(f"model.{side}.embed_positions.weight", None)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, sources in marian_names(model.sizes).items():
            missing = [s for s in sources if s not in tensors]
            if missing:
                raise ValueError(f"missing: {', '.join(missing)}")
            value = torch.cat([tensors.pop(s) for s in sources])
            if value.shape != parameters[name].shape:
                raise ValueError(f"{sources[0]}: {tuple(value.shape)} rows and columns with its neighbours, expected {tuple(parameters[name].shape)}")
            parameters.pop(name).copy_(value)
    if tensors or parameters:
        raise ValueError(f"left over: {', '.join([*tensors, *parameters])}")
