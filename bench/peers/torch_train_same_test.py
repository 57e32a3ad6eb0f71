#!/usr/bin/env python3
"""Test of torch_train_same.py on the CPU, beside transformers' MarianMTModel and formulas written out in float64.

usage: torch_train_same_test.py      (needs torch, transformers, safetensors; about a minute)
The reference runs sentence by sentence, so without padding, masks or PyTorch's cross entropy, clipping and Adam.
"""
import copy, json, pathlib, random, subprocess, sys, tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers import MarianConfig, MarianMTModel

HERE = pathlib.Path(__file__).resolve().parent
VOCABULARY, PAD, SMOOTHING, CLIP, BETAS, EPS, STEPS = 61, 60, 0.1, 0.5, (0.9, 0.98), 1e-9, 6


def trained(model):
    return {n: p for n, p in model.named_parameters() if "embed_positions" not in n}


def make_model():
    torch.manual_seed(3)
    model = MarianMTModel(MarianConfig(
        vocab_size=VOCABULARY, decoder_vocab_size=VOCABULARY, d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=2, activation_function="relu", scale_embedding=True, max_position_embeddings=64, pad_token_id=PAD,
        eos_token_id=0, decoder_start_token_id=PAD, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, init_std=0.3))
    with torch.no_grad():
        for p in trained(model).values():
            p.add_(0.05 * torch.randn_like(p))  # biases and norms too
        model.model.shared.weight[PAD] = 0
    return model.train()


def make_batches():
    """Steps of one micro-batch, and one of two."""
    r, lines = random.Random(5), []
    for step in range(1, STEPS + 1):
        for _ in range(2 if step == 4 else 1):
            b = dict(step=step, lr=2e-3 * step / STEPS, source_ids=[], source_offsets=[0], target_ids=[], labels=[], target_offsets=[0])
            for _ in range(5):
                source, target = ([r.randrange(1, PAD) for _ in range(r.randrange(1, 12))] + [0] for _ in range(2))
                b["source_ids"] += source
                b["labels"] += target
                b["target_ids"] += [PAD] + target[:-1]
                b["source_offsets"].append(len(b["source_ids"]))
                b["target_offsets"].append(len(b["labels"]))
            lines.append(b)
    return lines


