"""Train tiny models of many architectures beside plain training, and check every promise made for them.

    python scripts/check_architectures.py [--model NAME ...] [--percent 80] [--time-limit 3] [--output FILE.md]

The models are transformers' (language, vision, audio, several modalities) with tiny configurations and random
weights, the convolutional networks that monetlite brings, and models with breaks (`models_with_breaks.py`). Each trains wholly captured or in pieces, within its
budget, or is refused with a reason. `difference` is the largest of any gradient or buffer in four steps, relative to
its largest entry (or to 1e-5 of the largest of all, if that is more).
"""

import argparse
import copy
import datetime
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models_with_breaks
import numpy as np
import torch
from torch import nn

import monetlite
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.errors import InfeasibleBudget, MonetliteError
from monetlite.profiling.meters import meter_for

STEPS = 4
NEGLIGIBLE = 1e-5
"""Part of the largest gradient, below which another one is noise."""
BATCH, LENGTH, VOCABULARY = 4, 24, 99
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CAUSAL = [
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "opt",
    "bloom",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "stablelm",
    "olmo",
    "olmo2",
    "falcon",
    "mpt",
    "codegen",
    "biogpt",
    "xglm",
    "cohere",
    "starcoder2",
    "granite",
    "persimmon",
    "nemotron",
    "glm",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "rwkv",
    "recurrent_gemma",
    "openai-gpt",
    "ctrl",
    "deepseek_v3",
    "smollm3",
]
MASKED = [
    "bert",
    "roberta",
    "albert",
    "distilbert",
    "electra",
    "mobilebert",
    "deberta",
    "deberta-v2",
    "camembert",
    "xlm-roberta",
    "convbert",
    "squeezebert",
    "layoutlm",
    "longformer",
    "big_bird",
    "mpnet",
    "yoso",
    "roformer",
    "fnet",
    "modernbert",
    "esm",
    "funnel",
    "ibert",
    "rembert",
    "xlnet",
]
SEQUENCES = [
    "t5",
    "mt5",
    "bart",
    "mbart",
    "pegasus",
    "marian",
    "blenderbot",
    "m2m_100",
    "led",
    "longt5",
    "prophetnet",
    "bigbird_pegasus",
]
IMAGES = [
    "vit",
    "deit",
    "beit",
    "swin",
    "swinv2",
    "convnext",
    "convnextv2",
    "resnet",
    "regnet",
    "mobilenet_v1",
    "mobilenet_v2",
    "mobilevit",
    "poolformer",
    "segformer",
    "efficientnet",
    "bit",
    "dinov2",
    "pvt",
    "focalnet",
    "vit_msn",
    "data2vec-vision",
    "hiera",
]
OWN = ["resnet18", "mobilenet_v2", "unet", "vgg11", "densenet121", "googlenet"]


def _labels(count: int) -> torch.Tensor:
    return torch.randint(0, count, (BATCH,))


def _tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))


def causal(kind: str) -> tuple[nn.Module, Any]:
    import transformers

    config = _config(kind)
    tokens = _tokens()
    return transformers.AutoModelForCausalLM.from_config(config), {"input_ids": tokens, "labels": tokens}


def classified(kind: str) -> tuple[nn.Module, Any]:
    import transformers

    config = _config(kind, num_labels=3)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    return model, {"input_ids": _tokens(), "labels": _labels(3)}


def sequences(kind: str) -> tuple[nn.Module, Any]:
    import transformers

    config = _config(
        kind, d_model=32, encoder_layers=2, decoder_layers=2, d_ff=64, d_kv=8, num_layers=2, num_heads=4,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        decoder_start_token_id=0, attention_window=8, local_radius=7, num_encoder_layers=2, num_decoder_layers=2,
        num_encoder_attention_heads=4, num_decoder_attention_heads=4, block_size=8, num_random_blocks=1,
        max_encoder_position_embeddings=64, max_decoder_position_embeddings=64,
    )  # fmt: skip
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    return model, {"input_ids": _tokens(), "labels": _tokens()}


