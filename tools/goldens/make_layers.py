#!/usr/bin/env python3
"""Makes tests/goldens/layers.safetensors and layers.json: layers and optimizers computed by PyTorch, for tests that must not trust our own formulas.

usage: make_layers.py [OUT]      OUT defaults to tests/goldens beside this file's repository

Tensors are named CASE.TENSOR. Inputs are random float32; everything is computed in float64 from them and rounded to float32 once. Integers are int32.
A gradient is "d" + name; dy is the given gradient of y. Weights of linear maps are [out, in]. Batches are packed: [tokens, H] with offsets [B+1].
layers.json describes every case: "what", its "attributes", and which case holds its weights ("weights", when shared by several).
No dropout anywhere. Deterministic: one seed a case (its name).
"""
import json, math, pathlib, sys, zlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

T, INFO = {}, {}
ACTIVATIONS = dict(relu=F.relu, gelu=F.gelu, gelu_tanh=lambda x: F.gelu(x, approximate="tanh"), silu=F.silu)


class Case:
    """One case: draws inputs, remembers them, and stores outputs and gradients under CASE.TENSOR."""

    def __init__(self, name, what, weights=None, **attributes):
        self.name, self.grads = name, {}
        self.g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        INFO[name] = dict(what=what, **({"weights": weights} if weights else {}), attributes=attributes)

    def put(self, key, value):
        v = value.detach()
        assert f"{self.name}.{key}" not in T
        T[f"{self.name}.{key}"] = v.to(torch.float32 if v.is_floating_point() else torch.int32).contiguous().clone()

    def given(self, key, value, grad=True):
        value = value.to(torch.float32).double()
        self.put(key, value)
        if grad:
            self.grads[key] = value.requires_grad_()
        return value

    def random(self, key, *shape, scale=1.0, shift=0.0, grad=True):
        return self.given(key, shift + scale * torch.randn(*shape, generator=self.g), grad)

    def finish(self, y, key="y", dy=None, extra=()):
        """Stores y, draws dy unless y is the loss itself, and stores every gradient."""
        self.put(key, y)
        if dy is None and y.dim():
            dy = self.random("d" + key, *y.shape, grad=False)
        y.backward(dy)
        for k, v in (*self.grads.items(), *extra):
            self.put("d" + k, v.grad if v.grad is not None else torch.zeros_like(v))


def offsets(lengths):
    return torch.tensor([0] + torch.tensor(lengths).cumsum(0).tolist())


