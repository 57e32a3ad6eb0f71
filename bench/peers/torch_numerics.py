#!/usr/bin/env python3
"""Peer: how far PyTorch's own 16-bit operators are from a float64 reference, on the inputs of Frit's case tables.

usage: torch_numerics.py [--out FILE.json] [--device cuda|cpu] [--small] [--cases FILE]
       torch_numerics.py --list      prints the operators and cases that it measures
       torch_numerics.py --check OURS.json --out FILE.json     compares a file of ours with FILE.json, which was written before
--small leaves out the cases of more than 300,000 elements. --cases reads lines "operator case" in place of the list below; a case is parsed from its name
as frit/ops/*/cases.cc forms it (no strides, masks, lengths or dropout).

A case's inputs are made as frit/ops/case.cc makes them, in double precision, then rounded to float32 and from there to the operand's type:
  seed      FNV-1a 32-bit of operator + name, times 0x9E3779B97F4A7C15, modulo 2^64
  uniform   SplitMix64: state += 0x9E3779B97F4A7C15, mixed, top 53 bits times 2^-53
  normal    u = max(uniform, 1e-300), w = uniform; sqrt(-2 ln u) cos(2 pi w)
  order     the case's inputs in the order of its table, each row-major, then the gradients of its outputs
Logarithm and cosine of two libraries may differ in a double's last place, which moves a 16-bit input about once in 10^12.

Output: a list of objects, one an output of a case
  op, case, output, dtype   "layer_norm", "67x33/bf16", "dx", "bf16": the case's storage type. Gradients are named "d" + input; criterion's is "dlogits"
  rms_error                 root mean square of (result - reference), divided by that of the reference (not divided if the reference is all 0)
  max_error                 largest |result - reference|
and, of the peer only,
  how                       eager: what users run (16-bit operators; the criterion on logits widened to fp32, as autocast does)
                            fp32: inputs widened, everything in fp32, results rounded once: the best a 16-bit operator could do
  rounding                  rms_error of the reference itself, rounded to the result's type
  result_dtype, elements, peer, device
Ours has the first six. --check asks of each of ours that rms_error is at most twice that of "eager" with the same op, case and output; an fp32 result may
also have 1e-6. Cases that only one side has are listed. Exit code 1: one is off, or nothing matched.
"""
import argparse, json, math, os, pathlib, re, sys

GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class CaseRandom:
    """SplitMix64, and Box-Muller's normals from it; arrays at a time."""

    def __init__(self, op, name):
        h = 2166136261
        for c in (op + name).encode():
            h = (h ^ c) * 16777619 & 0xFFFFFFFF
        self.state = h * GOLDEN & MASK

    def uniform(self, n):
        z = np.uint64(self.state) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        self.state = self.state + n * GOLDEN & MASK
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def normal(self, shape, mean=0.0, deviation=1.0):
        pairs = self.uniform(2 * math.prod(shape)).reshape(-1, 2)
        u, w = np.maximum(pairs[:, 0], 1e-300), pairs[:, 1]
        return (mean + deviation * (np.sqrt(-2 * np.log(u)) * np.cos(6.283185307179586 * w))).reshape(shape)

    def below(self, n, shape):
        return (self.uniform(math.prod(shape)) * n).astype(np.int64).reshape(shape)


class Case:
    """What a parser leaves behind.
    numbers: name -> float64 values, in the table's order; wrt: which of them get gradients; dy: the gradient of the first output.
    f(t) -> {output: tensor} of the tensors in t, in whatever precision they have; widen: users give it fp32 (the criterion's logits).
    """

    def __init__(self, numbers, wrt, dy, f, widen=False):
        self.numbers, self.wrt, self.dy, self.f, self.widen = numbers, wrt, dy, f, widen


f32 = lambda x: float(np.float32(x))


def layer_norm(r, rows, cols):
    rows, cols = int(rows), int(cols)
    numbers = dict(x=r.normal((rows, cols), 0.5, 2), gamma=r.normal((cols,), 1, 0.5), beta=r.normal((cols,)))
    return Case(numbers, ["x", "gamma", "beta"], r.normal((rows, cols)), lambda t: dict(y=F.layer_norm(t["x"], (cols,), t["gamma"], t["beta"], f32(1e-5))))


