#!/usr/bin/env python3
"""Makes tests/goldens/marian_*: tiny random Marian models saved by transformers, and what they compute.

usage: make_marian.py [OUT]      OUT defaults to tests/goldens beside this file's repository

Each directory holds config.json, generation_config.json and model.safetensors as save_pretrained writes them, and
  goldens.safetensors  packed batch: src_ids [S], src_offsets [B+1], tgt_ids [T] (decoder input, starts with the pad id), labels [T],
                       tgt_offsets [B+1], all int32; encoder_output [S,H], decoder_output [T,H], logits [T,V], loss [1], loss_sum [1];
                       grad.NAME for every tensor of model.safetensors that is trained (final_logits_bias is a constant there).
                       Computed in float64 from the float32 weights, then rounded to float32. Evaluation mode: no dropout.
                       Math: loss = sum over targets of -sum_v p_v log q_v / number of targets, p = (1-a) onehot + a/V, a = 0.1.
                       The pad row of a tied embedding has the output projection's gradient and none from the look-ups.
  generate.json        what generate() returns for each source alone. tokens: after the start token (a forced prefix included), the EOS
                       included, padding removed. score: sequences_scores; null for one beam, which is transformers' greedy search.
Deterministic: everything follows from the seeds below, on one machine and one release of PyTorch (training sums in its order).
"""
import json, math, pathlib, sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, MarianConfig, MarianMTModel

SMOOTHING = 0.1
STEPS = 900
EOS, UNK = 0, 1

MODELS = {
    "marian_tiny": dict(seed=11, vocab_size=67, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, activation_function="relu", scale_embedding=True),
    "marian_separate": dict(seed=12, vocab_size=67, decoder_vocab_size=59, share_encoder_decoder_embeddings=False, d_model=32, encoder_layers=1,
                            decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
                            activation_function="swish", scale_embedding=False),
    "marian_uneven": dict(seed=13, vocab_size=45, d_model=24, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
                          decoder_attention_heads=2, encoder_ffn_dim=40, decoder_ffn_dim=28, activation_function="gelu", scale_embedding=False),
}

# Every case gives all that generate() is told; "prefix" is forced after the start token. Lengths count the start token.
DEFAULTS = dict(num_beams=4, num_return_sequences=1, length_penalty=1.0, early_stopping=False, max_length=24, min_length=0, repetition_penalty=1.0,
                no_repeat_ngram_size=0, bad_words_ids="pad", forced_eos_token_id=EOS)
CASES = {
    "greedy": dict(num_beams=1),
    "greedy_min_length": dict(num_beams=1, min_length=9),
    "greedy_max_length": dict(num_beams=1, max_length=6),
    "greedy_repetition": dict(num_beams=1, repetition_penalty=1.3),
    "greedy_no_repeat_2": dict(num_beams=1, no_repeat_ngram_size=2),
    "greedy_prefix": dict(num_beams=1, prefix=[9, 4, 17]),
    "beam2": dict(num_beams=2),
    "beam4": {},
    "beam5": dict(num_beams=5),
    "beam13": dict(num_beams=13, num_return_sequences=3),
    "beam4_lp0.6": dict(length_penalty=0.6),
    "beam4_lp2": dict(length_penalty=2.0),
    "beam4_lp0": dict(length_penalty=0.0),
    "beam4_lp-1": dict(length_penalty=-1.0),
    "beam4_early": dict(early_stopping=True),
    "beam4_early_lp0.6_nbest": dict(early_stopping=True, length_penalty=0.6, num_return_sequences=4),
    "beam4_never": dict(early_stopping="never"),
    "beam4_never_lp2": dict(early_stopping="never", length_penalty=2.0),
    "beam4_never_lp0": dict(early_stopping="never", length_penalty=0.0),
    "beam4_min_length": dict(min_length=12),
    "beam4_max_length": dict(max_length=7),
    "beam4_max_length_unforced": dict(max_length=7, forced_eos_token_id=None, num_return_sequences=4),
    "beam4_repetition": dict(repetition_penalty=1.3),
    "beam4_no_repeat_1": dict(no_repeat_ngram_size=1),
    "beam4_no_repeat_2": dict(no_repeat_ngram_size=2),
    "beam4_repetition_no_repeat_3": dict(repetition_penalty=1.3, no_repeat_ngram_size=3),
    "beam4_prefix": dict(prefix=[9, 4, 17]),
    "beam5_prefix_nbest": dict(num_beams=5, num_return_sequences=5, prefix=[3], length_penalty=0.6),
    "beam5_nbest": dict(num_beams=5, num_return_sequences=5),
    "beam4_bad_words": dict(bad_words_ids=["pad", 5, 12, [7, 9], [3, 3]], num_return_sequences=2),
    "beam4_no_bad_words": dict(bad_words_ids=None),
}
FEW = ["greedy", "greedy_repetition", "beam2", "beam4", "beam5_nbest", "beam4_early", "beam4_never_lp2", "beam4_no_repeat_2", "beam4_prefix"]


