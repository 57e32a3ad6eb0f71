#!/usr/bin/env python3
"""Peer: one Adam step of torch.optim over the 257 tensors of Transformer-big, each an eighth of its size, on the CPU.

Transformer-big: H 1024, FFN 4096, 6+6 layers, a shared embedding of 32768. Tensors: an encoder layer has q, k, v, out, fc1, fc2 (weight and bias) and
2 LayerNorms = 16, a decoder layer 4 projections and a LayerNorm more = 26; 6 * 16 + 6 * 26 = 252, the embedding and the LayerNorm after each stack make 257.
Every tensor's first dimension is divided by 8, which keeps their number and proportions: 26.3 M parameters.
usage: torch_adam_cpu.py [--threads 2] [--repeat 15] [--list]     --list prints the shapes as JSON, for ours to run the same
Prints one JSON object a variant: loop, foreach, fused. gb_per_s counts 28 bytes a parameter (p, m, v read and written, g read).
"""
import argparse, json, statistics, time


def shapes(divide=8):
    H, F, V = 1024, 4096, 32768
    linear = lambda o, i: [(o // divide, i), (o // divide,)]
    norm = [(H // divide,)] * 2
    attention = linear(H, H) * 4 + norm
    ffn = linear(F, H) + linear(H, F) + norm
    return [(V // divide, H)] + (attention + ffn) * 6 + norm + (attention * 2 + ffn) * 6 + norm


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--repeat", type=int, default=15)
    p.add_argument("--list", action="store_true")
    a = p.parse_args()
    sizes = shapes()
    assert len(sizes) == 257
    if a.list:
        print(json.dumps(sizes))
        return
    import torch
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    for variant in ("loop", "foreach", "fused"):
        params = [torch.nn.Parameter(torch.randn(s)) for s in sizes]
        for q in params:
            q.grad = torch.randn_like(q)
        n = sum(q.numel() for q in params)
        optimizer = torch.optim.Adam(params, lr=1e-4, betas=(0.9, 0.98), eps=1e-9, foreach=variant == "foreach", fused=variant == "fused")
        optimizer.step()
        times = []
        for _ in range(a.repeat):
            t = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - t)
        ms = statistics.median(times) * 1e3
        print(json.dumps(dict(peer="torch " + torch.__version__, variant=variant, tensors=len(params), parameters=n, threads=a.threads, ms=round(ms, 2),
                              min_ms=round(min(times) * 1e3, 2), gb_per_s=round(28 * n / ms / 1e6, 2))), flush=True)


if __name__ == "__main__":
    main()
