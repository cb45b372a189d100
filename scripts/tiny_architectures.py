"""Tiny models of many architectures, with random weights and inputs: what `check_architectures.py` trains."""

from collections.abc import Callable
from typing import Any

import models_with_breaks
import torch
from torch import nn

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
    "nystromformer",
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
    keys: dict[str, Any] = {"image_size": size, "num_labels": 3}
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