def images(kind: str) -> tuple[nn.Module, Any]:
    import transformers

    size = 64
    stages = {
        "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "hidden_sizes": [16, 32, 32, 64],
        "embedding_size": 16, "patch_size": 4, "window_size": 4,
    }  # fmt: skip
    plain = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    keys = {"image_size": size, "num_labels": 3}
    if kind in ("vit", "deit", "beit", "dinov2", "vit_msn", "data2vec-vision"):
        keys |= plain | {"patch_size": 16}
    elif kind in ("swin", "swinv2", "resnet", "regnet", "convnext", "convnextv2", "bit", "focalnet", "dinat"):
        keys |= stages
    config = _config(kind, tiny=False, **keys)
    if kind == "deit":
        config.architectures = ["DeiTForImageClassification"]
    model = transformers.AutoModelForImageClassification.from_config(config)
    side = config.image_size if isinstance(getattr(config, "image_size", None), int) else size
    return model, {"pixel_values": torch.randn(BATCH, 3, side, side), "labels": _labels(3)}


def _config(kind: str, tiny: bool = True, **keys: Any) -> Any:
    """A small configuration of a model type: of the keys, those that it knows."""
    import transformers

    known = transformers.AutoConfig.for_model(kind)
    wanted = {**(TINY if tiny else {}), **keys, **SPECIAL.get(kind, {})}
    names = {*vars(known), *getattr(known, "attribute_map", {})}
    always = ("num_labels", "decoder_start_token_id", *SPECIAL.get(kind, {}))
    chosen = {name: value for name, value in wanted.items() if name in names or name in always}
    return transformers.AutoConfig.for_model(kind, **chosen)


SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 8},
    "gptj": {"rotary_dim": 4, "n_layer": 2, "n_head": 4, "n_embd": 32},
    "codegen": {"rotary_dim": 4, "n_layer": 2, "n_head": 4, "n_embd": 32},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "shared_expert_intermediate_size": 32, "num_key_value_heads": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 2,
                  "head_dim": 8},
    "qwen3": {"head_dim": 8, "num_key_value_heads": 2},
    "gemma": {"head_dim": 8, "num_key_value_heads": 2},
    "gemma2": {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 8},
    "gemma3_text": {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 8},
    "glm": {"head_dim": 8, "num_key_value_heads": 2},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "bloom": {"n_layer": 2, "n_head": 4},
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64, "n_positions": 64},
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mamba": {"state_size": 8}, "falcon_mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8, "expand": 2},
    "rwkv": {"attention_hidden_size": 32, "context_length": 32},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16, "head_dim": 8},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2,
                    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "albert": {"embedding_size": 16}, "electra": {"embedding_size": 16}, "convbert": {"embedding_size": 16},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 1},
    "squeezebert": {"embedding_size": 32, "q_groups": 2, "k_groups": 2, "v_groups": 2, "post_attention_groups": 1,
                    "intermediate_groups": 2, "output_groups": 2},
    "longformer": {"attention_window": [8, 8]}, "big_bird": {"block_size": 4, "num_random_blocks": 1},
    "nystromformer": {"num_landmarks": 8, "segment_means_seq_len": 24},
    "yoso": {"use_expectation": True}, "roformer": {"embedding_size": 16},
    "esm": {"position_embedding_type": "rotary"},
    "funnel": {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1], "num_decoder_layers": 1},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "hiera": {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8], "image_size": [64, 64]},
    "poolformer": {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]},
    "segformer": {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]},
    "pvt": {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "image_size": 64, "num_attention_heads": [1, 2, 4, 8]},
    "bit": {"num_groups": 8, "embedding_size": 16, "hidden_sizes": [16, 32, 32, 64]},
    "swin": {"depths": [1, 1], "num_heads": [2, 2], "embed_dim": 16, "window_size": 4, "patch_size": 4},
    "mobilevit": {"hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [16, 16, 24, 32, 32, 48, 64]},
}  # fmt: skip