def make_model(spec):
    """A model with no weight at a special value (no zero bias, no unit gamma), trained for a moment so that its beams are worth searching."""
    spec = dict(spec)
    g = torch.Generator().manual_seed(spec.pop("seed"))
    pad = spec.get("decoder_vocab_size", spec["vocab_size"]) - 1
    cfg = MarianConfig(pad_token_id=pad, eos_token_id=EOS, decoder_start_token_id=pad, forced_eos_token_id=None, bos_token_id=None,
                       max_position_embeddings=64, dropout=0.0, **spec)
    model = MarianMTModel(cfg).train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "embed_positions" in name:
                continue
            noise = torch.randn(p.shape, generator=g)
            if "layer_norm.weight" in name:
                p.copy_(1 + 0.2 * noise)
            else:
                p.copy_(0.2 * noise)
        model.final_logits_bias.copy_(0.5 * torch.randn(model.final_logits_bias.shape, generator=g))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(STEPS):
        lengths = torch.randint(1, 17, (48,), generator=g).tolist()
        src = ragged(g, lengths, cfg.vocab_size, pad)
        labels = [rewrite(g, r, cfg.decoder_vocab_size, pad) for r in src]
        src_ids, src_mask = padded(src, pad)
        tgt_ids, _ = padded([[pad] + r[:-1] for r in labels], pad)
        label_ids, _ = padded(labels, -100)
        logits = model(input_ids=src_ids, attention_mask=src_mask, decoder_input_ids=tgt_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), label_ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained to", loss.item())
    model.config.dropout = 0.1
    model.generation_config = GenerationConfig(num_beams=4, max_length=64, pad_token_id=pad, eos_token_id=EOS, decoder_start_token_id=pad,
                                               forced_eos_token_id=EOS, bad_words_ids=[[pad]])
    return model.eval(), cfg


def rewrite(g, source, vocab, pad):
    """A noisy translation: the source reversed, its ids mapped, some doubled, some dropped, some replaced."""
    out = []
    for x in reversed(source[:-1]):
        y = 2 + x * 7 % (vocab - 3)
        for _ in range(int(torch.multinomial(torch.tensor([0.15, 0.6, 0.25]), 1, generator=g))):
            swapped = float(torch.rand((), generator=g)) < 0.25
            out.append(2 + (y + 1) % (vocab - 3) if swapped else y)
    return [2 if y == pad else y for y in out] + [EOS]


def ragged(g, lengths, vocab, pad):
    """Random sequences of the given lengths, each ending in EOS, never the pad id."""
    out = []
    for n in lengths:
        ids = torch.randint(2, vocab, (n - 1,), generator=g)
        ids[ids == pad] = 2
        out.append(ids.tolist() + [EOS])
    return out


def padded(rows, fill):
    n = max(map(len, rows))
    return torch.tensor([r + [fill] * (n - len(r)) for r in rows]), torch.tensor([[1] * len(r) + [0] * (n - len(r)) for r in rows])


def pack(x, mask):
    return x[mask.bool()]


def offsets(rows):
    return torch.tensor([0] + torch.tensor([len(r) for r in rows]).cumsum(0).tolist(), dtype=torch.int32)


def goldens(model, cfg, stored, seed):
    model = MarianMTModel(cfg)
    model.load_state_dict({**model.state_dict(), **stored})  # the very weights of the file
    model.tie_weights()
    model = model.double().eval()
    g = torch.Generator().manual_seed(seed)
    pad = cfg.pad_token_id
    src = ragged(g, [7, 1, 13, 4, 2], cfg.vocab_size, pad)
    labels = ragged(g, [5, 9, 1, 12, 3], cfg.decoder_vocab_size, pad)
    tgt = [[pad] + r[:-1] for r in labels]
    src_ids, src_mask = padded(src, pad)
    tgt_ids, tgt_mask = padded(tgt, pad)
    label_ids, _ = padded(labels, 0)
    out = model(input_ids=src_ids, attention_mask=src_mask, decoder_input_ids=tgt_ids, output_hidden_states=True, use_cache=False)
    logits = pack(out.logits, tgt_mask)
    y = pack(label_ids, tgt_mask)
    q = torch.log_softmax(logits, -1)
    V = logits.shape[-1]
    loss_sum = -((1 - SMOOTHING) * q.gather(1, y[:, None]).sum() + SMOOTHING / V * q.sum())
    loss = loss_sum / y.numel()
    ref = torch.nn.functional.cross_entropy(logits, y, label_smoothing=SMOOTHING)
    assert abs(loss - ref) < 1e-12
    loss.backward()
    i32 = lambda rows: torch.tensor([t for r in rows for t in r], dtype=torch.int32)
    res = dict(src_ids=i32(src), src_offsets=offsets(src), tgt_ids=i32(tgt), labels=i32(labels), tgt_offsets=offsets(tgt),
               encoder_output=pack(out.encoder_last_hidden_state, src_mask), decoder_output=pack(out.decoder_hidden_states[-1], tgt_mask),
               logits=logits, loss=loss[None], loss_sum=loss_sum[None])
    params = dict(model.named_parameters())
    missing = set(stored) - set(params) - {"final_logits_bias"}
    assert not missing, missing
    for name in stored:
        if name in params:
            res["grad." + name] = params[name].grad
    return {k: v.detach().to(torch.int32 if v.dtype == torch.int32 else torch.float32).contiguous() for k, v in res.items()}


