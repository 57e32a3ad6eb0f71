#!/usr/bin/env python3
"""Peer: training steps of a small Transformer in PyTorch on the CPU, as a careful user would run them.

3+3 layers, H 256, 8 heads, FFN 1024, one shared embedding of 8000 tied to the output, sinusoidal positions, post-LN, ReLU, label smoothing 0.1,
dropout 0.1 (embeddings, every sublayer's output, activations, attention probabilities). Padded batches with key-padding masks, SDPA, fused Adam.
usage: torch_train_cpu.py [--batches FILE.json] [--threads 2] [--precision fp32|bf16] [--compile] [--gather] [...]
Prints one JSON object. tokens_per_s counts real source + target tokens: the median over steps of tokens / seconds; total_tokens_per_s is all
tokens over all time. Lengths come from make_batches.py, so that Frit runs the same batches. --gather projects only real target rows on the
vocabulary (kinder to PyTorch than the usual padded loss). Peak RSS holds PyTorch's own libraries: import_rss_mib is what they took before the model.
"""
import argparse, json, math, pathlib, resource, statistics, sys, time

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import make_batches


class Attention(nn.Module):
    def __init__(self, H, heads, p, causal, cross):
        super().__init__()
        self.heads, self.p, self.causal, self.cross = heads, p, causal, cross
        self.q = nn.Linear(H, H if cross else 3 * H)
        self.kv = nn.Linear(H, 2 * H) if cross else None
        self.out = nn.Linear(H, H)

    def forward(self, x, memory, mask):
        B, L, H = x.shape
        q, k, v = (self.q(x), *self.kv(memory).chunk(2, -1)) if self.cross else self.q(x).chunk(3, -1)
        q, k, v = (t.view(B, -1, self.heads, H // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.p if self.training else 0.0, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(B, L, H))


class Layer(nn.Module):
    def __init__(self, H, heads, ffn, p, p_attention, p_activation, decoder):
        super().__init__()
        self.decoder, self.p, self.p_activation = decoder, p, p_activation
        self.self_attention = Attention(H, heads, p_attention, decoder, False)
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(3 if decoder else 2))
        if decoder:
            self.cross_attention = Attention(H, heads, p_attention, False, True)
        self.fc1, self.fc2 = nn.Linear(H, ffn), nn.Linear(ffn, H)

    def forward(self, x, memory, mask):
        drop = lambda t: F.dropout(t, self.p, self.training)
        x = self.norms[0](x + drop(self.self_attention(x, None, None if self.decoder else mask)))
        if self.decoder:
            x = self.norms[2](x + drop(self.cross_attention(x, memory, mask)))
        hidden = F.dropout(F.relu(self.fc1(x)), self.p_activation, self.training)
        return self.norms[1](x + drop(self.fc2(hidden)))


class Transformer(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.embedding, self.scale, self.p, self.gather = nn.Embedding(a.vocab, a.width), math.sqrt(a.width), a.dropout, a.gather
        angle = torch.arange(512)[:, None] / 10000 ** (torch.arange(0, a.width, 2) / a.width)
        self.register_buffer("positions", torch.cat([angle.sin(), angle.cos()], 1))
        layer = lambda decoder: Layer(a.width, a.heads, a.ffn, a.dropout, a.attention_dropout, a.activation_dropout, decoder)
        self.encoder = nn.ModuleList(layer(False) for _ in range(a.layers))
        self.decoder = nn.ModuleList(layer(True) for _ in range(a.layers))
        nn.init.normal_(self.embedding.weight, std=a.width ** -0.5)

    def forward(self, src, tgt, labels):
        embed = lambda ids: F.dropout(self.embedding(ids) * self.scale + self.positions[: ids.size(1)], self.p, self.training)
        mask = (src != 0)[:, None, None, :]
        memory = embed(src)
        for layer in self.encoder:
            memory = layer(memory, None, mask)
        h = embed(tgt)
        for layer in self.decoder:
            h = layer(h, memory, mask)
        if self.gather:
            real = labels != 0
            h, labels = h[real], labels[real]
        logits = F.linear(h, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1, ignore_index=0)


def tensors(batch, vocab):
    S, T = max(p[0] for p in batch), max(p[1] for p in batch)
    src, tgt = torch.zeros(len(batch), S, dtype=torch.long), torch.zeros(len(batch), T, dtype=torch.long)
    for i, (s, t) in enumerate(batch):
        src[i, :s] = torch.randint(1, vocab, (s,))
        tgt[i, :t] = torch.randint(1, vocab, (t,))
    return src, tgt, tgt


def peak_rss_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batches", help="lengths from make_batches.py; made here when left out")
    p.add_argument("--budget", type=int, default=4096)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--warm", type=int, default=3)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--gather", action="store_true")
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--ffn", type=int, default=1024)
    p.add_argument("--vocab", type=int, default=8000)
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--attention-dropout", type=float, default=0.1)
    p.add_argument("--activation-dropout", type=float, default=0.1)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    batches = json.loads(pathlib.Path(a.batches).read_text()) if a.batches else make_batches.make(a.budget, a.warm + a.steps, 1, 100)
    batches = batches[: a.warm + a.steps]
    if len(batches) <= a.warm:
        sys.exit(f"{len(batches)} batches are not more than the {a.warm} of the warm-up")
    data = [tensors(b, a.vocab) for b in batches]
    imported = peak_rss_mib()
    model = Transformer(a).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    step_loss = torch.compile(model, dynamic=True) if a.compile else model
    seconds, t_start, loss = [], time.perf_counter(), None
    for src, tgt, labels in data:
        t0 = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=a.precision == "bf16"):
            loss = step_loss(src, tgt, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - t0)
    warm_s = sum(seconds[: a.warm])
    tokens = [sum(s + t for s, t in b) for b in batches][a.warm:]
    padded = [len(b) * (max(x[0] for x in b) + max(x[1] for x in b)) for b in batches][a.warm:]
    seconds = seconds[a.warm:]
    print(json.dumps(dict(
        peer="torch " + torch.__version__, variant="compile" if a.compile else "eager", gather=a.gather, precision=a.precision, threads=a.threads,
        parameters=sum(q.numel() for q in model.parameters()), steps=len(seconds), tokens_per_s=round(statistics.median(n / s for n, s in zip(tokens, seconds)), 1),
        total_tokens_per_s=round(sum(tokens) / sum(seconds), 1), ms_per_step=round(statistics.median(seconds) * 1e3, 1), fill=round(sum(tokens) / sum(padded), 3),
        warm_s=round(warm_s, 1), loss=round(loss.item(), 4), peak_rss_mib=round(peak_rss_mib()), import_rss_mib=round(imported))))


if __name__ == "__main__":
    main()