def detection(kind: str) -> tuple[nn.Module, Any]:
    import transformers

    if kind == "yolos":
        config = transformers.YolosConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=[64, 64],
            num_detection_tokens=5, num_labels=3,
        )  # fmt: skip
        model: nn.Module = transformers.YolosForObjectDetection(config)
    else:
        backbone = transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], out_features=["stage4"]
        )
        config = transformers.DetrConfig(
            use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone, d_model=32,
            encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=6, num_labels=3, backbone=None,
        )  # fmt: skip
        model = transformers.DetrForObjectDetection(config)
    labels = [
        {"class_labels": torch.tensor([0, 2]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.3], [0.3, 0.6, 0.1, 0.2]])}
        for _ in range(BATCH)
    ]
    return model, {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": labels}


def segmentation(_: str) -> tuple[nn.Module, Any]:
    import transformers

    model = transformers.SegformerForSemanticSegmentation(_config("segformer", tiny=False, num_labels=3))
    return model, {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": torch.randint(0, 3, (BATCH, 64, 64))}


def audio(kind: str) -> tuple[nn.Module, Any]:
    import transformers

    if kind == "whisper":
        config = transformers.WhisperConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=VOCABULARY, max_source_positions=50, num_mel_bins=16,
            max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            suppress_tokens=None, begin_suppress_tokens=None,
        )  # fmt: skip
        model: nn.Module = transformers.WhisperForConditionalGeneration(config)
        return model, {"input_features": torch.randn(BATCH, 16, 100), "labels": _tokens()}
    if kind == "audio-spectrogram-transformer":
        config = transformers.ASTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_length=64,
            num_mel_bins=32, num_labels=3,
        )  # fmt: skip
        model = transformers.ASTForAudioClassification(config)
        return model, {"input_values": torch.randn(BATCH, 64, 32), "labels": _labels(3)}
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=20,
        conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, num_feat_extract_layers=2, mask_time_length=2,
    )  # fmt: skip
    model = transformers.AutoModelForCTC.from_config(config)
    return model, {"input_values": torch.randn(BATCH, 800), "labels": torch.randint(1, 20, (BATCH, 8))}


def modalities(kind: str) -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.CLIPConfig(
        text_config={**TINY, "projection_dim": 16},
        vision_config={**TINY, "image_size": 64, "patch_size": 16, "projection_dim": 16},
        projection_dim=16,
    )
    model = transformers.CLIPModel(config)
    inputs = {"input_ids": _tokens(), "pixel_values": torch.randn(BATCH, 3, 64, 64), "return_loss": True}
    return model, inputs


def own(kind: str) -> tuple[nn.Module, Any]:
    from monetlite.models import build_model

    built = build_model(kind, batch=2, input_size=(64, 64))
    return built.model, built.example_inputs


BUILDERS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    **{kind: lambda kind=kind: causal(kind) for kind in CAUSAL},  # type: ignore[misc]
    **{kind: lambda kind=kind: classified(kind) for kind in MASKED},  # type: ignore[misc]
    **{kind: lambda kind=kind: sequences(kind) for kind in SEQUENCES},  # type: ignore[misc]
    **{kind: lambda kind=kind: images(kind) for kind in IMAGES},  # type: ignore[misc]
    **{kind: lambda kind=kind: detection(kind) for kind in ("detr", "yolos")},  # type: ignore[misc]
    "segformer segmentation": lambda: segmentation(""),
    **{
        kind: lambda kind=kind: audio(kind)  # type: ignore[misc]
        for kind in ("wav2vec2", "hubert", "wavlm", "whisper", "audio-spectrogram-transformer")
    },
    "clip": lambda: modalities("clip"),
    **{f"own {kind}": lambda kind=kind: own(kind) for kind in OWN},  # type: ignore[misc]
}


BUILDERS |= {name: lambda of=of: (of[0](), of[1]()) for name, of in models_with_breaks.MODELS.items()}  # type: ignore[misc]