def softmax(r, rows, cols):
    rows, cols = int(rows), int(cols)
    numbers = dict(x=r.normal((rows, cols), 0, 3))
    return Case(numbers, ["x"], r.normal((rows, cols)), lambda t: dict(y=F.softmax(t["x"] * f32(0.7), -1)))


def bias_activation_dropout(r, rows, cols, activation):
    rows, cols = int(rows), int(cols)
    act = {"relu": F.relu, "gelu": F.gelu, "gelu_new": lambda x: F.gelu(x, approximate="tanh"), "swish": F.silu}[activation]
    numbers = dict(x=r.normal((rows, cols), 0, 2), bias=r.normal((cols,)))
    return Case(numbers, ["x", "bias"], r.normal((rows, cols)), lambda t: dict(y=act(t["x"] + t["bias"])))


def bias_dropout_residual(r, rows, cols):
    rows, cols = int(rows), int(cols)
    numbers = dict(x=r.normal((rows, cols)), bias=r.normal((cols,)), residual=r.normal((rows, cols)))
    return Case(numbers, ["x", "bias"], r.normal((rows, cols)), lambda t: dict(y=t["x"] + t["bias"] + t["residual"]))


def criterion(r, tokens, vocabulary, smoothing):
    tokens, vocabulary, smoothing = int(tokens), int(vocabulary), f32(float(smoothing))
    numbers = dict(logits=r.normal((tokens, vocabulary), 0, 3))
    labels = r.below(vocabulary, (tokens,))
    labels[2::5] = -1
    if tokens > 1:
        labels[1] = vocabulary - 1
    labels = torch.from_numpy(labels)

    def f(t):
        return dict(loss=F.cross_entropy(t["logits"], labels.to(t["logits"].device), ignore_index=-1, reduction="none", label_smoothing=smoothing))

    return Case(numbers, ["logits"], np.ones(tokens), f, widen=True)


def embedding(r, tokens, width, vocabulary, pad):
    tokens, width, vocabulary = int(tokens), int(width), int(vocabulary)
    known = {(33, 65): [12, 21], (4096, 512): [32] * 128}  # a case's name has the sum of its lengths only
    if (tokens, width) not in known:
        raise ValueError(f"embedding {tokens}x{width}: lengths not known")
    lengths = known[tokens, width]
    pad, places = 3 if pad else None, max(40, max(lengths))
    # Words of a text for the large case: few are frequent, many are rare.
    ids = np.floor(8000.0**r.uniform(tokens)).astype(np.int64) - 1 if vocabulary == 8000 else r.below(vocabulary, (tokens,))
    ids, at = torch.from_numpy(ids), torch.from_numpy(np.concatenate([np.arange(l) for l in lengths]))
    numbers = dict(table=r.normal((vocabulary, width)), positions=r.normal((places, width)))
    scale = float(np.sqrt(np.float32(width)))

    def f(t):
        d = t["table"].device
        return dict(y=F.embedding(ids.to(d), t["table"], padding_idx=pad) * scale + F.embedding(at.to(d), t["positions"]))

    return Case(numbers, ["table", "positions"] if len(lengths) == 2 else ["table"], r.normal((tokens, width)), f)


def attention(r, q_lengths, k_lengths, n, d, causal, variant):
    q_lengths, k_lengths, n, d = [int(l) for l in q_lengths.split(",")], [int(l) for l in k_lengths.split(",")], int(n), int(d)
    if causal and q_lengths != k_lengths:
        raise ValueError("causal attention over other keys: PyTorch aligns the mask at the other end")
    tq, tk, scale = sum(q_lengths), sum(k_lengths), float(np.float32(1) / np.sqrt(np.float32(d)))
    numbers = dict(q=r.normal((tq, n, d)), k=r.normal((tk, n, d)), v=r.normal((tk, n, d)))

    def f(t):
        outs, q0, k0 = [], 0, 0
        for lq, lk in zip(q_lengths, k_lengths):
            q, k, v = (t[x][b:b + l].transpose(0, 1)[None] for x, b, l in (("q", q0, lq), ("k", k0, lk), ("v", k0, lk)))
            outs.append(F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal), scale=scale)[0].transpose(0, 1))
            q0, k0 = q0 + lq, k0 + lk
        return dict(out=torch.cat(outs))

    return Case(numbers, ["q", "k", "v"], r.normal((tq, n, d)), f)


