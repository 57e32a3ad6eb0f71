#!/usr/bin/env python3
"""Writes torch_golden.json: steps of torch.optim on a few numbers, for optimizer_test.cc. Needs torch."""
import json, pathlib, torch

torch.manual_seed(7)
N, STEPS = 11, 6
RATES = [1e-2, 3e-3, 3e-3, 1e-3, 1e-3, 5e-4]
cases = []
for kind, make in {
    "adam": lambda p, o: torch.optim.Adam(p, lr=1, betas=o["betas"], eps=o["eps"], weight_decay=o["weight_decay"], foreach=False),
    "adamw": lambda p, o: torch.optim.AdamW(p, lr=1, betas=o["betas"], eps=o["eps"], weight_decay=o["weight_decay"], foreach=False),
    "sgd": lambda p, o: torch.optim.SGD(p, lr=1, momentum=o["momentum"], weight_decay=o["weight_decay"], foreach=False),
}.items():
    options = ([dict(betas=b, eps=e, weight_decay=w) for b, e in (((0.9, 0.999), 1e-8), ((0.9, 0.98), 1e-9), ((0.0, 0.95), 1e-6)) for w in (0.0, 0.1)]
               if kind != "sgd" else [dict(momentum=m, weight_decay=w) for m in (0.0, 0.9) for w in (0.0, 0.1)])
    for option in options:
        p = torch.randn(N)
        start = p.tolist()
        p = torch.nn.Parameter(p)
        optimizer = make([p], option)
        gradients, results = [], []
        for step in range(STEPS):
            p.grad = torch.randn(N) * (0.01 if step % 2 else 3.0)
            gradients.append(p.grad.tolist())
            optimizer.param_groups[0]["lr"] = RATES[step]
            optimizer.step()
            results.append(p.detach().tolist())
        cases.append(dict(kind=kind, options=option, start=start, gradients=gradients, rates=RATES, results=results))
out = pathlib.Path(__file__).with_name("torch_golden.json")
out.write_text('{"torch": "%s", "cases": [\n%s\n]}\n' % (torch.__version__, ",\n".join(json.dumps(c) for c in cases)))