def check(name: str, percent: float, time_limit: float) -> list[str]:
    """One row of the table."""
    torch.manual_seed(0)
    model, inputs = BUILDERS[name]()
    model = model.train()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})
    plain = copy.deepcopy(model)
    plain_bytes = Trainee(copy.deepcopy(model), args, kwargs, default_loss, "cpu").memory().peak_bytes
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        while True:
            budget_bytes = int(percent / 100 * plain_bytes)
            wrapper = monetlite.MONeTWrapper(
                copy.deepcopy(model), budget=budget_bytes, time_limit=time_limit, wait=True
            )
            expected, ours = (Trainee(item, args, kwargs, default_loss, "cpu") for item in (plain, wrapper))
            try:
                difference = steps_difference(expected, ours)
                break
            except InfeasibleBudget:
                if percent >= 110:
                    raise
                percent, plain = percent + 10, copy.deepcopy(model)
                torch._dynamo.reset()
    seconds = time.monotonic() - began
    for _ in range(2):  # a step that is being recorded ends
        ours.step()
    peak_bytes, schedule = ours.memory().peak_bytes, wrapper.schedule
    said = [str(item.message) for item in told if "can't be captured whole" in str(item.message)]
    how = said[0].partition("in ")[2].partition(";")[0].partition(" of the")[0] if said else "whole"
    if schedule is None:
        return [name, "not planned", f"{difference:.0e}", "", "", "", "", f"{seconds:.0f}"]
    kept = "yes" if peak_bytes <= budget_bytes else "NO"
    off = schedule.peak_bytes / peak_bytes - 1
    return [
        name, how, f"{difference:.0e}", f"{percent:.0f}%", kept, f"{off:+.1%}",
        f"{schedule.overhead:+.1%}", f"{seconds:.0f}",
    ]  # fmt: skip


def steps_difference(expected: Trainee, ours: Trainee) -> float:
    """Largest relative difference of gradients and buffers over some steps, which also leave the generator the same."""
    largest = 0.0
    for seed in range(STEPS):
        np.random.seed(seed)
        one = expected.snapshot(seed)
        np.random.seed(seed)  # wav2vec 2.0 draws its masks from it
        other = ours.snapshot(seed)
        assert torch.equal(one.random_state, other.random_state), "the generator differs"
        for theirs, mine in ((one.gradients, other.gradients), (one.buffers, other.buffers)):
            assert theirs.keys() == mine.keys(), sorted(set(theirs) ^ set(mine))[:3]
            most = {name: float(tensor.float().abs().max()) for name, tensor in theirs.items() if tensor.numel()}
            # A gradient that is zero but for rounding (that of a bias of keys) says nothing.
            least = NEGLIGIBLE * max(most.values(), default=0.0) or 1.0
            for name, scale in most.items():
                off = float((theirs[name].float() - mine[name].float()).abs().max())
                largest = max(largest, off / max(scale, least))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="*", choices=list(BUILDERS), default=list(BUILDERS))
    parser.add_argument("--percent", type=float, default=80.0, help="budget, of plain training's peak")
    parser.add_argument("--time-limit", type=float, default=3.0)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    environment = meter_for("cpu").environment()
    lines = [
        f"# Architectures, {datetime.date.today()}",
        "",
        f"{environment['device']}, {environment['threads']} threads, torch {torch.__version__}, commit "
        f"{commit.stdout.strip()}. Written by `scripts/check_architectures.py`; {STEPS} steps each. The budget is "
        f"{options.percent:g}% of plain training's peak, or the first that fits in steps of 10%.",
        "",
        "| model | captured | difference | budget | kept | predicted | overhead | seconds |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    print("\n".join(lines), flush=True)
    for name in options.model:
        try:
            row = check(name, options.percent, options.time_limit)
        except MonetliteError as error:
            row = [name, f"refused: {str(error).splitlines()[0][:200]}", *[""] * 6]
        except Exception as error:
            row = [name, f"FAILED: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}", *[""] * 6]
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
        torch._dynamo.reset()
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
