#!/usr/bin/env python3
"""Peer: trains the model of a Frit run in PyTorch on the same batches with the same learning rates, and compares the losses step by step.

usage: torch_train_same.py RUN [--batches BATCHES.jsonl] [--weights WEIGHTS.safetensors] [--precision fp32|bf16] [--dropout P] [--steps N] [--device cuda|cpu]
                           [--metrics METRICS.jsonl] [--out OUT.json] [--seconds N] [--save WEIGHTS.safetensors]
RUN is a run directory, in which batches.jsonl and start.safetensors lie unless said otherwise: its config.toml gives the optimizer's numbers, clipping, label smoothing and dropout, and config.json of RUN/model (or beside the
weights) the model's sizes. BATCHES.jsonl has one JSON object a line, one line a micro-batch in the order in which they were trained:
  {"step": 1, "lr": 2.5e-7, "source_ids": [..], "source_offsets": [0, ..], "target_ids": [..], "labels": [..], "target_offsets": [0, ..]}
step counts updates from 1; lines of one step are accumulated, normalised by the target tokens of all of them, and share their lr. ids are packed as in
frit/data/batch.h: sentence i has source_ids[source_offsets[i]:source_offsets[i + 1]], target_ids is what the decoder reads, labels what it must predict.
WEIGHTS.safetensors holds the parameters before the first of these steps under Marian's names, as Frit's model.safetensors does.

Dropout draws other bits here than in Frit. Runs with --dropout 0 on both sides must agree to rounding; with dropout, within the noise of another seed.
bf16 is autocast with fp32 parameters. fp32 is full fp32 (no TF32). The pad token's row of the table gets no gradient, as in Frit.

--out: {"losses": one for each step (label-smoothed, nats a target token), "tokens": target tokens of each step, "grad_norms" (before clipping), ms_per_step,
tokens_per_s (target), precision, dropout, peer, device, and with --metrics "compare": [{step, frit, torch, tokens}, ...], where frit is the loss of a line of
metrics.jsonl and torch the mean over the steps since the line before it, by tokens; and "differences": their mean, the largest and the last}.
"""
import argparse, json, pathlib, statistics, sys, time, tomllib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import rows


def find_config(run, weights):
    for path in (run / "model/config.json", weights.parent / "config.json", run / "config.json"):
        if path.exists():
            return json.loads(path.read_text())
    sys.exit(f"torch_train_same: no config.json in {run}/model, beside {weights}, or in {run}")


def sizes_of(config, training, dropout):
    """Sizes from config.json. Stops for what this model does not compute."""
    from torch_transformer import Sizes
    c = config
    given = lambda key, default: c.get(key, default)
    wrong = [k for k, want in (("share_encoder_decoder_embeddings", True), ("tie_word_embeddings", True)) if given(k, want) != want]
    wrong += [k for k in ("attention_heads", "ffn_dim") if c["encoder_" + k] != c["decoder_" + k]]
    if given("position_embedding_type", "sinusoidal") != "sinusoidal":
        wrong.append("position_embedding_type")
    if wrong:
        sys.exit(f"torch_train_same: config.json's {', '.join(wrong)} is not what this peer computes")
    p = lambda key: given(key, 0.0) if dropout is None else dropout
    return Sizes(encoder_layers=c["encoder_layers"], decoder_layers=c["decoder_layers"], width=c["d_model"], heads=c["encoder_attention_heads"],
                 ffn=c["encoder_ffn_dim"], vocabulary=c["vocab_size"], dropout=p("dropout"), attention_dropout=p("attention_dropout"),
                 activation_dropout=p("activation_dropout"), label_smoothing=training["label_smoothing"], pad=c["pad_token_id"],
                 max_positions=c["max_position_embeddings"], scale_embedding=given("scale_embedding", True), activation=c["activation_function"], pre_norm=given("normalize_before", False))


def read_batches(path):
    """Yields (step, learning rate, micro-batches)."""
    step, rate, parts = None, None, []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            b = json.loads(line)
            if b["step"] != step:
                if step is not None:
                    yield step, rate, parts
                if b["step"] != (step or 0) + 1:
                    raise ValueError(f"{path}:{number}: step {b['step']} behind step {step or 0}")
                step, rate, parts = b["step"], b["lr"], []
            if b["lr"] != rate:
                raise ValueError(f"{path}:{number}: step {step} has two learning rates")
            parts.append(b)
    if step is not None:
        yield step, rate, parts


def padded(torch, values, offsets, fill, device):
    lengths = torch.tensor(offsets).diff()
    result = torch.full((len(lengths), int(lengths.max())), fill, dtype=torch.long)
    result[torch.arange(result.size(1)) < lengths[:, None]] = torch.tensor(values)
    if device == "cuda":
        result = result.pin_memory()
    return result.to(device, non_blocking=True)


class Optimizer:
    """Frit's update rules in PyTorch: Adam and SGD add the decay to the gradient, AdamW does not; only matrices decay."""

    def __init__(self, torch, model, t):
        groups = [dict(params=[p for p in model.parameters() if p.dim() > 1], weight_decay=t["weight_decay"]),
                  dict(params=[p for p in model.parameters() if p.dim() == 1], weight_decay=0.0)]
        kind = t["optimizer"]
        if kind == "sgd":
            self.rule = torch.optim.SGD(groups, lr=1, momentum=t["momentum"])
        else:
            rule = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
            self.rule = rule(groups, lr=1, betas=(t["beta1"], t["beta2"]), eps=t["eps"], fused=True)

    def update(self, rate):
        for group in self.rule.param_groups:
            group["lr"] = rate
        self.rule.step()
        self.rule.zero_grad(set_to_none=True)


