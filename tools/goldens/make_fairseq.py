#!/usr/bin/env python3
"""Makes tests/goldens/fairseq_*: tiny random models of transformers' port of fairseq's Transformer (FSMT), and what they compute.

usage: make_fairseq.py [OUT]     OUT defaults to tests/goldens beside this file's repository

fairseq_fsmt/     as save_pretrained writes it: separate vocabularies, source, target and output tables of their own; ReLU.
fairseq_args/     the layout docs/translating.md describes: model.safetensors with fairseq's own names (self-attention of the encoder
                  joined to in_proj_weight, version marks and _float_tensor as checkpoints have them, tied tables stored three times)
                  and config.json with the arguments of a training; one vocabulary, tied tables, GELU.
fairseq_learned/  the same layout for a pre-LN model with learned positions and a target table tied to the output: no FSMT computes it;
                  the reference is written out below, in float64.
Each has goldens.safetensors (packed batch and logits, as make_marian.py documents them) and the first two generate.json. The models
were trained for a moment, so that their beams are worth searching.
"""
import json, math, pathlib, sys

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers import FSMTConfig, FSMTForConditionalGeneration as FSMT, GenerationConfig

from make_marian import DEFAULTS, offsets, pack, padded

PAD, EOS, FIRST = 1, 2, 4  # FIRST: of the ids behind <s>, <pad>, </s>, <unk>
STEPS = 700
SIZES = dict(d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=24,
             decoder_ffn_dim=20, max_position_embeddings=40)
MODELS = {
    "fairseq_fsmt": dict(seed=21, src_vocab_size=37, tgt_vocab_size=33, activation_function="relu", tie_word_embeddings=False, **SIZES),
    "fairseq_args": dict(seed=22, src_vocab_size=35, tgt_vocab_size=35, activation_function="gelu", tie_word_embeddings=True, **SIZES),
}
CASES = {
    "greedy": dict(num_beams=1),
    "beam2": dict(num_beams=2),
    "beam5_nbest": dict(num_beams=5, num_return_sequences=5),
    "beam4_early_lp0.6": dict(early_stopping=True, length_penalty=0.6),
}  # No prefix: with a cache FSMT reads several tokens at once without a causal mask, so that a prefix's tokens see those behind them.


def ragged(g, lengths, vocab):
    return [torch.randint(FIRST, vocab, (n - 1,), generator=g).tolist() + [EOS] for n in lengths]


def rewrite(g, source, vocab):
    """A noisy translation: the source reversed, its ids mapped, some doubled, some dropped, some replaced."""
    out = []
    for x in reversed(source[:-1]):
        y = x * 7 % (vocab - FIRST)
        for _ in range(int(torch.multinomial(torch.tensor([0.15, 0.6, 0.25]), 1, generator=g))):
            out.append(FIRST + (y + (float(torch.rand((), generator=g)) < 0.25)) % (vocab - FIRST))
    return out + [EOS]


def make_model(spec):
    spec = dict(spec)
    g = torch.Generator().manual_seed(spec.pop("seed"))
    torch.manual_seed(1)
    cfg = FSMTConfig(langs=["en", "de"], dropout=0.0, **spec)
    model = FSMT(cfg).train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "embed_positions" in name:
                p.requires_grad = False
                continue
            p.copy_(0.2 * torch.randn(p.shape, generator=g) + (1 if "layer_norm.weight" in name else 0))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=4e-3)
    for _ in range(STEPS):
        src = ragged(g, torch.randint(1, 13, (48,), generator=g).tolist(), cfg.src_vocab_size)
        labels = [rewrite(g, r, cfg.tgt_vocab_size) for r in src]
        src_ids, src_mask = padded(src, PAD)
        tgt_ids, _ = padded([[EOS] + r[:-1] for r in labels], PAD)
        label_ids, _ = padded(labels, -100)
        logits = model(input_ids=src_ids, attention_mask=src_mask, decoder_input_ids=tgt_ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), label_ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained to", loss.item())
    model.config.dropout = 0.1
    return model.eval(), cfg


def batch(seed, source_vocab, target_vocab):
    g = torch.Generator().manual_seed(seed)
    return ragged(g, [7, 1, 11, 4, 2], source_vocab), ragged(g, [5, 9, 1, 12, 3], target_vocab)


def packed(src, labels, logits):
    i32 = lambda rows: torch.tensor([t for r in rows for t in r], dtype=torch.int32)
    tgt = [[EOS] + r[:-1] for r in labels]
    return dict(src_ids=i32(src), src_offsets=offsets(src), tgt_ids=i32(tgt), labels=i32(labels), tgt_offsets=offsets(tgt),
                logits=logits.detach().float().contiguous())


def goldens(model, cfg, seed):
    src, labels = batch(seed, cfg.src_vocab_size, cfg.tgt_vocab_size)
    src_ids, src_mask = padded(src, PAD)
    tgt_ids, tgt_mask = padded([[EOS] + r[:-1] for r in labels], PAD)
    out = model(input_ids=src_ids, attention_mask=src_mask, decoder_input_ids=tgt_ids, use_cache=False)
    return packed(src, labels, pack(out.logits, tgt_mask))


