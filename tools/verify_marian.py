#!/usr/bin/env python3
"""Loads a model directory in transformers.MarianMTModel and compares its logits with those that Frit computed.

usage: verify_marian.py DIR [FILE.safetensors] [--tolerance 1e-4]      FILE defaults to DIR/goldens.safetensors
FILE holds a packed batch and its results: src_ids [S], src_offsets [B+1], tgt_ids [T] (decoder input, start token included), tgt_offsets [B+1], int32;
logits [T,V] float32, and if present encoder_output [S,H]. Every sentence is run alone, in float32, in evaluation mode.
Exit status: 0 when every difference is within the tolerance, 1 when one is not, 2 when the directory does not load cleanly (missing, unexpected or
wrongly shaped tensors) or FILE is malformed.
"""
import argparse, json, pathlib, sys

import torch
import transformers
from safetensors.torch import load_file


def main():
    p = argparse.ArgumentParser()
    p.add_argument("directory", type=pathlib.Path)
    p.add_argument("file", nargs="?", type=pathlib.Path)
    p.add_argument("--tolerance", type=float, default=1e-4)
    a = p.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model, info = transformers.MarianMTModel.from_pretrained(a.directory, output_loading_info=True)
    except Exception as e:
        print(f"{a.directory} does not load: {e}", file=sys.stderr)
        return 2
    bad = {k: sorted(map(str, v)) for k, v in info.items() if v and k != "error_msgs"}
    if bad or info.get("error_msgs"):
        print(f"{a.directory} does not load cleanly: {bad} {info.get('error_msgs')}", file=sys.stderr)
        return 2
    model = model.float().eval()
    t = load_file(a.file or a.directory / "goldens.safetensors")
    needed = {"src_ids", "src_offsets", "tgt_ids", "tgt_offsets", "logits"}
    if needed - set(t):
        print(f"the file lacks {sorted(needed - set(t))}", file=sys.stderr)
        return 2
    for key, size in (("src_ids", model.config.vocab_size), ("tgt_ids", model.config.decoder_vocab_size)):
        if t[key].numel() and not 0 <= t[key].min() <= t[key].max() < size:
            print(f"{key} holds ids {t[key].min()}..{t[key].max()}, the vocabulary has {size}", file=sys.stderr)
            return 2
    part = lambda key, off, b: t[key][int(t[off][b]):int(t[off][b + 1])]
    worst = dict(logits=0.0, **({"encoder_output": 0.0} if "encoder_output" in t else {}))
    sentences = len(t["src_offsets"]) - 1
    with torch.inference_mode():
        for b in range(sentences):
            src = part("src_ids", "src_offsets", b).long()[None]
            out = model(input_ids=src, attention_mask=torch.ones_like(src), decoder_input_ids=part("tgt_ids", "tgt_offsets", b).long()[None], use_cache=False)
            pairs = [("logits", out.logits[0], "tgt_offsets")]
            if "encoder_output" in t:
                pairs.append(("encoder_output", out.encoder_last_hidden_state[0], "src_offsets"))
            for key, theirs, off in pairs:
                ours = part(key, off, b)
                if ours.shape != theirs.shape:
                    print(f"{key} of sentence {b} has shape {list(ours.shape)}, transformers gives {list(theirs.shape)}", file=sys.stderr)
                    return 2
                difference = (ours - theirs).abs().max().item() if ours.numel() else 0.0
                worst[key] = max(worst[key], difference if difference == difference else float("inf"))
    ok = all(v <= a.tolerance for v in worst.values())
    print(json.dumps(dict(transformers=transformers.__version__, sentences=sentences, tolerance=a.tolerance, largest_difference=worst, ok=ok)))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