def reference(model, lines):
    """Losses of each step and the parameters after the last."""
    model = copy.deepcopy(model).double()
    parameters = trained(model)
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in parameters.items()}
    losses, tokens = [], []
    for step in range(1, STEPS + 1):
        parts = [b for b in lines if b["step"] == step]
        count = sum(len(b["labels"]) for b in parts)
        total = 0.0
        for b in parts:
            for s0, s1, t0, t1 in zip(b["source_offsets"], b["source_offsets"][1:], b["target_offsets"], b["target_offsets"][1:]):
                out = model(input_ids=torch.tensor([b["source_ids"][s0:s1]]), decoder_input_ids=torch.tensor([b["target_ids"][t0:t1]])).logits[0]
                log_q = out - out.logsumexp(-1, keepdim=True)
                labels = torch.tensor(b["labels"][t0:t1])
                loss = -((1 - SMOOTHING) * log_q.gather(1, labels[:, None])[:, 0] + SMOOTHING * log_q.mean(-1)).sum()
                (loss / count).backward()
                total += loss.item()
        losses.append(total / count)
        tokens.append(count)
        with torch.no_grad():
            model.model.shared.weight.grad[PAD] = 0
            norm = sum((p.grad ** 2).sum() for p in parameters.values()) ** 0.5
            for name, p in parameters.items():
                g = p.grad * min(1.0, CLIP / norm)
                m, v = moments[name]
                m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
                v.mul_(BETAS[1]).add_(g * g, alpha=1 - BETAS[1])
                p -= 2e-3 * step / STEPS * (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
                p.grad = None
    return losses, tokens, parameters


def run(folder, *flags):
    command = [sys.executable, HERE / "torch_train_same.py", folder, "--batches", folder / "batches.jsonl", "--weights", folder / "model/model.safetensors",
               "--device", "cpu", *flags]
    return subprocess.run([str(c) for c in command], capture_output=True, text=True)


def expect(what, condition):
    print(("ok    " if condition else "FAILED ") + what)
    return 0 if condition else 1


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model, lines = make_model(), make_batches()
        (folder / "model").mkdir()
        model.config.save_pretrained(folder / "model")
        start = {n: p.detach().contiguous() for n, p in trained(model).items()}
        save_file(start | {"final_logits_bias": torch.zeros(1, VOCABULARY)}, folder / "model/model.safetensors")
        (folder / "batches.jsonl").write_text("".join(json.dumps(b) + "\n" for b in lines))
        (folder / "config.toml").write_text(f'[training]\noptimizer = "adam"\nbeta1 = {BETAS[0]}\nbeta2 = {BETAS[1]}\neps = {EPS}\nclip_norm = {CLIP}\n'
                                            f"label_smoothing = {SMOOTHING}\nweight_decay = 0.0\n")
        losses, tokens, parameters = reference(model, lines)
        mean = lambda a, b: sum(x * n for x, n in zip(losses[a:b], tokens[a:b])) / sum(tokens[a:b])
        entries = [dict(step=2, kind="train", loss=mean(0, 2)), dict(step=2, kind="valid", loss=9.0), dict(step=5, kind="train", loss=mean(2, 5))]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))

        bad = 0
        done = run(folder, "--out", folder / "fp32.json", "--save", folder / "after.safetensors")
        if expect("fp32 runs", done.returncode == 0):
            sys.exit(done.stderr)
        result = json.loads((folder / "fp32.json").read_text())
        apart = max(abs(a - b) for a, b in zip(result["losses"], losses))
        bad += expect(f"fp32: {STEPS} losses, {losses[0]:.4f} to {losses[-1]:.4f}, within {apart:.1e} of the reference", len(result["losses"]) == STEPS and apart < 2e-5)
        bad += expect("the losses changed, so that a wrong update would show", abs(losses[-1] - losses[0]) > 0.05)
        bad += expect("the gradients were clipped in some step", max(result["grad_norms"]) > CLIP)
        after = load_file(folder / "after.safetensors")
        # A key's bias adds the same to all scores of a row, so its gradient is rounding alone, which Adam blows up to whole updates.
        largest = lambda of: max(float((of[n].double() - p.detach()).abs().max()) for n, p in parameters.items() if "k_proj.bias" not in n)
        moved, far = largest(after), largest(start)
        bad += expect(f"fp32: parameters within {moved:.1e} after moving by {far:.1e}", set(after) == set(parameters) and moved < 1e-5 < 1e-3 < far)
        bad += expect("the pad token's row is still zero", not after["model.shared.weight"][PAD].count_nonzero())
        windows = result.get("compare", [])
        bad += expect("compare: two windows, by tokens", [w["step"] for w in windows] == [2, 5] and all(abs(w["torch"] - w["frit"]) < 2e-5 for w in windows))
        done = run(folder, "--precision", "bf16", "--out", folder / "bf16.json")
        result = json.loads((folder / "bf16.json").read_text()) if done.returncode == 0 else {"losses": []}
        apart = max([abs(a - b) for a, b in zip(result["losses"], losses)], default=9)
        bad += expect(f"bf16: losses within {apart:.1e}", 0 < apart < 0.05)
        done = run(folder, "--dropout", "0.3", "--out", folder / "dropout.json")
        result = json.loads((folder / "dropout.json").read_text()) if done.returncode == 0 else {"losses": [0]}
        bad += expect("dropout changes the loss", abs(result["losses"][0] - losses[0]) > 1e-3 and result["dropout"] == [0.3] * 3)
        save_file({n: t for n, t in start.items() if "layers.1.fc2.bias" not in n}, folder / "model/model.safetensors")
        done = run(folder)
        bad += expect("a missing tensor is named", done.returncode != 0 and "model.encoder.layers.1.fc2.bias" in done.stderr)
        save_file(start, folder / "model/model.safetensors")
        (folder / "batches.jsonl").write_text(json.dumps(lines[1]) + "\n")
        done = run(folder)
        bad += expect("batches that do not begin with step 1 are refused", done.returncode != 0 and "step 2 behind step 0" in done.stderr)
        sys.exit(bad)


main()