def train(a, training, config):
    import torch
    from safetensors.torch import load_file, save_file
    from torch_transformer import IGNORED, Transformer, load_marian, marian_names
    torch.manual_seed(a.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each shape
    sizes = sizes_of(config, training, a.dropout)
    model = Transformer(sizes, reduction="sum")
    load_marian(model, {k: v.float() for k, v in load_file(a.weights).items()})
    model = model.to(a.device).train()
    optimizer = Optimizer(torch, model, training)
    gradients = lambda: [p.grad for p in model.parameters()]
    sync = torch.cuda.synchronize if a.device == "cuda" else lambda: None
    losses, norms, tokens, begin, timed_from = [], [], [], time.perf_counter(), None
    for step, rate, parts in read_batches(a.batches):
        if step > a.steps or time.perf_counter() - begin > a.seconds:
            break
        count = sum(len(b["labels"]) for b in parts)
        total = 0
        for b in parts:
            batch = [padded(torch, b[name], b[offsets], fill, a.device) for name, offsets, fill in
                     (("source_ids", "source_offsets", sizes.pad), ("target_ids", "target_offsets", sizes.pad), ("labels", "target_offsets", IGNORED))]
            with torch.autocast(a.device, torch.bfloat16, enabled=a.precision == "bf16"):
                loss = model(*batch)
            (loss / count).backward()
            total = total + loss.detach()
        model.embedding.weight.grad[sizes.pad] = 0
        norm = torch.nn.utils.get_total_norm(gradients())
        if training["clip_norm"] > 0:
            scale = torch.where(norm > training["clip_norm"], training["clip_norm"] / norm, 1.0)
            torch._foreach_mul_(gradients(), scale)
        optimizer.update(rate)
        losses.append(total)
        norms.append(norm)
        tokens.append(count)
        if len(losses) == 10:  # the first ones warm up
            sync()
            timed_from = time.perf_counter()
        if step % a.report_every == 0:
            print(f"step {step}  loss {losses[-1].item() / count:.4f}  {time.perf_counter() - begin:.1f} s", flush=True)
    sync()
    seconds = time.perf_counter() - (timed_from or begin)
    timed = tokens[10:] if timed_from else tokens
    if not losses:
        sys.exit(f"torch_train_same: {a.batches} has no steps")
    if a.save:
        parameters = dict(model.named_parameters())
        pieces = {n: piece.contiguous().cpu() for ours, names in marian_names(sizes).items() for n, piece in zip(names, parameters[ours].detach().chunk(len(names)))}
        save_file(pieces, a.save)
    return dict(
        peer="torch " + torch.__version__, device=torch.cuda.get_device_name() if a.device == "cuda" else "CPU", precision=a.precision,
        dropout=[sizes.dropout, sizes.attention_dropout, sizes.activation_dropout], parameters=sum(p.numel() for p in model.parameters()), steps=len(losses),
        ms_per_step=round(seconds / max(1, len(timed)) * 1e3, 3), tokens_per_s=round(sum(timed) / seconds), losses=[x.item() / n for x, n in zip(losses, tokens)],
        grad_norms=[x.item() for x in norms], tokens=tokens)


def compare(result, metrics):
    """Pairs each train line of metrics.jsonl with the mean of our losses over the steps it covers."""
    pairs, before = [], 0
    for line in pathlib.Path(metrics).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry["kind"] != "train" or entry.get("loss") is None:
            continue
        steps = range(before, entry["step"])
        if entry["step"] > len(result["losses"]):
            break
        count = sum(result["tokens"][i] for i in steps)
        mean = sum(result["losses"][i] * result["tokens"][i] for i in steps) / count
        pairs.append(dict(step=entry["step"], frit=entry["loss"], torch=mean, tokens=count))
        before = entry["step"]
    return pairs


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run", type=pathlib.Path)
    p.add_argument("--batches", type=pathlib.Path)
    p.add_argument("--weights", type=pathlib.Path)
    p.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    p.add_argument("--dropout", type=float, help="in place of all three of config.json's")
    p.add_argument("--steps", type=int, default=10**9)
    p.add_argument("--seconds", type=float, default=1e9, help="stop after so many; what was trained is compared")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--metrics", type=pathlib.Path, help="metrics.jsonl of the Frit run (default: the run's, if there)")
    p.add_argument("--report-every", type=int, default=100)
    p.add_argument("--out")
    p.add_argument("--save", help="write the weights after the last step, under Marian's names")
    a = p.parse_args()
    a.batches, a.weights = a.batches or a.run / "batches.jsonl", a.weights or a.run / "start.safetensors"
    toml = tomllib.loads((a.run / "config.toml").read_text())["training"]
    defaults = dict(optimizer="adam", beta1=0.9, beta2=0.98, eps=1e-9, momentum=0.9, weight_decay=0.0, clip_norm=1.0, label_smoothing=0.1)
    result = train(a, {**defaults, **{k: toml[k] for k in defaults if k in toml}}, find_config(a.run, a.weights))
    metrics = a.metrics or a.run / "metrics.jsonl"
    if metrics.exists():
        result["compare"] = compare(result, metrics)
        apart = [x["torch"] - x["frit"] for x in result["compare"]]
        if apart:
            result["differences"] = dict(mean=statistics.mean(apart), largest=max(apart, key=abs), last=apart[-1])
    if a.out:
        rows.write_json(a.out, result)
    print(json.dumps({k: v for k, v in result.items() if k not in ("losses", "tokens", "grad_norms", "compare")} | dict(first=result["losses"][0], last=result["losses"][-1])))


if __name__ == "__main__":
    main()