def sinusoid(positions, H, first=0):
    """Marian's table: all sines, then all cosines (one sine more when H is odd); frequency of pair i is 10000^(-2i/H)."""
    angle = [[p / math.pow(10000, 2 * (j // 2) / H) for j in range(H)] for p in range(first, first + positions)]
    angle = torch.tensor(angle, dtype=torch.float64)
    return torch.cat([torch.sin(angle[:, 0::2]), torch.cos(angle[:, 1::2])], 1)


def layer_norm():
    for name, rows, cols, mean, std in (("layer_norm", 5, 33, 0.3, 1.0), ("layer_norm_offset", 4, 64, 1000.0, 0.1), ("layer_norm_one", 3, 1, 0.0, 1.0)):
        c = Case(name, "y = LayerNorm(x) * gamma + beta over the last dimension", rows=rows, cols=cols, eps=1e-5)
        x, gamma, beta = c.random("x", rows, cols, scale=std, shift=mean), c.random("gamma", cols, scale=0.3, shift=1.0), c.random("beta", cols, scale=0.3)
        c.put("mean", x.mean(1))
        c.put("rstd", (x.var(1, unbiased=False) + 1e-5).rsqrt())
        c.finish(F.layer_norm(x, (cols,), gamma, beta, 1e-5))


def elementwise():
    for act, fn in ACTIVATIONS.items():
        c = Case(f"bias_{act}", "y = act(x + bias); gelu is the erf form", activation=act)
        x, bias = c.random("x", 7, 19, scale=2.0), c.random("bias", 19)
        c.finish(fn(x + bias))
    c = Case("bias_residual", "y = residual + x + bias")
    x, bias, residual = c.random("x", 6, 11), c.random("bias", 11), c.random("residual", 6, 11)
    c.finish(residual + x + bias)


def embedding():
    for H in (7, 8):
        c = Case(f"sinusoid_{H}", "Marian's sinusoidal positions 0..39, a float32 table", H=H)
        c.put("table", sinusoid(40, H))
    V, H, lengths, pad = 13, 8, [4, 1, 6], 12
    for name, learned, scale, first in (("embedding_sinusoidal", False, math.sqrt(H), 0), ("embedding_learned", True, 1.0, 0), ("embedding_offset", False, 1.0, 5)):
        c = Case(name, "y = scale * E[token] + P[position]; position = index in the sequence + first; the pad id's row of dE gets no gradient",
                 scale=scale, pad_id=pad, first_position=first, positions="learned" if learned else "sinusoidal")
        ids = torch.randint(0, V - 1, (sum(lengths),), generator=c.g)
        ids[0] = ids[4] = ids[5] = pad  # decoders start with it
        c.put("ids", ids)
        c.put("offsets", offsets(lengths))
        E = c.random("E", V, H)
        P = c.random("P", 10, H) if learned else c.given("P", sinusoid(12, H), grad=False)
        pos = torch.cat([torch.arange(n) for n in lengths]) + first
        c.finish(scale * F.embedding(ids, E, padding_idx=pad) + P[pos])


def softmax():
    for name, causal in (("softmax_masked", False), ("softmax_causal", True)):
        c = Case(name, "y = softmax(scale * x + (0 where keep, -inf elsewhere)) over the last dimension; a row that keeps nothing gives zeros, "
                 "and its dx is zero", scale=0.37, causal=causal)
        x = c.random("x", 6, 9, scale=3.0)
        keep = torch.rand(6, 9, generator=c.g) < 0.7
        if causal:
            keep = torch.ones(6, 9).tril().bool()
        else:
            keep[2] = False
        c.put("keep", keep.int())
        s = torch.where(keep, 0.37 * x, -1e30)
        c.finish(torch.where(keep, torch.softmax(s, -1), 0.0))


def criterion():
    for name, a in (("criterion_plain", 0.0), ("criterion_smoothed", 0.1)):
        c = Case(name, "loss = sum over targets of -sum_v p_v log q_v / number of targets, p = (1-a) onehot + a/V; target -1 is padding and "
                 "counts for nothing; loss_sum before the division; rows: negative log-likelihood of each target, zero where padded", smoothing=a)
        logits = c.random("logits", 8, 23, scale=3.0)
        y = torch.randint(0, 23, (8,), generator=c.g)
        y[3] = y[7] = -1
        c.put("targets", y)
        loss = F.cross_entropy(logits, y.long(), label_smoothing=a, ignore_index=-1)
        c.put("loss_sum", (loss * (y >= 0).sum())[None])
        c.put("rows", -torch.log_softmax(logits, -1)[torch.arange(8), y.clamp(min=0)] * (y >= 0))
        c.finish(loss[None], "loss", dy=torch.ones(1, dtype=torch.float64))


def attend(q, k, v, off_q, off_k, causal):
    """Packed attention: q [Tq,N,D], k and v [Tk,N,D]; sequence by sequence; no keys gives zeros."""
    out = []
    for b in range(len(off_q) - 1):
        qs, ks, vs = (t[o[b]:o[b + 1]].transpose(0, 1) for t, o in ((q, off_q), (k, off_k), (v, off_k)))
        if ks.shape[1] == 0:
            out.append(torch.zeros_like(q[off_q[b]:off_q[b + 1]]))
            continue
        s = qs @ ks.transpose(1, 2) / math.sqrt(q.shape[-1])
        if causal:
            s = s.masked_fill(~torch.ones(s.shape[-2:]).tril().bool(), -math.inf)
        out.append((torch.softmax(s, -1) @ vs).transpose(0, 1))
    return torch.cat(out)


def attention_core():
    for name, lq, lk, causal in (("attention_self", [5, 1, 7, 2], None, False), ("attention_causal", [5, 1, 7, 2], None, True),
                                 ("attention_cross", [3, 1, 4], [6, 2, 1], False), ("attention_no_keys", [3, 2, 1], [4, 0, 2], False)):
        c = Case(name, "y = softmax(q k^T / sqrt(D)) v within each sequence; a query without keys gives zeros", causal=causal)
        oq, ok = offsets(lq), offsets(lk or lq)
        c.put("offsets_q", oq)
        c.put("offsets_k", ok)
        N, D = 3, 6
        q, k, v = c.random("q", oq[-1], N, D), c.random("k", ok[-1], N, D), c.random("v", ok[-1], N, D)
        c.finish(attend(q, k, v, oq, ok, causal))


ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")


def attention_weights(c, prefix, H):
    w = {}
    for p in ATTENTION:
        w[f"{prefix}{p}.weight"] = c.random(f"{prefix}{p}.weight", H, H, scale=H ** -0.5)
        w[f"{prefix}{p}.bias"] = c.random(f"{prefix}{p}.bias", H, scale=0.2)
    return w


def attention(x, mem, w, prefix, N, ox, om, causal):
    lin = lambda t, p: F.linear(t, w[f"{prefix}{p}.weight"], w[f"{prefix}{p}.bias"])
    D = x.shape[1] // N
    q, k, v = lin(x, "q_proj").view(-1, N, D), lin(mem, "k_proj").view(-1, N, D), lin(mem, "v_proj").view(-1, N, D)
    return lin(attend(q, k, v, ox, om, causal).reshape(x.shape), "out_proj")


def attention_modules():
    H, N = 12, 3
    for name, causal, cross in (("mha_self", False, False), ("mha_causal", True, False), ("mha_cross", False, True)):
        c = Case(name, "multi-head attention with its four projections and biases; memory gives keys and values in the cross case", heads=N, causal=causal)
        ox, om = offsets([4, 1, 6]), offsets([2, 5, 3] if cross else [4, 1, 6])
        c.put("offsets", ox)
        w = attention_weights(c, "", H)
        x = c.random("x", ox[-1], H)
        mem = x
        if cross:
            c.put("offsets_memory", om)
            mem = c.random("memory", om[-1], H)
        c.finish(attention(x, mem, w, "", N, ox, om, causal))


def layer_weights(c, H, ffn, decoder, prefix=""):
    w = attention_weights(c, prefix + "self_attn.", H)
    norms = ["self_attn_layer_norm", "final_layer_norm"]
    if decoder:
        w |= attention_weights(c, prefix + "encoder_attn.", H)
        norms.insert(1, "encoder_attn_layer_norm")
    for k, shape in (("fc1", (ffn, H)), ("fc2", (H, ffn))):
        w[f"{prefix}{k}.weight"] = c.random(f"{prefix}{k}.weight", *shape, scale=shape[1] ** -0.5)
        w[f"{prefix}{k}.bias"] = c.random(f"{prefix}{k}.bias", shape[0], scale=0.2)
    for n in norms:
        norm_weights(c, w, prefix + n, H)
    return w


def norm_weights(c, w, name, H):
    w[name + ".weight"] = c.random(name + ".weight", H, scale=0.2, shift=1.0)
    w[name + ".bias"] = c.random(name + ".bias", H, scale=0.2)


def layer(x, w, N, ox, act, pre, mem=None, om=None, prefix=""):
    """Post-LN: x = norm(x + f(x)); pre-LN: x = x + f(norm(x)). With mem it is a decoder layer (causal, then cross attention)."""
    norm = lambda t, n: F.layer_norm(t, t.shape[1:], w[f"{prefix}{n}.weight"], w[f"{prefix}{n}.bias"], 1e-5)
    lin = lambda t, n: F.linear(t, w[f"{prefix}{n}.weight"], w[f"{prefix}{n}.bias"])
    block = lambda t, n, f: t + f(norm(t, n)) if pre else norm(t + f(t), n)
    x = block(x, "self_attn_layer_norm", lambda t: attention(t, t, w, prefix + "self_attn.", N, ox, ox, mem is not None))
    if mem is not None:
        x = block(x, "encoder_attn_layer_norm", lambda t: attention(t, mem, w, prefix + "encoder_attn.", N, ox, om, False))
    return block(x, "final_layer_norm", lambda t: lin(ACTIVATIONS[act](lin(t, "fc1")), "fc2"))


def check_layer(w, N, act, pre, x, ox, mem, om, y):
    """Holds layer() against torch.nn's own layer, which knows relu and the erf gelu."""
    H = x.shape[1]
    cls = torch.nn.TransformerEncoderLayer if mem is None else torch.nn.TransformerDecoderLayer
    ref = cls(H, N, w["fc1.bias"].numel(), 0.0, act, batch_first=True, norm_first=pre).double()
    state = {"linear1": "fc1", "linear2": "fc2", "norm1": "self_attn_layer_norm"}
    state |= {"norm2": "final_layer_norm"} if mem is None else {"norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"}
    sd = {f"{k}.{p}": w[f"{v}.{p}"] for k, v in state.items() for p in ("weight", "bias")}
    for theirs, ours in (("self_attn", "self_attn"),) + ((("multihead_attn", "encoder_attn"),) if mem is not None else ()):
        for p in ("weight", "bias"):
            sd[f"{theirs}.in_proj_{p}"] = torch.cat([w[f"{ours}.{q}.{p}"] for q in ATTENTION[:3]])
            sd[f"{theirs}.out_proj.{p}"] = w[f"{ours}.out_proj.{p}"]
    ref.load_state_dict({k: v.detach() for k, v in sd.items()})
    for b in range(len(ox) - 1):
        xs = x[ox[b]:ox[b + 1]].detach()[None]
        causal = torch.nn.Transformer.generate_square_subsequent_mask(xs.shape[1], dtype=torch.float64)
        out = ref(xs) if mem is None else ref(xs, mem[om[b]:om[b + 1]].detach()[None], tgt_mask=causal)
        assert (out[0] - y[ox[b]:ox[b + 1]]).abs().max() < 1e-12


def layers():
    H, N, ffn = 12, 2, 20
    for kind in ("encoder", "decoder"):
        base = f"{kind}_layer"
        c = Case(base, f"weights and inputs shared by the {kind} layer cases", heads=N, H=H, ffn=ffn)
        w = layer_weights(c, H, ffn, kind == "decoder")
        ox, om = offsets([3, 1, 5]), offsets([4, 2, 1])
        c.put("offsets", ox)
        x = c.random("x", ox[-1], H)
        dy = c.random("dy", ox[-1], H, grad=False)
        mem = None
        if kind == "decoder":
            c.put("offsets_memory", om)
            mem = c.random("memory", om[-1], H)
        for pre in (False, True):
            for act in ACTIVATIONS:
                v = Case(f"{base}_{'pre' if pre else 'post'}_{act}", "a whole layer: " + ("x = x + f(norm(x))" if pre else "x = norm(x + f(x))"),
                         weights=base, norm="pre" if pre else "post", activation=act)
                for t in c.grads.values():
                    t.grad = None
                y = layer(x, w, N, ox, act, pre, mem, om)
                if act in ("relu", "gelu"):
                    check_layer(w, N, act, pre, x, ox, mem, om, y)
                v.finish(y, dy=dy, extra=c.grads.items())


def model():
    """A whole pre-LN encoder-decoder: learned positions, separate embeddings, output tied to the decoder's embedding, GELU, a norm after each stack."""
    H, N, ffn, Vs, Vt = 16, 2, 24, 31, 29
    c = Case("model_pre", model.__doc__, heads=N, H=H, ffn=ffn, encoder_layers=1, decoder_layers=2, norm="pre", activation="gelu", positions="learned",
             scale_embedding=True, smoothing=0.1, source_vocab=Vs, target_vocab=Vt, max_positions=12, pad_id=Vt - 1,
             names="Marian's; plus model.encoder.layer_norm, model.decoder.layer_norm (after the last layer) and embed_positions, which are trained")
    names = {}
    emb = lambda n, V: names.setdefault(n, c.random(n, V, H, scale=0.3))
    es, et = emb("model.encoder.embed_tokens.weight", Vs), emb("model.decoder.embed_tokens.weight", Vt)
    ps, pt = emb("model.encoder.embed_positions.weight", 12), emb("model.decoder.embed_positions.weight", 12)
    w = layer_weights(c, H, ffn, False, "model.encoder.layers.0.")
    for i in range(2):
        w |= layer_weights(c, H, ffn, True, f"model.decoder.layers.{i}.")
    for s in ("encoder", "decoder"):
        norm_weights(c, w, f"model.{s}.layer_norm", H)
    bias = c.random("final_logits_bias", 1, Vt, grad=False)
    ls, lt = [6, 1, 4], [3, 5, 1]
    os, ot = offsets(ls), offsets(lt)
    src, y = torch.randint(1, Vs, (sum(ls),), generator=c.g), torch.randint(1, Vt - 1, (sum(lt),), generator=c.g)
    tgt = torch.cat([torch.cat([torch.tensor([Vt - 1]), y[ot[b]:ot[b + 1] - 1]]) for b in range(3)])
    for k, v in dict(src_ids=src, src_offsets=os, tgt_ids=tgt, labels=y, tgt_offsets=ot).items():
        c.put(k, v)
    pos = lambda lengths: torch.cat([torch.arange(n) for n in lengths])
    norm = lambda t, n: F.layer_norm(t, (H,), w[n + ".weight"], w[n + ".bias"], 1e-5)
    m = math.sqrt(H) * F.embedding(src, es) + ps[pos(ls)]
    m = norm(layer(m, w, N, os, "gelu", True, prefix="model.encoder.layers.0."), "model.encoder.layer_norm")
    c.put("encoder_output", m)
    h = math.sqrt(H) * F.embedding(tgt, et, padding_idx=Vt - 1) + pt[pos(lt)]
    for i in range(2):
        h = layer(h, w, N, ot, "gelu", True, m, os, f"model.decoder.layers.{i}.")
    logits = F.linear(norm(h, "model.decoder.layer_norm"), et) + bias
    c.put("logits", logits)
    c.finish(F.cross_entropy(logits, y, label_smoothing=0.1)[None], "loss", dy=torch.ones(1, dtype=torch.float64))


def optimizers():
    n, steps = 13, 20
    kinds = {
        "adam": (torch.optim.Adam, dict(lr=1e-2, betas=(0.9, 0.98), eps=1e-9)),
        "adam_l2": (torch.optim.Adam, dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)),
        "adamw": (torch.optim.AdamW, dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)),
        "sgd": (torch.optim.SGD, dict(lr=0.1)),
        "sgd_momentum": (torch.optim.SGD, dict(lr=0.05, momentum=0.9)),
        "sgd_momentum_decay": (torch.optim.SGD, dict(lr=0.05, momentum=0.9, weight_decay=0.01)),
    }
    for name, (cls, kw) in kinds.items():
        c = Case(f"optimizer_{name}", "torch.optim over 20 steps: p0, grads [20,n] -> params [20,n] after each step in float64 (params_fp32: computed in float32)",
                 optimizer=cls.__name__, steps=steps, **kw)
        p0 = c.random("p0", n, grad=False)
        g = torch.randn(steps, n, generator=c.g) * (10.0 ** torch.randint(-4, 2, (1, n), generator=c.g))
        g = c.given("grads", g, grad=False)
        for suffix, dtype in (("", torch.float64), ("_fp32", torch.float32)):
            p = torch.nn.Parameter(p0.detach().to(dtype).clone())
            opt = cls([p], foreach=False, **kw)
            out = []
            for i in range(steps):
                p.grad = g[i].detach().to(dtype)
                opt.step()
                out.append(p.detach().clone())
            c.put("params" + suffix, torch.stack(out))
            state = opt.state[p]
            for key, short in (("exp_avg", "m"), ("exp_avg_sq", "v"), ("momentum_buffer", "momentum")):
                if state.get(key) is not None:
                    c.put(short + suffix, state[key])


def main(root):
    torch.set_num_threads(1)
    for part in (layer_norm, elementwise, embedding, softmax, criterion, attention_core, attention_modules, layers, model, optimizers):
        part()
    root.mkdir(parents=True, exist_ok=True)
    save_file(T, root / "layers.safetensors", metadata={"script": "tools/goldens/make_layers.py"})
    (root / "layers.safetensors").chmod(0o644)
    for name in INFO:
        INFO[name]["tensors"] = {k[len(name) + 1:]: list(v.shape) for k, v in T.items() if k.startswith(name + ".")}
    lines = [f'"{k}": {json.dumps(v)}' for k, v in INFO.items()]
    text = f'{{\n"script": "tools/goldens/make_layers.py", "torch": "{torch.__version__}", "cases": {{\n' + ",\n".join(lines) + "\n}}\n"
    (root / "layers.json").write_text(text)
    print(len(INFO), "cases,", len(T), "tensors")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[2] / "tests/goldens")