DTYPE = "(?:bf16|f16)"
PARSERS = dict(
    layer_norm=(layer_norm, rf"(\d+)x(\d+)/{DTYPE}"),
    softmax=(softmax, rf"(\d+)x(\d+)/({DTYPE})->(?:\3)"),
    bias_activation_dropout=(bias_activation_dropout, rf"(\d+)x(\d+)/{DTYPE}/(\w+)/p0"),
    bias_dropout_residual=(bias_dropout_residual, rf"(\d+)x(\d+)/{DTYPE}/p0"),
    criterion=(criterion, rf"(\d+)x(\d+)/{DTYPE}/a([\d.]+)"),
    embedding=(embedding, rf"(\d+)x(\d+)/V(\d+)/{DTYPE}/p0(/pad)?"),
    attention=(attention, rf"q([\d,]+)/k([\d,]+)/N(\d+)D(\d+)(/causal)?/{DTYPE}/(\w+)(?:/stride\d+)?"),
)
# Cases of the operators' tables (frit/ops/*/cases.cc) in both 16-bit types, and one that is there in bf16 alone.
CASES = """
layer_norm 67x33/{}
layer_norm 3x1025/{}
softmax 5x33/{}->{}
softmax 5x1025/{}->{}
bias_activation_dropout 33x65/{}/gelu/p0
bias_activation_dropout 33x65/{}/gelu_new/p0
bias_activation_dropout 4096x1024/{}/gelu/p0
bias_dropout_residual 131x96/{}/p0
bias_dropout_residual 4096x1024/{}/p0
criterion 67x33/{}/a0.1
criterion 3x1025/{}/a0.1
embedding 33x65/V11/{}/p0/pad
attention q15,16,17/k15,16,17/N2D32/{}/short/stride192
attention q31,32,33/k31,32,33/N2D64/causal/{}/short/stride384
attention q33,7/k33,7/N1D128/causal/{}/short
attention q3,33/k129,64/N1D128/{}/short
"""
BF16_CASES = """
layer_norm 4096x1024/bf16
"""
# What ours calls an output that PyTorch has under another name: the criterion writes gradients over the logits.
OURS = {("criterion", "logits"): "dlogits"}


def parse(op, name):
    """(Case, its dtype's name)."""
    make, pattern = PARSERS[op]
    match = re.fullmatch(pattern, name)
    if not match:
        raise ValueError(f"{op} {name}: not a case that this script knows")
    groups = list(match.groups())
    if op == "softmax":
        groups.pop()
    return make(CaseRandom(op, name), *groups), re.search(rf"/({DTYPE})", name).group(1)


def results(case, tensors, dy, how, dtype):
    """Outputs and gradients by name."""
    leaves = {k: t.detach().requires_grad_(k in case.wrt) for k, t in tensors.items()}
    widen = how == "fp32" or (how == "eager" and case.widen)
    out = case.f({k: t.float() if widen else t for k, t in leaves.items()})
    if how == "fp32" and not case.widen:
        out = {k: t.to(dtype) for k, t in out.items()}
    first = next(iter(out.values()))
    gradients = torch.autograd.grad(first, [leaves[k] for k in case.wrt], dy.to(first.dtype))
    return {k: t.detach() for k, t in out.items()} | {"d" + k: g for k, g in zip(case.wrt, gradients)}


def errors(got, want):
    got, want = got.double().cpu(), want.double()
    rms = lambda t: float(t.square().mean().sqrt()) if t.numel() else 0.0
    return rms(got - want) / (rms(want) or 1.0), float((got - want).abs().max()) if got.numel() else 0.0