@torch.inference_mode()
def generate(model, source, case):
    kw = {**DEFAULTS, "bad_words_ids": [[PAD]], "forced_eos_token_id": EOS, **case}
    config = GenerationConfig(do_sample=False, pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=EOS, return_dict_in_generate=True,
                              output_scores=True, **kw)
    model.generation_config = GenerationConfig()  # nothing comes from the model's own file
    ids = torch.tensor([source])
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    hyps = []
    for i, seq in enumerate(out.sequences.tolist()):
        if kw["num_beams"] > 1:
            n, score = int((out.beam_indices[i] >= 0).sum()), round(float(out.sequences_scores[i]), 7)
        else:
            tail = seq[1:]
            n, score = tail.index(EOS) + 1 if EOS in tail else len(tail), None
        hyps.append(dict(tokens=seq[1:1 + n], score=score))
    return dict(kw, prefix=[]), hyps


def fairseq_names(state, sides_joined=("encoder",)):
    """FSMT's state dict as a fairseq checkpoint has it."""
    out = {}
    for name, value in state.items():
        name = name.removeprefix("model.")
        if "embed_positions" in name:
            out[name.replace("weight", "_float_tensor")] = torch.zeros(1)
            continue
        out[name] = value.clone()
    for name in [n for n in out if "self_attn.q_proj" in n and n.startswith(sides_joined)]:
        parts = [out.pop(name.replace("q_proj", p)) for p in ("q_proj", "k_proj", "v_proj")]
        out[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    out["encoder.version"], out["decoder.version"] = torch.tensor([3.0]), torch.tensor([3.0])
    return out


def arguments(**more):
    """What json.dump(vars(args)) of a training gives, but for arguments that have nothing to do with the model."""
    c = SIZES
    args = dict(arch="transformer_iwslt_de_en", activation_fn="relu", adaptive_softmax_cutoff=None, adaptive_softmax_dropout=0,
                attention_dropout=0.1, clip_norm=0.0, criterion="label_smoothed_cross_entropy", cross_self_attention=False, data="data-bin",
                dropout=0.3, encoder_embed_dim=c["d_model"], decoder_embed_dim=c["d_model"], decoder_input_dim=c["d_model"],
                decoder_output_dim=c["d_model"], encoder_layers=c["encoder_layers"], decoder_layers=c["decoder_layers"],
                encoder_attention_heads=c["encoder_attention_heads"], decoder_attention_heads=c["decoder_attention_heads"],
                encoder_ffn_embed_dim=c["encoder_ffn_dim"], decoder_ffn_embed_dim=c["decoder_ffn_dim"], encoder_learned_pos=False,
                decoder_learned_pos=False, encoder_normalize_before=False, decoder_normalize_before=False, layernorm_embedding=False,
                lr=[0.0005], max_source_positions=c["max_position_embeddings"], max_target_positions=c["max_position_embeddings"],
                no_scale_embedding=False, no_token_positional_embeddings=False, relu_dropout=0.1, share_all_embeddings=False,
                share_decoder_input_output_embed=False, source_lang="en", target_lang="de", task="translation")
    assert set(more) <= set(args), more
    return {**args, **more}


def learned_model(seed):
    """State dict of a pre-LN fairseq model with learned positions (their first two rows belong to <s> and <pad>)."""
    g = torch.Generator().manual_seed(seed)
    H, source, target = SIZES["d_model"], 37, 33
    state = {}
    add = lambda name, *shape: state.__setitem__(name, 0.3 * torch.randn(shape, generator=g) + ("norm" in name and name.endswith("weight")))

    def linear(name, o, i):
        add(name + ".weight", o, i), add(name + ".bias", o)

    add("encoder.embed_tokens.weight", source, H), add("decoder.embed_tokens.weight", target, H)
    add("encoder.embed_positions.weight", 40 + PAD + 1, H), add("decoder.embed_positions.weight", 32 + PAD + 1, H)
    for side in ("encoder", "decoder"):
        for l in range(SIZES[side + "_layers"]):
            base = f"{side}.layers.{l}."
            attentions = ["self_attn"] + ["encoder_attn"] * (side == "decoder")
            for a in attentions:
                add(base + a + ".in_proj_weight", 3 * H, H), add(base + a + ".in_proj_bias", 3 * H)
                linear(base + a + ".out_proj", H, H)
            linear(base + "fc1", SIZES[side + "_ffn_dim"], H), linear(base + "fc2", H, SIZES[side + "_ffn_dim"])
            for i in range(len(attentions) + 1):  # as the oldest checkpoints name them
                add(f"{base}layer_norms.{i}.weight", H), add(f"{base}layer_norms.{i}.bias", H)
        add(side + ".layer_norm.weight", H), add(side + ".layer_norm.bias", H)
    return state


def learned_logits(state, src, labels):
    """The model above, a sentence at a time, in float64."""
    w = {k: v.double() for k, v in state.items()}
    H = SIZES["d_model"]
    norm = lambda x, name: F.layer_norm(x, (H,), w[name + ".weight"], w[name + ".bias"])

    def attend(x, memory, base, heads, causal):
        q, k, v = (F.linear(y, a, b) for y, a, b in zip((x, memory, memory), w[base + ".in_proj_weight"].chunk(3), w[base + ".in_proj_bias"].chunk(3)))
        split = lambda t: t.view(t.shape[0], heads, -1).transpose(0, 1)
        s = split(q) @ split(k).transpose(1, 2) / math.sqrt(H // heads)
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -math.inf)
        y = (s.softmax(-1) @ split(v)).transpose(0, 1).reshape(-1, H)
        return F.linear(y, w[base + ".out_proj.weight"], w[base + ".out_proj.bias"])

    def stack(side, ids, memory):
        ids = torch.tensor(ids)
        x = w[side + ".embed_tokens.weight"][ids] + w[side + ".embed_positions.weight"][PAD + 1:PAD + 1 + len(ids)]
        heads = SIZES[side + "_attention_heads"]
        for l in range(SIZES[side + "_layers"]):
            base = f"{side}.layers.{l}."
            y = norm(x, base + "layer_norms.0")
            x = x + attend(y, y, base + "self_attn", heads, memory is not None)
            if memory is not None:
                x = x + attend(norm(x, base + "layer_norms.1"), memory, base + "encoder_attn", heads, False)
            y = norm(x, f"{base}layer_norms.{1 if memory is None else 2}")
            y = F.relu(F.linear(y, w[base + "fc1.weight"], w[base + "fc1.bias"]))
            x = x + F.linear(y, w[base + "fc2.weight"], w[base + "fc2.bias"])
        return norm(x, side + ".layer_norm")

    out = [stack("decoder", [EOS] + t[:-1], stack("encoder", s, None)) for s, t in zip(src, labels)]
    return torch.cat(out) @ w["decoder.embed_tokens.weight"].T


def write_generate(path, model, exact, seed, vocab):
    g = torch.Generator().manual_seed(seed)
    sources = ragged(g, torch.randint(1, 13, (8,), generator=g).tolist(), vocab)
    cases, close = [], 0
    for name, case in CASES.items():
        outputs = []
        for s in sources:
            told, hyps = generate(model, s, case)
            if [h["tokens"] for h in hyps] != [h["tokens"] for h in generate(exact, s, case)[1]]:
                close, hyps = close + 1, None  # hypotheses so close that float32 decides: no golden
            outputs.append(hyps)
        print(path.name, name, "lengths", [len(o[0]["tokens"]) for o in outputs if o])
        cases.append(dict(name=name, params=told, outputs=outputs))
    print(path.name, "left out because float32 and float64 differ:", close)
    head = dict(script="tools/goldens/make_fairseq.py", torch=torch.__version__, transformers=transformers.__version__, pad_token_id=PAD,
                eos_token_id=EOS, decoder_start_token_id=EOS, sources=sources)
    text = json.dumps(head)[:-1] + ', "cases": [\n' + ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "\n]}\n"
    (path / "generate.json").write_text(text)


def main(root):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    # FSMT's own goes through float32, where float64's smallest number does not fit.
    transformers.models.fsmt.modeling_fsmt.fill_with_neg_inf = lambda t: t.fill_(torch.finfo(t.dtype).min)
    script = {"script": "tools/goldens/make_fairseq.py"}
    for directory, spec in MODELS.items():
        model, cfg = make_model(spec)
        path = root / directory
        path.mkdir(parents=True, exist_ok=True)
        exact = FSMT(cfg)
        exact.load_state_dict(model.state_dict())
        exact = exact.double().eval()
        if directory == "fairseq_fsmt":
            model.save_pretrained(path)
        else:
            save_file(fairseq_names(model.state_dict()), path / "model.safetensors")
            (path / "config.json").write_text(json.dumps(arguments(activation_fn="gelu", share_all_embeddings=True), indent=1) + "\n")
        save_file(goldens(exact, cfg, spec["seed"] + 100), path / "goldens.safetensors", metadata=script)
        write_generate(path, model, exact, spec["seed"] + 200, cfg.src_vocab_size)
    path = root / "fairseq_learned"
    path.mkdir(parents=True, exist_ok=True)
    state = learned_model(23)
    save_file({k: v.contiguous() for k, v in state.items()}, path / "model.safetensors")
    args = arguments(encoder_learned_pos=True, decoder_learned_pos=True, encoder_normalize_before=True, decoder_normalize_before=True,
                     share_decoder_input_output_embed=True, no_scale_embedding=True, max_target_positions=32)
    (path / "config.json").write_text(json.dumps(args, indent=1) + "\n")
    src, labels = batch(123, 37, 33)
    save_file(packed(src, labels, learned_logits(state, src, labels)), path / "goldens.safetensors", metadata=script)
    for directory in root.glob("fairseq_*"):
        for file in directory.iterdir():
            file.chmod(0o644)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[2] / "tests/goldens")