@torch.inference_mode()
def generate(model, source, case, pad):
    kw = {**DEFAULTS, **case}
    prefix = kw.pop("prefix", None)
    if kw["bad_words_ids"] == "pad":
        kw["bad_words_ids"] = ["pad"]
    if kw["bad_words_ids"] is not None:
        kw["bad_words_ids"] = [[pad] if w == "pad" else w if isinstance(w, list) else [w] for w in kw["bad_words_ids"]]
    told = dict(kw, prefix=prefix or [])
    config = GenerationConfig(do_sample=False, pad_token_id=pad, eos_token_id=EOS, decoder_start_token_id=pad, return_dict_in_generate=True,
                              output_scores=True, **kw)
    saved, model.generation_config = model.generation_config, GenerationConfig()  # nothing comes from the model's own file
    extra = {} if prefix is None else dict(decoder_input_ids=torch.tensor([[pad] + prefix]))
    ids = torch.tensor([source])
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, **extra)
    model.generation_config = saved
    n_prompt = 1 + len(prefix or [])
    hyps = []
    for i, seq in enumerate(out.sequences.tolist()):
        if kw["num_beams"] > 1:
            n = int((out.beam_indices[i] >= 0).sum())
            score = float(out.sequences_scores[i])
        else:
            tail = seq[n_prompt:]
            n = tail.index(EOS) + 1 if EOS in tail else len(tail)
            score = None
        hyps.append(dict(tokens=seq[1:n_prompt + n], score=score))
    return told, hyps


def main(root):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for directory, spec in MODELS.items():
        model, cfg = make_model(spec)
        path = root / directory
        path.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(path)
        model = MarianMTModel.from_pretrained(path).eval()
        stored = load_file(path / "model.safetensors")
        save_file(goldens(model, cfg, stored, spec["seed"] + 100), path / "goldens.safetensors", metadata={"script": "tools/goldens/make_marian.py"})
        exact = MarianMTModel.from_pretrained(path).double().eval()
        full = directory == "marian_tiny"
        g = torch.Generator().manual_seed(spec["seed"] + 200)
        lengths = torch.randint(1, 17, (24 if full else 8,), generator=g).tolist()
        sources = ragged(g, lengths, cfg.vocab_size, cfg.pad_token_id)
        cases, close = [], 0
        for name in (CASES if full else FEW):
            outputs, told = [], None
            for s in sources:
                told, hyps = generate(model, s, CASES[name], cfg.pad_token_id)
                _, check = generate(exact, s, CASES[name], cfg.pad_token_id)
                if [h["tokens"] for h in hyps] != [h["tokens"] for h in check]:
                    close += 1  # hypotheses so close that float32 decides: no golden
                    hyps = None
                outputs.append(hyps)
            lens = [len(o[0]["tokens"]) for o in outputs if o]
            print(directory, name, "lengths", min(lens), sum(lens) / len(lens), max(lens))
            cases.append(dict(name=name, params=told, outputs=outputs))
        print(directory, "sources left out because float32 and float64 differ:", close)
        text = ["{", f'"script": "tools/goldens/make_marian.py", "torch": "{torch.__version__}", "transformers": "{transformers.__version__}",',
                f'"pad_token_id": {cfg.pad_token_id}, "eos_token_id": {EOS}, "decoder_start_token_id": {cfg.pad_token_id},',
                f'"sources": {json.dumps(sources)},', '"cases": [']
        for i, c in enumerate(cases):
            short = [None if o is None else [dict(tokens=h["tokens"], score=None if h["score"] is None else round(h["score"], 7)) for h in o]
                     for o in c["outputs"]]
            text.append(f'{{"name": "{c["name"]}", "params": {json.dumps(c["params"])},\n "outputs": {json.dumps(short, separators=(",", ":"))}}}' +
                        ("," if i + 1 < len(cases) else ""))
        (path / "generate.json").write_text("\n".join(text + ["]}"]) + "\n")
        for file in path.iterdir():
            file.chmod(0o644)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[2] / "tests/goldens")