def measure(op, name, device):
    case, dtype_name = parse(op, name)
    dtype = dict(bf16=torch.bfloat16, f16=torch.float16)[dtype_name]
    rounded = {k: torch.from_numpy(v.astype(np.float32)).to(dtype) for k, v in case.numbers.items()}
    dy = torch.from_numpy(case.dy.astype(np.float32)).to(dtype)
    want = results(case, {k: t.double() for k, t in rounded.items()}, dy.double(), "reference", dtype)
    records = []
    for how in ["eager"] if case.widen else ["eager", "fp32"]:
        got = results(case, {k: t.to(device) for k, t in rounded.items()}, dy.to(device), how, dtype)
        for output, reference in want.items():
            rms_error, max_error = errors(got[output], reference)
            if not math.isfinite(rms_error + max_error):
                raise ValueError(f"{op} {name} {output} {how}: not finite")
            records.append(dict(op=op, case=name, output=output, dtype=dtype_name, how=how, rms_error=rms_error, max_error=max_error,
                                rounding=errors(reference.to(got[output].dtype), reference)[0], result_dtype=str(got[output].dtype).removeprefix("torch."),
                                elements=reference.numel()))
    return records


def check(ours, peer):
    key = lambda r: (r["op"], r["case"], r["output"])
    eager = {key(r): r for r in peer if r.get("how") == "eager" and "error" not in r}
    mine = {(r["op"], r["case"], OURS.get((r["op"], r["output"]), r["output"])): r for r in ours}
    off = 0
    print(f"{'operator':24} {'case':44} {'output':10} {'ours':>10} {'PyTorch':>10} {'ratio':>7}")
    for k in [k for k in mine if k in eager]:
        a, b = mine[k], eager[k]
        allowed = 2 * b["rms_error"]
        if b["result_dtype"] == "float32":
            allowed = max(allowed, 1e-6)
        bad = not a["rms_error"] <= allowed
        off += bad
        ratio = a["rms_error"] / b["rms_error"] if b["rms_error"] else float("inf") if a["rms_error"] else 1.0
        print(f"{k[0]:24} {k[1]:44} {k[2]:10} {a['rms_error']:10.3g} {b['rms_error']:10.3g} {ratio:7.2f}{'  MORE THAN TWICE' if bad else ''}")
    both = sum(k in eager for k in mine)
    for text, keys in (("only ours", [k for k in mine if k not in eager]), ("only PyTorch's", [k for k in eager if k not in mine])):
        for k in keys:
            print(f"{text}: {' '.join(k)}")
    lost = sorted({" ".join(k[:2]) for k in eager} - {" ".join(k[:2]) for k in mine})
    for name in lost:
        print(f"ours has no case {name}")
    print(f"{both} outputs compared, {off} off, {len(lost)} cases without ours")
    return 1 if off or lost or not both else 0


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", default="torch_numerics.json")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--small", action="store_true")
    p.add_argument("--cases", type=pathlib.Path)
    p.add_argument("--check", type=pathlib.Path)
    p.add_argument("--list", action="store_true")
    a = p.parse_args()
    if a.check:
        return check(json.loads(a.check.read_text()), json.loads(pathlib.Path(a.out).read_text()))
    lines = a.cases.read_text() if a.cases else "".join(CASES.replace("{}", dtype) for dtype in ("bf16", "f16")) + BF16_CASES
    if a.list:
        print("\n".join(" ".join(line.split(maxsplit=1)).strip() for line in lines.splitlines() if line.strip()))
        return 0
    global np, torch, F
    import numpy as np
    import torch
    import torch.nn.functional as F
    if a.device == "cuda" and not torch.cuda.is_available():
        print("torch_numerics.py: PyTorch finds no GPU; --device cpu tests this script", file=sys.stderr)
        return 2
    peer = dict(peer=f"torch {torch.__version__}", device=torch.cuda.get_device_name() if a.device == "cuda" else "cpu")
    records, failed = [], 0
    for line in filter(str.strip, lines.splitlines()):
        op, name = line.split(maxsplit=1)
        if a.small and re.match(r"(4096|512)x|q128", name):
            continue
        try:
            found = measure(op, name.strip(), a.device)
        except Exception as error:
            found, failed = [dict(op=op, case=name, error=f"{type(error).__name__}: {error}"[:400])], failed + 1
        for r in found:
            records.append(r | peer)
            print(f"{op:24} {name:52} " + (r["error"] if "error" in r else f"{r['output']:10} {r['how']:6} rms {r['rms_error']:9.3g} (rounding "
                                             f"{r['rounding']:9.3g}) max {r['max_error']:9.3g}"), flush=True)
    temporary = pathlib.Path(a.out + ".new")
    temporary.write_text("[\n" + ",\n".join(json.dumps(r) for r in records) + "\n]\n")
    os.replace(temporary, a.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
